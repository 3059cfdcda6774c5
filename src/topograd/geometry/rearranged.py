"""Weights that a model rearranges before it multiplies by them: views, slices, einsum, packed attention.

Statement. A rearrangement R (a transpose, a reshape, a slice, a split) moves entries of a parameter W and
computes nothing. So R(arange(n)) says where in W each entry of R(W) is, and a product by R(W) has the factors
of a linear map (d_out, d_in) whose entries have known places in W. An einsum of rows x and a weight is such a
map if every letter of the weight is either summed with x, or of the output alone:

    h_m = x[m, shared],      z_m = W[own, shared] h_m,     d_in = Π shared,  d_out = Π own.

Symbols and shapes. places: integers in the shape of R(W). Cost: a copy of the weight's size in integers.
Source: torch.overrides, whose modes see every call.
Limits. A letter of all three tensors (a map for each head) is no one linear map. A part that is neither all
of a parameter nor a block of its rows has no name. Symmetries are looked for in plain matrices only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Rearrange = Callable[[Tensor], Tensor]

REARRANGING: frozenset[Callable[..., Any]] = frozenset(
    {
        *(getattr(Tensor, name) for name in ("view", "reshape", "flatten", "unflatten", "permute", "t")),
        *(getattr(Tensor, name) for name in ("transpose", "split", "chunk", "unbind", "contiguous")),
        *(getattr(Tensor, name) for name in ("squeeze", "unsqueeze", "movedim", "swapaxes", "narrow")),
        *(getattr(torch, name) for name in ("reshape", "flatten", "permute", "t", "transpose", "split")),
        *(getattr(torch, name) for name in ("chunk", "unbind", "squeeze", "unsqueeze", "movedim")),
        Tensor.__getitem__,
        Tensor.T.__get__,  # type: ignore[attr-defined]
        Tensor.mT.__get__,  # type: ignore[attr-defined]
    }
)

ATTENTION_BODY = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
"""torch's own function without its first line, which would hand it to the mode as one call."""


@dataclass(frozen=True)
class View:
    """A rearranged weight; it is kept, so that its identity stays its own."""

    tensor: Tensor
    parameter: int
    places: Tensor


def row_block(places: Tensor, shape: Sequence[int]) -> str | None:
    """ "" for all of a parameter, "[0:64]" for a block of its rows, None for anything else.

    >>> places = torch.arange(12).view(4, 3)
    >>> row_block(places.T, (4, 3)), row_block(places[:2].T, (4, 3)), row_block(places[:, :2], (4, 3))
    ('', '[0:2]', None)
    """
    row = max(1, torch.Size(shape[1:]).numel())
    first, last = int(places.min()) // row, int(places.max()) // row
    if places.numel() != (last - first + 1) * row:
        return None
    return "" if last - first + 1 == shape[0] else f"[{first}:{last + 1}]"


def einsum_of(equation: str, x_dims: int, weight_dims: int) -> tuple[Rearrange, Rearrange, Rearrange] | None:
    """From x, the output's gradient and the weight to rows h, rows δ and the matrix; None if it is no map.

    >>> rows, _, matrix = einsum_of("bsd,hde->bshe", 3, 3)
    >>> rows(torch.ones(2, 5, 3)).shape, matrix(torch.ones(4, 3, 7)).shape
    (torch.Size([10, 3]), torch.Size([28, 3]))
    """
    letters = _letters(equation, x_dims, weight_dims)
    if letters is None:
        return None
    x, weight, output = letters
    shared = [one for one in weight if one in x]
    own = [one for one in weight if one not in x]
    rows = [one for one in x if one not in weight]
    plain = all(len(set(part)) == len(part) for part in letters)
    if not plain or not shared or set(output) != {*rows, *own} or any(one in output for one in shared):
        return None
    return (
        _ordered(x, rows, shared),
        _ordered(output, rows, own),
        _ordered(weight, own, shared),
    )


def _letters(equation: str, x_dims: int, weight_dims: int) -> tuple[str, str, str] | None:
    """The letters of both operands and of the output; an ellipsis of x stands for letters of its own."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    x, comma, weight = left.partition(",")
    if not arrow or not comma or "," in weight or "..." in weight:
        return None
    if "..." in x:
        hidden = x_dims - len(x) + 3
        free = [one for one in "ABCDEFGHIJKLMNOP" if one not in equation][:hidden]
        x, output = (part.replace("...", "".join(free)) for part in (x, output))
    return (x, weight, output) if len(x) == x_dims and len(weight) == weight_dims else None


def _ordered(letters: str, first: list[str], second: list[str]) -> Rearrange:
    """A tensor with these letters as a matrix (first, second)."""
    order = [letters.index(one) for one in (*first, *second)]

    def matrix(tensor: Tensor) -> Tensor:
        moved = tensor.permute(order)
        rows = torch.Size(moved.shape[: len(first)]).numel()
        return moved.reshape(rows, -1)

    return matrix
