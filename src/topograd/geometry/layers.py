"""Trace of a model's linear maps: every call z = W h of a parameter W, with its inputs and gradients.

Statement. A layer is a parameter W that the model uses as a linear map. One call gives M rows

    h_m (d_in)  →  z_m = W h_m (+ b)  (d_out),        δ_m = ∂loss/∂z_m,      m = 1..M

and a `Reducer` sees first the rows h and later, in the backward pass, the rows δ. Which calls these are:

    F.linear(x, W)                      nn.Linear, attention projections (a fused QKV is one layer), heads
    torch.addmm(b, x, W), x @ W         the Conv1D of Hugging Face; here W is (d_in, d_out)
    torch.conv1d, torch.conv2d          with one group; a row is a patch, d_in = channels · kernel positions

The calls themselves are watched, not the modules, so a matrix that is used without a module is seen too, and
a parameter with several names or several calls has one set of factors, over all its calls. Its layer is
called by the first of its names that is not an embedding's, without `.weight`. Whatever else happens to a
parameter (a lookup, a norm, a grouped convolution, a product by nn.MultiheadAttention) is kept as a reason
why it is not covered. The block of a bias b needs no factor of its own: it is G.

Symbols and shapes. `inputs(x)`: (M, d_in); `gradients(δ)`: (M, d_out). M = batch · positions.
Cost. A few microseconds for each torch function that the model calls.
Source: "Dead Directions: Geometric Singular Learning", §2 (K-FAC factorisation); convolutions as in "A
Kronecker- factored approximate Fisher matrix for convolution layers" (R. Grosse, J. Martens).
Limits. Compiled and scripted models hide their calls. x @ W.T and W x are not recognised: they are listed as
not covered. Activations must not be recomputed in the backward pass (no gradient checkpointing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from topograd.geometry.host_copy import check_finite


@dataclass(frozen=True)
class Call:
    """One multiplication by a weight."""

    weight: Tensor
    bias: Tensor | None
    source: Tensor
    """What the model passed; `inputs(source)` are the rows h."""
    inputs: Callable[[Tensor], Tensor]
    gradients: Callable[[Tensor], Tensor]
    sides: tuple[int, int]
    """d_in and d_out."""


class Reducer(Protocol):
    """Takes the rows of every call."""

    def refuses(self, layer: str, sides: tuple[int, int]) -> str | None:
        """Why this layer is left out, or None."""

    def see_inputs(self, layer: str, call: Call) -> None:
        """The rows h of one call."""

    def see_gradients(self, layer: str, rows: Tensor) -> None:
        """The rows δ (M, d_out) of one call, for one back-propagated vector."""


class CallTracer(TorchFunctionMode):
    """While this context is open, every call of the model's weights is passed to the reducer.

    No parameter may require a gradient meanwhile. The graph begins at `leaves`, the outputs of the first
    calls: a gradient with respect to those passes through every call behind them, and through nothing else.
    """

    def __init__(self, model: nn.Module, reducer: Reducer) -> None:
        super().__init__()
        self.leaves: list[Tensor] = []
        self._reducer = reducer
        check_finite(dict(model.named_parameters()))
        self._names: dict[int, list[str]] = {}  # every name of every parameter, by identity
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._layers = {key: _layer_name(model, names) for key, names in self._names.items()}
        self._covered: dict[int, str] = {}  # parameter -> the layer that has its factors
        self._reached: set[str] = set()
        self._reasons: dict[int, str] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        held = [key for key in _identities((*args, *kwargs.values())) if key in self._names]
        parts = result if isinstance(result, list | tuple) else [result]
        if not held or not any(isinstance(part, Tensor) for part in parts):  # a shape is not a use
            return result
        call = recognise(func, args, kwargs)
        if isinstance(call, Call) and id(call.weight) in self._names:
            layer = self._layers[id(call.weight)]
            refused = self._reducer.refuses(layer, call.sides)
            if not torch.is_grad_enabled():
                refused = "used where the model switches gradients off"
            if refused is None:
                own = {id(call.weight), id(call.bias)}
                self._covered.update((key, layer) for key in held if key in own)
                self._reasons.update((key, f"an input of {layer}") for key in held if key not in own)
                return self._follow(layer, call, result)
        else:
            refused = call if isinstance(call, str) else f"used by {_name_of(func)}"
        for key in held:
            self._reasons.setdefault(key, refused)
        return result

    def _follow(self, layer: str, call: Call, output: Tensor) -> Tensor:
        """Pass on the inputs now, the gradients when they arrive; begin the graph here if none is before."""
        self._reducer.see_inputs(layer, call)
        if not output.requires_grad:
            self.leaves.append(output.detach().requires_grad_())
            output = self.leaves[-1].clone()  # a model may overwrite this one, but not a leaf
        rows = call.gradients

        def arrived(gradient: Tensor) -> None:
            self._reached.add(layer)
            self._reducer.see_gradients(layer, rows(gradient))

        output.register_hook(arrived)
        return output

    def layers(self) -> list[str]:
        """The layers that a gradient reached, in the order of the model's parameters."""
        return [name for name in dict.fromkeys(self._layers.values()) if name in self._reached]

    def uncovered(self) -> dict[str, str]:
        """Each parameter that has no factors, or a use beside those in its factors, and the reason."""
        reasons = {}
        for key, names in self._names.items():
            if key in self._reasons:
                reasons[names[0]] = self._reasons[key]
            elif key not in self._covered:
                reasons[names[0]] = "not used in the forward pass"
            elif self._covered[key] not in self._reached:
                reasons[names[0]] = "no gradient reaches it"
        return reasons


