"""Greedy decoding written out: for every token the whole window is read again. The slow, obvious version.

    x_{n+1} = argmax z_k(x_{m+1}, ..., x_n)         z_k the logits of stage k behind the last token

The window holds at most `context` tokens, at first the end of the prompt. When it is full, its older half is
dropped before the next token is appended (of 2c + 1 tokens, c stay). Nothing is remembered from one token to
the next but the window. Cost per token: one forward pass of the stages up to k, on the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import Plan


@torch.no_grad()
def next_logits(stack: Any, plan: Plan, window: Sequence[int], stage: int) -> Tensor:
    """Logits (vocab,) of a stage behind the last token of the window; every relay is the identity."""
    inputs = torch.tensor([list(window)], device=next(stack.parameters()).device)
    x0 = stack.embed(inputs)
    ctx = stack.layer_context(x0, inputs)
    after: dict[tuple[int, int], Tensor] = {}  # (stage, layers of the stack run so far) -> hidden state
    for planned in plan.stages[: stage + 1]:
        heard = [x0 if p.source == EMBEDDING else after[p.source, p.layer] for p, _ in planned.inputs]
        h = sum(heard[1:], heard[0])
        for layer in planned.layers:
            h = stack.layers[layer](h, ctx)
            after[planned.index, layer + 1] = h
    logits: Tensor = stack.readout(h[:, -1:], stage)[0, 0]
    return logits


def moved(window: Sequence[int], token: int, context: int) -> list[int]:
    """The window behind one more token."""
    kept = list(window)
    if len(kept) == context:
        kept = kept[context - context // 2 :]
    return [*kept, token]


def greedy(stack: Any, plan: Plan, prompt: Sequence[int], tokens: int, stage: int, context: int) -> list[int]:
    """The `tokens` likeliest tokens, one after the other, that `stage` writes behind `prompt`."""
    window, written = list(prompt[-context:]), []
    for _ in range(tokens):
        written.append(int(next_logits(stack, plan, window, stage).argmax()))
        window = moved(window, written[-1], context)
    return written
