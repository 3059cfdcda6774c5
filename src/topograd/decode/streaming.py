"""Memory bandwidth of decoding, and the relative cost of more positions.

A token reads every matrix once. So tokens a second times the bytes of all matrices, over the bytes a second
that the machine reads at all, is the share of the physical limit that one row reaches; it may exceed 1 where
a model fits into the processor's caches. The read bandwidth is measured in the same process, by summing an
array that no cache holds, with as many threads.

    bandwidth_share    (bytes of a token × tokens/s) / (bytes/s of a plain read)
    rows               the time of R new positions of a row at full depth with their logits, over that of one
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from topograd.decode.engine import Engine
from topograd.nn.stack import Stack
from topograd.timing import take_turns

BITS = {"float32": 32, "int8": 9, "int4": 6}
"""Bits of a weight as each precision keeps it: int8 with a scale for 32 of them, int4 with two numbers."""
READ_BYTES = 2**28
ROWS = (1, 2, 4, 8)


def read_bandwidth(rounds: int = 7) -> float:
    """Bytes a second that all of torch's threads read together, at best."""
    numbers = torch.ones(READ_BYTES // 4)
    seconds = take_turns({"read": numbers.sum}, rounds)["read"]
    return READ_BYTES / min(seconds)


def matrix_bytes(engine: Engine, stack: Stack) -> float:
    """Bytes of the matrices that one token reads at full depth; `stack` as it was trained."""
    needed = {p.index for stage, _ in engine.plan.prediction.full for p in engine.plan.needed(stage)}
    used = {i for k in needed for i in engine.plan.stages[k].layers}
    count = 0
    for i in used:
        tables = {id(m.weight) for m in stack.layers[i].modules() if isinstance(m, nn.Embedding)}
        count += sum(p.numel() for p in stack.layers[i].parameters() if p.dim() == 2 and id(p) not in tables)
    for stage, _ in engine.plan.prediction.full:
        head = stack.projection(engine.plan.stages[stage].head)
        count += 0 if head is None else head.weight.numel()
    return count * BITS[engine.runtime.precision] / 8


@torch.inference_mode()
def row_costs(engine: Engine, sizes: Sequence[int] = ROWS, rounds: int = 15) -> dict[int, list[float]]:
    """Seconds of each number of new positions of one row that has read a few, in turns."""
    length = max(min(engine.context // 4, 64), 1)
    batch, last = engine.start([[0] * length]), engine.exits[-1]
    engine.run(batch, last)

    def step(size: int) -> None:
        batch[0].cache.push(batch, [[1] * size])
        engine.run(batch, last)
        engine.logits(batch, last, [size]).max(-1)
        batch[0].cache.truncate(batch, [length])

    sizes = [size for size in sizes if length + size <= engine.context]
    turns = {str(size): (lambda size=size: step(size)) for size in sizes}
    return {int(size): seconds for size, seconds in take_turns(turns, rounds).items()}


def relative_rows(costs: dict[int, list[float]]) -> dict[str, float]:
    """The median cost of each number of rows over that of one."""
    middle = {size: sorted(seconds)[len(seconds) // 2] for size, seconds in costs.items()}
    return {str(size): seconds / middle[1] for size, seconds in middle.items()}
