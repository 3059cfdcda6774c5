"""Interference between specialists: losses on their own text and on the others'.

For a set of compositions (weights of specialists by name) and rows of text, the nats of every row's targets
under each of them. The base and the specialists run once, whatever the number of compositions; a composition
costs the sum of its stages' logits. Interference is what a specialist's text loses when others are switched
on beside it, and what unrelated text loses when any is on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.exec.forward import stage_outputs
from topograd.exec.linear_cross_entropy import chunk_tokens
from topograd.specialists.attach import Attached
from topograd.specialists.composition import Pool, Weights, composed_terms


@torch.no_grad()
def token_losses(
    attached: Attached,
    compositions: Sequence[Weights],
    inputs: Tensor,
    targets: Tensor,
    *,
    pool: Pool = "deltas",
    batch: int = 4,
) -> Tensor:
    """(compositions, rows, context): the nats of each target, 0 where there is none."""
    stack, plan = attached.stack, attached.plan
    device = next(stack.parameters()).device
    terms = [composed_terms(attached, weights, pool) for weights in compositions]
    wanted = sorted({stage for each in terms for stage, _ in each})
    found = torch.zeros(len(terms), *targets.shape)
    for start in range(0, len(inputs), batch):
        rows = slice(start, start + batch)
        outputs = stage_outputs(stack, plan, inputs[rows].to(device), wanted)
        flat = {k: h.reshape(-1, h.shape[-1]) for k, h in outputs.items()}
        y = targets[rows].reshape(-1).to(device)
        losses = torch.zeros(len(terms), len(y), device=device)
        counted = (y != -100).nonzero()[:, 0]
        for some in counted.split(chunk_tokens(attached.vocabulary.size)):
            logits = {k: stack.readout(h[some], plan.stages[k].head) for k, h in flat.items()}
            for i, each in enumerate(terms):
                z = sum(weight * logits[stage] for stage, weight in each)
                assert isinstance(z, Tensor)
                losses[i, some] = F.cross_entropy(z, y[some], reduction="none")
        found[:, rows] = losses.reshape(len(terms), *targets[rows].shape).cpu()
    return found


def interference(
    attached: Attached,
    texts: Mapping[str, tuple[Tensor, Tensor]],
    compositions: Mapping[str, Weights],
    pool: Pool = "deltas",
) -> list[dict[str, Any]]:
    """For each text the mean nats a token under each composition."""
    rows = []
    for name, (inputs, targets) in texts.items():
        losses = token_losses(attached, list(compositions.values()), inputs, targets, pool=pool)
        counted = int((targets != -100).sum())
        means = (losses.double().sum((1, 2)) / max(counted, 1)).tolist()
        rows.append({"text": name, "tokens": counted, "nats": dict(zip(compositions, means, strict=True))})
    return rows


def default_compositions(attached: Attached, weights: Weights) -> dict[str, Weights]:
    """The base, each specialist by itself, and all of them with the weights that are asked for."""
    found: dict[str, Weights] = {"base": {}}
    found |= {name: {name: 1.0} for name in attached.stages}
    if len(weights) > 1 or any(weight != 1 for weight in weights.values()):
        found["together"] = weights
    return found