def recognise(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Call | str | None:
    """The linear map that this call of a torch function is, a reason why it is not covered, or None.

    >>> call = recognise(F.linear, (torch.ones(5, 4, 3), torch.ones(2, 3)), {})
    >>> call.sides, call.inputs(call.source).shape
    ((3, 2), torch.Size([20, 3]))
    >>> recognise(torch.conv1d, (torch.ones(1, 4, 9), torch.ones(4, 1, 3)), {"groups": 4})
    'a convolution in 4 groups; only those in one group are covered'
    """
    if func is F.linear:
        given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
        d_out, d_in = given["weight"].shape
        return Call(given["weight"], given.get("bias"), given["input"], _rows, _rows, (d_in, d_out))
    if func in _PRODUCTS and not kwargs:
        *added, x, weight = args
        if isinstance(weight, Tensor) and weight.dim() == 2:
            bias = added[0] if added and added[0].dim() == 1 else None
            d_in, d_out = weight.shape
            return Call(weight, bias, x, _rows, _rows, (d_in, d_out))
    if func in _CONVOLUTIONS:
        return _convolution(_CONVOLUTIONS[func], args, kwargs)
    return None


_PRODUCTS = {torch.addmm, torch.mm, torch.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__}
_CONVOLUTIONS: dict[Callable[..., Any], int] = {torch.conv1d: 1, torch.conv2d: 2}


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _convolution(dims: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | str:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    given.update(zip(names, args, strict=False), **kwargs)
    if given["groups"] != 1:
        return f"a convolution in {given['groups']} groups; only those in one group are covered"
    weight = given["weight"]
    patches = partial(
        _patches,
        kernel=tuple(weight.shape[2:]),
        stride=_per_dimension(given["stride"], dims),
        padding=given["padding"],
        dilation=_per_dimension(given["dilation"], dims),
    )

    def channels_last(gradient: Tensor) -> Tensor:
        return _rows(gradient.movedim(-dims - 1, -1))

    sides = (weight[0].numel(), weight.shape[0])
    return Call(weight, given.get("bias"), given["input"], patches, channels_last, sides)


def _patches(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: str | int | tuple[int, ...],
    dilation: tuple[int, ...],
) -> Tensor:
    """(M, channels · kernel positions), in the order of weight.flatten(1), from (batch, channels, *space)."""
    dims = len(kernel)
    x = x if x.dim() == dims + 2 else x[None]
    if padding == "same":  # what is odd goes to the right, as in torch
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(n // 2, n - n // 2) for n in total]
    else:
        sides = [(n, n) for n in _per_dimension(0 if isinstance(padding, str) else padding, dims)]
    x = F.pad(x, [n for side in reversed(sides) for n in side])
    if dims == 1:
        x, kernel, stride, dilation = x[:, :, None], (1, *kernel), (1, *stride), (1, *dilation)
    return _rows(F.unfold(x, kernel, dilation, 0, stride).mT)


def _per_dimension(value: int | Iterable[int], dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _layer_name(model: nn.Module, names: list[str]) -> str:
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    chosen = next((name for name in names if not isinstance(owners[name], nn.Embedding)), names[0])
    return chosen.removesuffix(".weight")


def _identities(values: Iterable[Any]) -> Iterator[int]:
    """Of tensors among the arguments of a function, one level of lists included."""
    for value in values:
        if isinstance(value, Tensor):
            yield id(value)
        elif isinstance(value, list | tuple):
            yield from (id(item) for item in value if isinstance(item, Tensor))


def _name_of(func: Callable[..., Any]) -> str:
    """`embedding`, `layer_norm`; of an attribute such as `.T` its name."""
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name  # type: ignore[attr-defined]
