"""Composition of specialists by weights, as a plan.

    z = z_base + Σ_s w_s (z_s - z_base)                                             deltas, the default
    z = z_base + Σ_s w_s z_s                                                        sum

with z_base what the base predicts and z_s what it predicts with specialist s alone. With one specialist of
weight 1 the first is z_s, without any it is z_base, both bit for bit; a specialist that has learned nothing
adds nothing. The second is eq. 12 of "Product of Experts" (§10.2), the product of all experts, which also
sharpens: with a base that predicts by one stage a specialist at insertion gives 2 z_base.

Both are one weighted sum of stages' logits, so the composed model is a plan like any other (`Prediction`):
the engine, evaluation and speculation run it as they are. Stages that have no weight do not run. Users write
`chat`, `chat,facts` or `chat*0.7,facts*0.3`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from topograd.errors import ConfigError
from topograd.specialists.attach import Attached
from topograd.topology.plan import Plan
from topograd.topology.prediction import Prediction, Terms

Pool = Literal["deltas", "sum"]
Weights = Mapping[str, float]
"""Specialists that are active, by name; none is the base alone."""
LARGEST_WEIGHT = 100.0


def composed(attached: Attached, weights: Weights, pool: Pool = "deltas") -> Plan:
    """The plan of the base with these specialists active."""
    full = composed_terms(attached, weights, pool)
    predicting = attached.plan.predicting()
    exits = dict(attached.base.plan.prediction.exits)
    exits |= {stage: alone(attached, name) for name, stage in attached.stages.items()}
    kind: Literal["last", "pool"] = "last" if len(full) == 1 else "pool"
    return replace(attached.plan, prediction=Prediction(kind, full, exits | {predicting[-1]: full}))


def composed_terms(attached: Attached, weights: Weights, pool: Pool = "deltas") -> Terms:
    """Stages and the weights of their logits."""
    check_weights(attached, weights)
    terms: dict[int, float] = {}
    share = 1.0 if pool == "sum" else 1.0 - math.fsum(weights.values())
    _add(terms, attached.base.plan.prediction.full, share)
    for name, weight in weights.items():
        own: Terms = ((attached.stages[name], 1.0),)
        _add(terms, own if pool == "sum" else alone(attached, name), weight)
    active = tuple((stage, weight) for stage, weight in sorted(terms.items()) if weight)
    return active or attached.base.plan.prediction.full


def alone(attached: Attached, name: str) -> Terms:
    """What the base predicts by with one specialist: its stage in the place of the one that it reads."""
    *others, (_, weight) = attached.base.plan.prediction.full
    return (*others, (attached.stages[name], weight))


def check_weights(attached: Attached, weights: Weights) -> None:
    """Refuse names that are not attached and weights that are no sensible number."""
    for name, weight in weights.items():
        if name not in attached.stages:
            known = ", ".join(attached.stages) or "none"
            raise ConfigError(setting="specialists", given=name, allowed=f"attached: {known}")
        if not -LARGEST_WEIGHT <= weight <= LARGEST_WEIGHT:
            raise ConfigError(
                setting=f"specialists[{name!r}]", given=weight, allowed=f"within ±{LARGEST_WEIGHT:g}"
            )


def _add(terms: dict[int, float], more: Terms, factor: float) -> None:
    for stage, weight in more:
        terms[stage] = terms.get(stage, 0.0) + factor * weight


def parse_specialists(text: str) -> dict[str, float]:
    """Names or folders and their weights, as users write them; a weight that is not written is 1.

    >>> parse_specialists("chat*0.7, runs/facts")
    {'chat': 0.7, 'runs/facts': 1.0}
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, star, factor = part.strip().rpartition("*")
        if not star:
            name, factor = factor, "1"
        try:
            weight = float(factor)
        except ValueError:
            weight = math.nan
        if not name.strip() or not math.isfinite(weight):
            raise ConfigError(setting="specialists", given=text, allowed="written as A,B or A*0.7,B*0.3")
        if name.strip() in weights:
            raise ConfigError(setting="specialists", given=text, allowed="names, each once")
        weights[name.strip()] = weight
    return weights
