"""What the best pool of a model's stages is worth, and whether confidence can weigh it.

z_k (n, vocab) are the logits of stages k = 1..K of a trained chain, on held-out text. Every second window is
for fitting and the others for measuring; a pool that is not fitted is measured on the same others.

    last, mean, sum         z_K; Σ z_k / K; Σ z_k                         eq. 2
    temperature             β z_K, β fitted: what calibrating one stage alone gives
    Log-OP                  Σ w_k z_k, w ≥ 0, Σ w = 1, w fitted           eq. 6, 7
    weights + temperature   Σ w_k z_k, any w fitted: a weight and a temperature for each stage
    shrinkage               Σ s_k z_k, s_k = 1 - H(p_k) / log C           eq. 5, per token
    entropy, max            the same with weights that sum to 1: s_k, or the largest probability
    surest                  z_k of the stage with the largest probability, per token

"Confidence inversion": of the tokens that exactly one of stage k < K and stage K gets right, the share where
the one that is right is the surer. Below 1/2, confidence points the wrong way.

Training-time shrinkage (Principle 2.7): an arm whose stages are trained on CE(s_k z_k) and pooled by
Σ s_k z_k as trained, against the plain arm pooled so afterwards. The paper has the principle from images
(+4.3 points on Split-CIFAR-10) and no figure for text.

A fit is convex in w; Newton's steps with the exact Hessian of K weights, float64. Cost: K² dot products over
the vocabulary for each token and step; 9 trainings with the preset `small`.
Source: "Product of Experts" eqs. 2, 5, 6, 7, Principle 2.7, Appendix C.5. Limits: small models of bytes, far
from trained; weights are the same for every token (a router would not need to be).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from papers.outcome import Asked, Row
from papers.staged_runs import SHALLOW, Sizes, chain, mean, spread, train_arms, values
from papers.verdicts import Claim, Drawing, Found, Series, above
from topograd.data import Text
from topograd.decode.calibration.fit_pool import fit_weights as exit_weights
from topograd.exec.forward import stage_outputs
from topograd.nn.gpt import GPT
from topograd.nn.pooling import pool, shrinkage_weight
from topograd.topology.plan import Plan

BATCH = 32
POOLS = (
    "last",
    "temperature",
    "mean",
    "sum",
    "Log-OP",
    "weights + temperature",
    "shrinkage",
    "entropy",
    "max",
    "surest",
)
PLAIN, SHARED, SHRUNK = "heads of their own", "one head", "trained with shrinkage"


class Shrunk:
    """CE(s z, y), s = 1 - H(softmax z) / log C with its gradient: shrinkage as a training loss."""

    uses_prior = False

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor:
        return F.cross_entropy(shrinkage_weight(logits) * logits, targets, reduction="sum")


OBJECTIVE = Shrunk()
ARMS = (
    chain(SHALLOW, PLAIN),
    chain(SHALLOW, SHARED, heads="shared"),
    chain(SHALLOW, SHRUNK, objective="papers.product_of_experts.composition:OBJECTIVE"),
)


def run(sizes: Sizes, args: Asked) -> Found:
    """Train three arms, pool their stages in every way, and judge."""
    rows = train_arms(ARMS, sizes, args, probe)
    cells = [
        (name, *(f"{mean(rows, arm.name, name):.4f} ± {spread(rows, arm.name, name)}" for arm in ARMS))
        for name in POOLS
    ]
    for key in ("right is surer", "weight of the last"):
        cells.append((key, *(f"{mean(rows, arm.name, key):.3f}" for arm in ARMS)))
    places = range(len(POOLS))
    return Found(
        rows,
        "BPB of each pool on windows that no fit has seen",
        ("pool", *(arm.name for arm in ARMS)),
        tuple(cells),
        Drawing(
            "BPB of a pool minus that of the last stage, pools in the order of the table",
            "pool",
            "bits per byte",
            tuple(Series.of(arm.name, places, _gains(rows, arm.name)) for arm in ARMS[:2]),
        ),
        claims(rows),
    )


def _gains(rows: Sequence[Row], arm: str) -> list[list[float]]:
    return [differences(rows, arm, name, "last") for name in POOLS]


def differences(rows: Sequence[Row], arm: str, pool_: str, base: str) -> list[float]:
    """BPB of one pool minus that of another, seed by seed."""
    return [a - b for a, b in zip(values(rows, arm, pool_), values(rows, arm, base), strict=True)]


def claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """What fitting gains, what confidence is worth, and when to shrink."""
    fitted = "weights + temperature"
    shrunk = zip(values(rows, SHRUNK, "shrinkage"), values(rows, PLAIN, "shrinkage"), strict=True)
    return (
        above(
            "a fitted pool beats the last stage",
            "stages hold what the last has not: their pool predicts better",
            "BPB of the last stage with its best temperature minus that of the fitted pool",
            differences(rows, PLAIN, "temperature", fitted),
        ),
        above(
            "fitting beats the plain mean",
            "weights of eq. 6 are worth fitting",
            "BPB of the mean minus that of the fitted Log-OP",
            differences(rows, PLAIN, "mean", "Log-OP"),
        ),
        above(
            "confidence is no weight (C.5)",
            "weighting by entropy does not beat the plain mean",
            "BPB weighted by entropy minus that of the mean",
            differences(rows, PLAIN, "entropy", "mean"),
        ),
        above(
            "the surer stage is the wrong one (C.5)",
            "where one of two stages is right, the surer one is the other",
            "1/2 minus the share of tokens whose right stage is the surer",
            [0.5 - share for share in values(rows, PLAIN, "right is surer")],
        ),
        above(
            "shrink afterwards (Principle 2.7)",
            "shrinkage as a training loss gives worse pools than shrinkage afterwards",
            "BPB pooled by shrinkage, trained so, minus that of the plain arm",
            [a - b for a, b in shrunk],
        ),
    )


@torch.no_grad()
def probe(stack: GPT, plan: Plan, text: Text) -> Mapping[str, Any]:
    """BPB of every pool on the windows that were not fitted to, and what confidence says."""
    (fit, fit_targets), (test, targets) = (half_logits(stack, plan, text, part) for part in (0, 1))
    to_bpb = int((text.targets != -100).sum()) / (math.log(2) * text.nbytes)
    weights = {
        "temperature": torch.cat([fit.new_zeros(len(fit) - 1), fit_weights(fit[-1:], fit_targets)]),
        "Log-OP": fit_weights(fit, fit_targets, simplex=True),
        "weights + temperature": fit_weights(fit, fit_targets),
    }
    pooled = {name: pool(list(test), w.tolist()) for name, w in weights.items()}
    pooled |= {name: pool(list(test), name) for name in ("last", "mean", "sum", "shrinkage")}
    pooled |= _confident(test)
    result: dict[str, Any] = {name: float(F.cross_entropy(z, targets)) * to_bpb for name, z in pooled.items()}
    result["right is surer"] = surer_share(test, targets)
    result["weight of the last"] = float(weights["Log-OP"][-1])
    result["weights"] = {name: w.tolist() for name, w in weights.items()}
    return result


def half_logits(stack: GPT, plan: Plan, text: Text, part: int) -> tuple[Tensor, Tensor]:
    """Logits (K, n, vocab) in float64 and targets (n,) of every second window."""
    stages = plan.predicting()
    inputs, targets = text.inputs[part::2], text.targets[part::2]
    logits = []
    for rows, aims in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        outputs = stage_outputs(stack, plan, rows, stages)
        counted = aims != -100
        logits.append(torch.stack([stack.readout(outputs[k][counted], plan.stages[k].head) for k in stages]))
    return torch.cat(logits, dim=1).double(), targets[targets != -100]


def fit_weights(logits: Tensor, targets: Tensor, simplex: bool = False) -> Tensor:
    """The weights (K,) that minimise CE(Σ w_k z_k); on the simplex w = softmax(θ), by gradient steps."""
    return _fit_simplex(logits, targets) if simplex else exit_weights(lambda: [(logits, targets)])


def _fit_simplex(logits: Tensor, targets: Tensor) -> Tensor:
    theta = torch.zeros(len(logits), dtype=logits.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([theta], max_iter=40, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(torch.einsum("k,knv->nv", theta.softmax(0), logits), targets)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return theta.detach().softmax(0)


def _confident(logits: Tensor) -> dict[str, Tensor]:
    """Pools whose weights are confidences, token by token, and sum to 1; and the surest stage alone."""
    entropy = torch.stack([shrinkage_weight(z) for z in logits]).clamp_min(1e-12)
    largest = logits.softmax(-1).amax(-1, keepdim=True)
    surest = largest.argmax(0, keepdim=True).expand(1, *logits.shape[1:])
    return {
        "entropy": (entropy / entropy.sum(0) * logits).sum(0),
        "max": (largest / largest.sum(0) * logits).sum(0),
        "surest": logits.gather(0, surest)[0],
    }


def surer_share(logits: Tensor, targets: Tensor) -> float:
    """Of the tokens that one of stage k < K and stage K gets right: how often that one is the surer."""
    sure, guess = logits.softmax(-1).max(-1)
    right = guess == targets
    shares = []
    for k in range(len(logits) - 1):
        one = right[k] != right[-1]
        surer = (sure[k] > sure[-1]) == right[k]
        if one.any():
            shares.append(float(surer[one].double().mean()))
    return statistics.fmean(shares) if shares else 0.5
