"""Trace of a model's linear maps: every call z = W h of a parameter W, with its inputs and gradients.

Statement. A layer is a parameter W that the model uses as a linear map. One call gives M rows

    h_m (d_in)  →  z_m = W h_m (+ b)  (d_out),        δ_m = ∂loss/∂z_m,      m = 1..M

and a `Reducer` sees first the rows h and later, in the backward pass, the rows δ. Which calls these are:

    F.linear(x, W)                      nn.Linear, attention projections (a fused QKV is one layer), heads
    torch.addmm(b, x, W), x @ W         the Conv1D of Hugging Face; here W is (d_in, d_out)
    W @ x                               of columns x (..., d_in, n), as Mamba's steps
    torch.conv1d, torch.conv2d          with one group; a row is a patch, d_in = channels · kernel positions
    torch.einsum("bsd,hde->bshe", x, W) whose sums run over all that W and x share
    nn.MultiheadAttention               its packed projection and its output; of cross-attention, three blocks

The weight may be rearranged before (`W.T`, `rearrange`, `split`, a slice): `rearranged.py`.

The calls themselves are watched, not the modules, so a matrix that is used without a module is seen too, and
a parameter with several names or several calls has one set of factors, over all its calls. Its layer is
called by the first of its names that is not an embedding's, without `.weight`; a block of its rows that is
used alone is a layer of its own, `name[0:64]`. Whatever else happens to a parameter (a lookup, a norm, a
grouped convolution) is kept as a reason why it is not covered. The block of a bias b needs no factor of its
own: it is G.

Symbols and shapes. `inputs(x)`: (M, d_in); `gradients(δ)`: (M, d_out). M = batch · positions.
Cost. A few microseconds for each torch function that the model calls.
Source: "Dead Directions: Geometric Singular Learning", §2 (K-FAC factorisation); convolutions as in "A
Kronecker- factored approximate Fisher matrix for convolution layers" (R. Grosse, J. Martens).
Limits. Scripted models hide their calls. W x of one matrix x is not recognised: it is listed as
not covered.
Activations must not be recomputed in the backward pass (no gradient checkpointing).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from topograd.geometry.host_copy import check_finite
from topograd.geometry.rearranged import ATTENTION_BODY, REARRANGING, View, einsum_of, row_block


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
    matrix: Callable[[Tensor], Tensor] = lambda weight: weight
    """From a tensor in the weight's shape to (d_out, d_in)."""


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
        self._shapes = {id(parameter): parameter.shape for parameter in model.parameters()}
        self._layers = {key: _layer_name(model, names) for key, names in self._names.items()}
        self._covered: dict[int, str] = {}  # parameter -> the layer that has its factors
        self._ways: dict[str, tuple[tuple[int, int], int]] = {}  # layer -> sides, and step along a row
        self._reached: set[str] = set()
        self._reasons: dict[int, str] = {}
        self._views: dict[int, View] = {}  # by identity, of this pass
        self._blocks: dict[str, list[str]] = {}  # layer -> blocks of its rows that are used alone
        self.layouts: dict[str, tuple[str, Tensor]] = {}
        """Of layers with a rearranged weight: the parameter, and where in it each entry (d_out, d_in) is."""

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._views.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return ATTENTION_BODY(*args, **kwargs)
        result = func(*args, **kwargs)
        seen = list(_identities((*args, *kwargs.values())))
        held = [self._views[key].parameter if key in self._views else key for key in seen]
        held = [key for key in held if key in self._names]
        parts = result if isinstance(result, list | tuple) else [result]
        if not held or not any(isinstance(part, Tensor) for part in parts):  # a shape is not a use
            return result
        if func in REARRANGING and seen and self._rearrange(func, args, kwargs, parts):
            return result
        call = recognise(func, args, kwargs)
        refused: str | None = call if isinstance(call, str) else f"used by {_name_of(func)}"
        if isinstance(call, Call) and (key := self._parameter(call.weight)) is not None:
            layer = self._layer_of(call, key, func)
            refused = None if layer is None else self._reducer.refuses(layer, call.sides)
            if layer is None:
                layer, refused = self._layers[key], "used by a part of it that is no block of rows"
            if not torch.is_grad_enabled():
                refused = "used where the model switches gradients off"
            way = call.sides, call.matrix(call.weight).stride(-1)
            if refused is None and self._ways.setdefault(layer, way) != way:
                refused = "used as W and as its transpose"
            if refused is None:
                own = {key, id(call.bias)}
                if call.bias is not None and id(call.bias) in self._views:
                    own.add(self._views[id(call.bias)].parameter)
                self._covered.update((one, layer) for one in held if one in own)
                self._reasons.update((one, f"an input of {layer}") for one in held if one not in own)
                return self._follow(layer, call, result)
        for key in held:
            self._reasons.setdefault(key, str(refused))
        return result

    def _parameter(self, weight: Tensor) -> int | None:
        """The parameter that a weight is, or is a rearrangement of."""
        key = self._views[id(weight)].parameter if id(weight) in self._views else id(weight)
        return key if key in self._names else None

    def _rearrange(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: Iterable[Any]
    ) -> bool:
        """Do to the places of a weight's entries what is done to the weight; False if it is not the first."""
        weight = args[0] if args else None
        if not isinstance(weight, Tensor) or (key := self._parameter(weight)) is None:
            return False
        places = func(self._places(weight), *args[1:], **kwargs)
        every = places if isinstance(places, list | tuple) else [places]
        for part, where in zip(parts, every, strict=True):
            self._views[id(part)] = View(part, key, where)
        return True

    def _places(self, weight: Tensor) -> Tensor:
        """Where in its parameter each entry of a weight is."""
        if id(weight) in self._views:
            return self._views[id(weight)].places
        return torch.arange(weight.numel(), device=weight.device).view(weight.shape)

    def _layer_of(self, call: Call, key: int, func: Callable[..., Any]) -> str | None:
        """The layer of a call: the parameter's, or a block of its rows; None if it is neither."""
        layer = self._layers[key]
        if id(call.weight) not in self._views and func is not torch.einsum:
            return layer
        places = call.matrix(self._places(call.weight))
        block = row_block(places, self._shapes[key])
        if block is None:
            return None
        if block:
            blocks = self._blocks.setdefault(layer, [])
            layer += block
            blocks += [layer] if layer not in blocks else []
        self.layouts[layer] = (self._names[key][0], places)
        return layer

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
        every = [
            name
            for layer in dict.fromkeys(self._layers.values())
            for name in (layer, *self._blocks.get(layer, ()))
        ]
        return [name for name in every if name in self._reached]

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
            return Call(weight, bias, x, _rows, _rows, (d_in, d_out), lambda weight: weight.mT)
    if func in _PRODUCTS and len(args) == 2 and not kwargs and args[0].dim() == 2 < args[1].dim():
        d_out, d_in = args[0].shape
        return Call(args[0], None, args[1], _columns, _columns, (d_in, d_out))
    if func is torch.einsum and len(args) == 3 and not kwargs:
        return _einsum(*args)
    if func in _CONVOLUTIONS:
        return _convolution(_CONVOLUTIONS[func], args, kwargs)
    return None


_PRODUCTS = {torch.addmm, torch.mm, torch.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__}
_CONVOLUTIONS: dict[Callable[..., Any], int] = {torch.conv1d: 1, torch.conv2d: 2}


def _einsum(equation: str, x: Tensor, weight: Tensor) -> Call | None:
    """A sum over all that x and the weight, which comes second, have in common."""
    found = einsum_of(equation, x.dim(), weight.dim()) if isinstance(weight, Tensor) else None
    if found is None:
        return None
    rows, gradients, matrix = found
    d_out, d_in = matrix(weight.detach()).shape
    return Call(weight, None, x, rows, gradients, (d_in, d_out), matrix)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _columns(x: Tensor) -> Tensor:
    return _rows(x.mT)


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
    bias, source = given.get("bias"), given["input"]
    return Call(weight, bias, source, patches, channels_last, sides, lambda weight: weight.flatten(1))


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
