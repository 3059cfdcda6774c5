"""Powers of t of every number in a network: a min-plus pass over the operators that a module runs.

Statement. Let some entries of the weights be t^α, others exactly 0, all others of size 1. Then each number
x that the network computes, forward and backward, is c t^v as t → 0, and v follows from operator to operator:

    v(x + y) = min(v(x), v(y))     v(x y) = v(x) + v(y)     v(1/x) = -v(x)     v(x^n) = n v(x)
    v(σ(x)) = v(x) where σ(0) = 0 (tanh, erf, ReLU where it is open), and 0 where σ(0) ≠ 0 (exp, sigmoid)

with v = ∞ for what is exactly zero. Products of matrices, sums and convolutions are sums of products. Nothing
is known of an architecture: rotary pairs, shared keys and values, gates, norms and skips are operators.

How. A `Powered` tensor has its value, at one small t, and its *size* s^v with s = 2^-36, of which 0 is v = ∞.
A multilinear operator applied to sizes gives sums of s^v: their largest term, once each is rounded to a whole
power. So an operator needs a rule only where it is not multilinear, and autograd makes the backward pass.

Symbols and shapes. Value and size have one shape. Cost: every operator twice.
Source: "Dead Directions: Geometric Singular Learning", Theorem 43 (distances on a graph); the pass is ours.
Limits. Generic numbers: sums that cancel exactly are not seen. (Known ones: below the topmost RMSNorm of a
chain whose other maps are homogeneous, where the gradient is orthogonal to the stream, and a router whose
experts read the dead channel alike.) Whole powers up to 28, sums of fewer than 2^18 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree

from topograd.errors import GeometryError

BITS = 36
"""Of one power of t."""
aten = torch.ops.aten


class Powered(Tensor):
    """A tensor with the power of t of every entry."""

    value: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, value: Tensor, size: Tensor) -> Powered:
        made: Powered = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )
        made.value, made.scale = value, size
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Powered(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if func._schema.name.endswith("_"):
            return _in_place(func, args, kwargs)
        known = packet in _MOVES or packet in _LINEAR or packet in _RULES
        if not known and func in decomposition_table:
            return decomposition_table[func](*args, **kwargs)
        if not known and (made := func.decompose(*args, **kwargs)) is not NotImplemented:
            return made
        values = pytree.tree_map_only(Powered, lambda x: x.value, (args, kwargs))
        result = func(*values[0], **values[1])
        if not any(isinstance(x, Tensor) and x.is_floating_point() for x in pytree.tree_leaves(result)):
            return result
        if packet in _MADE:
            return pytree.tree_map_only(Tensor, powered, result)
        if not known:
            raise _unknown(packet)
        sizes = _sizes(func, args, kwargs)
        return pytree.tree_map(Powered if packet in _MOVES else _rounded, result, sizes)


def powered(value: Tensor, powers: Tensor | None = None) -> Powered:
    """A tensor whose entries have these powers of t; 0 by default. An entry that is 0 is exactly so.

    >>> x = powered(torch.tensor([2.0, 0.5, 0.0]), torch.tensor([1.0, 0.0, 0.0]))
    >>> powers_of(x * x + x).tolist()
    [1.0, 0.0, inf]
    """
    size = (
        torch.ones_like(value, dtype=torch.float64) if powers is None else torch.exp2(-BITS * powers.double())
    )
    return Powered(value, torch.where(value == 0, 0.0, size))


def powers_of(x: Tensor) -> Tensor:
    """The power of t of every entry; ∞ where it is exactly zero."""
    return -torch.log2(size_of(x)) / BITS + 0.0


def size_of(x: Tensor) -> Tensor:
    """s^v of every entry; a plain tensor has 1, and 0 where it is 0."""
    return x.scale if isinstance(x, Powered) else (x != 0).double()


def _rounded(value: Any, size: Any) -> Any:
    """The result with its sizes as whole powers; what is 0 is exactly zero."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    powers = (-torch.log2(size) / BITS).round()
    return Powered(value, torch.where((size == 0) | (value == 0), 0.0, torch.exp2(-BITS * powers)))


