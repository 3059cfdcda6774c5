"""Attention heads of a module: which channels of its linear maps belong to which head.

Statement. An attention has H query heads and G heads of keys and values, head h reading those of h G // H.
Its maps are read by name: q, k, v apart with rows by head; one map with the blocks (q, k, v); or one map with
the rows (head, (q, k, v), channel). The output map has columns by head.

Symbols. A channel of a map is a row of z = W h. Cost: none.
Source: the attention modules of transformers, torch and this package.
Limits. Names of other packages are not known: `find_heads` returns none for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

APART = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("query", "key", "value", "output"),
    ("self.query", "self.key", "self.value", "output.dense"),
)
BLOCKS = (("c_attn", "c_proj"), ("qkv_proj", "o_proj"), ("qkv", "proj"))
BY_HEAD = (("query_key_value", "dense"),)
WIDTH = ("head_width", "head_dim", "head_size", "self.attention_head_size")


@dataclass(frozen=True)
class Head:
    """One query head, with the keys and values that it reads."""

    name: str
    group: int
    """Which head of keys and values."""
    rows: Mapping[str, Tensor]
    """Output channels by map: of queries, keys and values."""
    columns: Mapping[str, Tensor]
    """Input channels of the output map."""


def find_heads(model: nn.Module, below: str = "") -> list[Head]:
    """The heads of every attention below a module, in order; none where none can be told apart."""
    found = []
    for name, module in model.get_submodule(below).named_modules():
        found += _heads_of(".".join(filter(None, (below, name))), module)
    return found


def is_transposed(module: nn.Module) -> bool:
    """Whether a map holds its weight as (d_in, d_out), as the Conv1D of transformers does."""
    return type(module).__name__ == "Conv1D"


def linear_sides(module: nn.Module) -> tuple[int, int] | None:
    """d_in and d_out of a linear map; None of any other module."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not (isinstance(module, nn.Linear) or is_transposed(module)):
        return None
    return (weight.shape[0], weight.shape[1]) if is_transposed(module) else (weight.shape[1], weight.shape[0])


def _heads_of(path: str, module: nn.Module) -> list[Head]:
    width = next((size for word in WIDTH if isinstance(size := _attribute(module, word), int)), None)
    if width is None:
        return []
    for names in (*APART, *BLOCKS, *BY_HEAD):
        sides = [linear_sides(_attribute(module, name)) for name in names]
        if all(sides):
            return _named_heads(path, names, [side for side in sides if side], width)
    return []


def _attribute(module: nn.Module, path: str) -> Any:
    found: Any = module
    for word in path.split("."):
        found = getattr(found, word, None)
    return found


def _named_heads(path: str, names: tuple[str, ...], sides: list[tuple[int, int]], width: int) -> list[Head]:
    heads = sides[-1][0] // width
    groups = heads
    if names in APART:
        groups = sides[1][1] // width
    elif names in BLOCKS:
        groups = (sides[0][1] // width - heads) // 2
    span = torch.arange(width)
    found = []
    for h in range(heads):
        group = h * groups // heads
        if names in APART:
            starts = (h, group, group)
        elif names in BY_HEAD:
            starts = (3 * h, 3 * h + 1, 3 * h + 2)
        else:
            starts = (h, heads + group, heads + groups + group)
        channels = [start * width + span for start in starts]
        maps = names[:-1] if names in APART else names[:1]
        each = channels if names in APART else [torch.cat(channels)]
        rows = {f"{path}.{name}": places for name, places in zip(maps, each, strict=True)}
        columns = {f"{path}.{names[-1]}": h * width + span}
        found.append(Head(f"{path}.head.{h}", group, rows, columns))
    return found
