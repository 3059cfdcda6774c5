"""Decoding with a prefix of stages, one token at a time.

Only the stages that the asked one needs are run (`Plan.needed`). Where every layer has a `new_state`, keys
and values are kept and each token costs one position; otherwise the prefix is computed again for each token.
Both give the same tokens, up to rounding.

At temperature 0 the token is the likeliest one. Otherwise it is drawn from softmax(z / T), over the `top_k`
largest logits if that is given, in float64 on the CPU, so that a seed means the same on every device.

Limits. One sequence. The model sees at most `context` tokens: when that is full, the older half is dropped
and the rest is read again. Layers that behave otherwise in training (dropout) are the caller's to switch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from topograd.errors import ConfigError, DivergenceError
from topograd.nn.forward import StageStates, stage_outputs
from topograd.nn.stack import Stack
from topograd.topology.plan import Plan


def generate(
    stack: Stack,
    plan: Plan,
    prompt: Sequence[int],
    tokens: int,
    *,
    stage: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    context: int,
) -> Iterator[int]:
    """The `tokens` tokens that stage `stage` (counted from 0) writes after `prompt`, as they come."""
    if not prompt:
        raise ConfigError("the prompt has no token; start with the document separator")
    if tokens < 0 or context < 1:
        raise ConfigError(f"tokens is {tokens} and context is {context}; give at least 0 and 1")
    if not 0 <= stage < len(plan.stages):
        raise ConfigError(f"stage {stage} does not exist; the plan has stages 0 to {len(plan.stages) - 1}")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature is {temperature}; it must be finite and at least 0")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top-k is {top_k}; it must be at least 1, or be left out")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed is {seed}; it must be at least 0 and below 2^63")
    return _decode(stack, plan, list(prompt), tokens, stage, temperature, top_k, seed, context)


def _decode(
    stack: Stack,
    plan: Plan,
    prompt: list[int],
    tokens: int,
    stage: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    context: int,
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    cached = all(hasattr(layer, "new_state") for layer in stack.layers)
    window = prompt[-context:]
    unread, states = window, None
    for _ in range(tokens):
        if cached and states is None:
            states = StageStates(stack, plan, 1, context)
        token = choose(_logits(stack, plan, stage, unread, states), temperature, top_k, generator)
        yield token
        if len(window) == context:
            window, states = window[context - context // 2 :], None
        window.append(token)
        unread = [token] if states is not None else window


@torch.no_grad()
def _logits(stack: Stack, plan: Plan, stage: int, tokens: list[int], states: StageStates | None) -> Tensor:
    """Logits (vocab,) behind the last of `tokens`, in float64 on the CPU."""
    inputs = torch.tensor([tokens], device=next(stack.parameters()).device)
    h = stage_outputs(stack, plan, inputs, [stage], states=states)[stage]
    return stack.readout(h[:, -1], stage)[0].double().cpu()


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token of the distribution that logits (vocab,) give at this temperature."""
    if not logits.isfinite().all():
        raise DivergenceError("the model's logits are not finite, so it cannot write; train it anew")
    if temperature == 0:
        return int(logits.argmax())
    values, ids = logits.topk(min(top_k or len(logits), len(logits)))
    weights = ((values - values[0]) / temperature).softmax(-1)  # the largest is 0: nothing overflows
    return int(ids[torch.multinomial(weights, 1, generator=generator)])
