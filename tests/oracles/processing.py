"""Bias and penalties written out: each token's logit by itself, from lists of what came before.

    z <- z / r if z > 0 else z r           the token is in prompt or text
    z <- z + b - α [count > 0] - β count   its count in the text

Then decoding token by token with them: nothing is remembered but the window, the prompt and the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.oracles.decoding import moved, next_logits
from topograd.decode.sampling import Sampling
from topograd.topology.plan import Plan

Allowed = Callable[[Sequence[int]], Collection[int]]
"""The tokens that may follow a text; none where it ends."""


def changed(
    logits: Sequence[float],
    prompt: Sequence[int],
    text: Sequence[int],
    sampling: Sampling,
    allowed: Allowed | None = None,
) -> list[float]:
    """What the logits behind prompt and text become."""
    permitted = range(len(logits)) if allowed is None else allowed(text)
    made = []
    for token, z in enumerate(logits):
        if token in prompt or token in text:
            z = z / sampling.repetition_penalty if z > 0 else z * sampling.repetition_penalty
        count = list(text).count(token)
        z -= sampling.presence_penalty * (count > 0) + sampling.frequency_penalty * count
        made.append(z + sampling.logit_bias.get(token, 0.0) if token in permitted else -float("inf"))
    return made


def processed_greedy(
    predict: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    tokens: int,
    context: int,
    sampling: Sampling,
    allowed: Allowed | None = None,
) -> list[int]:
    """The likeliest tokens one after the other; `predict` gives logits (vocab,) behind a window."""
    window, text = list(prompt[-context:]), list[int]()
    seen = list(window)
    while len(text) < tokens and (allowed is None or allowed(text)):
        z = changed(predict(window).tolist(), seen, text, sampling, allowed)
        text.append(max(range(len(z)), key=z.__getitem__))  # the first of several
        window = moved(window, text[-1], context)
    return text


def stage_predictor(stack: Any, plan: Plan, stage: int) -> Callable[[Sequence[int]], Tensor]:
    """What a stage predicts behind a window."""
    return lambda window: next_logits(stack, plan, window, stage)


def pooled_predictor(stack: Any, plan: Plan, weights: dict[int, float]) -> Callable[[Sequence[int]], Tensor]:
    """The log-linear pool of stages by weights that add up to 1, normalised."""

    def predict(window: Sequence[int]) -> Tensor:
        each = [w * next_logits(stack, plan, window, k).log_softmax(-1) for k, w in weights.items()]
        return torch.stack(each).sum(0).log_softmax(-1)

    return predict
