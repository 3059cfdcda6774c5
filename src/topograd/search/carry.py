"""Heads that follow when a partition changes: weights and optimizer state go with them.

When a new partition replaces an old one, layers, embedding and shared head stay as they are, and so does
their optimizer state. A stage's own head W_k starts from the old head whose stage ends nearest: the
new stage reads a hidden state that this head has learned to read, or one close by.

Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning" §10.2.2
(step 5), which leaves open what new heads start from.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.heads import Head
from topograd.nn.stack import Stack
from topograd.topology.composition import Composition

Optimizers = Mapping[str, torch.optim.Optimizer]


def nearest_heads(old: Composition, new: Composition) -> list[int]:
    """For each stage of `new` the stage of `old` that ends nearest; of two as near, the deeper.

    >>> nearest_heads(Composition.parse("4,4,4"), Composition.parse("1,5,6"))
    [0, 1, 2]
    """
    return [nearest_head(old, end) for end in new.terminals]


def nearest_head(composition: Composition, layer: int) -> int:
    """The stage whose last layer is nearest to `layer` (counted from 1); of two as near, the deeper."""
    ends = composition.terminals
    return min(range(len(ends)), key=lambda k: (abs(ends[k] - layer), -k))


def carry_heads(stack: Stack, sources: Sequence[int], optimizers: Optimizers) -> None:
    """Give stage k the head that stage `sources[k]` had; heads that nobody takes are dropped.

    A head that is taken once stays the same parameters. One that is taken again is copied, with its state in
    the optimizer. A stack whose stages share one head stays as it is.
    """
    for head in [module for module in stack.modules() if isinstance(module, Head) and len(module.deltas)]:
        old = list(head.deltas)
        if not all(0 <= source < len(old) for source in sources):
            raise StackError(f"heads {list(sources)} were asked for and there are {len(old)}; count from 0")
        taken: set[int] = set()
        fresh: list[nn.Module] = []
        for source in sources:
            delta = copy.deepcopy(old[source]) if source in taken else old[source]
            if source in taken:
                _adopt(dict(zip(old[source].parameters(), delta.parameters(), strict=True)), optimizers)
            taken.add(source)
            fresh.append(delta)
        _forget([p for k, delta in enumerate(old) if k not in taken for p in delta.parameters()], optimizers)
        head.deltas = nn.ModuleList(fresh)


def _adopt(copies: Mapping[nn.Parameter, nn.Parameter], optimizers: Optimizers) -> None:
    """Put each copy beside its original: in the same group, with a copy of its state."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            for original in [p for p in group["params"] if p in copies]:
                group["params"].append(copies[original])
                if original in optimizer.state:
                    optimizer.state[copies[original]] = {
                        name: value.clone() if isinstance(value, Tensor) else value
                        for name, value in optimizer.state[original].items()
                    }


def _forget(parameters: Sequence[nn.Parameter], optimizers: Optimizers) -> None:
    gone = {id(parameter) for parameter in parameters}
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["params"][:] = [p for p in group["params"] if id(p) not in gone]
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