def _sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes of an operator's results: by its rule, or by the operator itself."""
    if (rule := _RULES.get(func.overloadpacket)) is not None:
        return rule(*args, **{name: x for name, x in kwargs.items() if name in ("dim", "keepdim")})
    kwargs = {name: x for name, x in kwargs.items() if name not in ("dtype", "layout", "device", "alpha")}
    sizes = pytree.tree_map_only(Tensor, _linear_size, (args, kwargs))
    return func(*sizes[0], **sizes[1])


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operator without the underscore gives, written into value and size."""
    name = func._schema.name.removeprefix("aten::")
    if not isinstance(args[0], Powered):
        raise _unknown(func.overloadpacket)
    made = getattr(aten, name.removesuffix("_"))
    result = args[1] if name == "copy_" else made(*args, **kwargs)
    args[0].value.copy_(_value(result))
    args[0].scale.copy_(size_of(result))
    return args[0]


def _unknown(packet: Any) -> GeometryError:
    return GeometryError(
        f"powers of t have no rule for the operator {packet}",
        setting="model",
        given=str(packet),
        remedy="compute it from other operators, or ask for a unit whose layers do not need it",
    )


def _linear_size(x: Tensor) -> Tensor:
    """Sizes of numbers, and indices as they are."""
    return size_of(x) if x.is_floating_point() else x


def _of(x: Any) -> Any:
    """Sizes of a tensor or of a number."""
    return size_of(x) if isinstance(x, Tensor) else float(x != 0)


def _same(x: Tensor, *_: Any) -> Tensor:
    return size_of(x)


def _one(x: Tensor, *_: Any) -> Tensor:
    return torch.ones_like(size_of(x))


def _bounded(x: Tensor, *_: Any) -> Tensor:
    return size_of(x).clamp(max=1.0)


def _sum(x: Any, y: Any, *_: Any) -> Tensor:
    total: Tensor = _of(x) + _of(y)
    return total


def _larger(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(size_of(x), size_of(y))


def _where(condition: Tensor, x: Any, y: Any) -> Tensor:
    return torch.where(_value(condition).bool(), _of(x), _of(y))


def _value(x: Tensor) -> Tensor:
    return x.value if isinstance(x, Powered) else x


def _pooled(x: Tensor, *given: Any) -> tuple[Tensor, None]:
    """The size of the entry that is the largest."""
    places = aten.max_pool2d_with_indices(_value(x), *given)[1]
    return size_of(x).flatten(-2).gather(-1, places.flatten(-2)).view(places.shape), None


def _variance(x: Tensor, dim: Any = None, *given: Any, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    size, dim = size_of(x), list(range(x.dim())) if dim is None else dim
    keepdim = bool(given[-1]) if len(given) > 1 else keepdim
    return size.square().mean(dim, keepdim=keepdim), size.mean(dim, keepdim=keepdim)


def _largest(x: Tensor, *given: Any, **named: Any) -> tuple[Tensor, None]:
    """The sizes of the entries that are taken."""
    dim = given[1] if len(given) > 1 else named.get("dim", -1)
    return size_of(x).gather(dim, aten.topk(_value(x), *given, **named)[1]), None


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.add, aten.sub, aten.rsub), _sum),
    **dict.fromkeys(
        (aten.neg, aten.abs, aten._to_copy, aten.relu, aten.gelu, aten.silu, aten.leaky_relu), _same
    ),
    **dict.fromkeys((aten.tanh, aten.erf, aten.sin, aten.expm1, aten.log1p, aten.atan), _bounded),
    **dict.fromkeys(
        (aten.exp, aten.sigmoid, aten.cos, aten.log, aten.softplus, aten._softmax, aten._safe_softmax), _one
    ),
    **dict.fromkeys((aten.maximum, aten.minimum), _larger),
    aten.mul: lambda x, y: _of(x) * _of(y),
    aten.div: lambda x, y: _of(x) / _of(y),
    aten.reciprocal: lambda x: 1 / size_of(x),
    aten.sqrt: lambda x: size_of(x).sqrt(),
    aten.rsqrt: lambda x: size_of(x).rsqrt(),
    aten.pow: lambda x, n: size_of(x) ** n,
    aten.where: _where,
    aten.amax: lambda x, *given: aten.amax(size_of(x), *given),
    aten.var_mean: _variance,
    aten.topk: _largest,
    aten.max_pool2d_with_indices: _pooled,
}
"""Rules of operators that are not multilinear. What vanishes with its argument has `_same` or `_bounded`."""


def _named(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split())


_MOVES = _named(
    "view _unsafe_view reshape permute transpose t expand slice select unsqueeze squeeze split "
    "split_with_sizes unbind alias detach diagonal as_strided unfold"
)
"""They show the same numbers elsewhere; sizes stay views, so that writing into one is seen."""
_LINEAR = _named(
    "mm bmm addmm baddbmm dot mv sum mean cat stack clone index index_select gather embedding convolution "
    "convolution_backward constant_pad_nd slice_backward select_backward slice_scatter select_scatter repeat "
    "flip roll cumsum scatter scatter_add index_put index_add tril triu avg_pool2d avg_pool2d_backward "
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward max_pool2d_with_indices_backward unfold_backward "
    "diagonal_backward embedding_dense_backward lift_fresh_copy copy"
)
"""Sums of products, of which no number is divided or bent: sizes obey them as numbers do."""
_MADE = _named("zeros_like ones_like empty_like full_like new_zeros new_ones new_full new_empty")
