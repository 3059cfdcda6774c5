"""Greedy decoding written out: for every token the whole window is read again. The slow, obvious version.

    x_{n+1} = argmax z_k(x_{m+1}, ..., x_n)         z_k the logits of stage k behind the last token

The window holds at most `context` tokens, at first the end of the prompt. When it is full, its older half is
dropped before the next token is appended (of 2c + 1 tokens, c stay). Nothing is remembered from one token to
the next but the window. Cost per token: one forward pass of all the stages that stage k needs, on the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from topograd.nn.forward import stage_outputs
from topograd.topology.plan import Plan


def next_logits(stack: Any, plan: Plan, window: Sequence[int], stage: int) -> Tensor:
    """Logits (vocab,) of a stage behind the last token of the window."""
    inputs = torch.tensor([list(window)], device=next(stack.parameters()).device)
    h = stage_outputs(stack, plan, inputs, [stage])[stage]
    with torch.no_grad():
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
