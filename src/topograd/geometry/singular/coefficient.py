"""Local learning coefficient of any model, by preconditioned Langevin chains with a test of calibration.

Statement. L_n(w) is the mean loss of n terms (tokens count one each), w* the model's weights. With nβ, by
default n / log n,

    λ̂ = nβ ( E[L_n(w)] - L_n(w*) ),     w ~ exp(-U),  U = nβ L_n(w) + (γ/2)|w - w*|².

A chain starts at w* and steps with the gradient g of a batch and a diagonal preconditioner M,

    u = nβ g + γ(w - w*),     w ← w - (ε/2) M u + √(ε M) N(0, I),
    M = 1, or 1 / (δ + √v) over its mean with v ← α v + (1-α) g²  (RMSprop; v is held still after burn-in)

Every `thin` steps the loss of all n terms is evaluated at w, the terms one by one. So L_n(w) and L_n(w*) are
of the same data: no baseline of a few batches is shared by all chains, whose noise times nβ would make
repeats disagree. From the terms follow V = Σ_i Var_w, ν = βV/2, WAIC, and WBIC = n E[L_n(w)] at β = 1/log n.

Whether to believe it. For w ~ exp(-U) over d weights E[(w - w*)·u] = d exactly (integration by parts): the
*virial*, E[(w - w*)·u] / d, is 1 at equilibrium, below 1 in a chain that has not yet arrived, above 1 by the
bias of a step that is too large (for curvature c by 1/(1 - εMc/4)), and λ̂ has the same bias. It is not
calibrated, and `reason` says why, if the virial is off by more than `VIRIAL`, chains disagree (R̂ above
`AGREE`), the halves of the traces drift, or λ̂ is below zero (w* is no minimum of these data).

Symbols. ε step, γ localisation, b terms of a batch, d weights that are sampled. Cost: chains · (burn-in +
draws · thin) gradients of a batch, and chains · draws + 1 evaluations of all data.
Source: Lau, Furman, Wang, Murfet and Wei, "The Local Learning Coefficient: A Singularity-Aware Complexity
Measure"; Wang, Hoogland, van Wingerden, Furman and Murfet, "Differentiation and Specialization of Attention
Heads via the Refined Local Learning Coefficient" (restricted to weights and data); Li, Chen, Carlson and
Carin, "Preconditioned Stochastic Gradient Langevin Dynamics"; Watanabe, "A widely applicable Bayesian
information criterion". The virial test is ours.
Limits. Biased in γ (a direction of curvature H counts ½ nβH / (nβH + γ)) and in 1/log n: both are of the
estimator and not of its sampling, and the test does not see them. The change of M with w is left out, as is
usual. Dropout and batch statistics must be switched off.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from scipy.stats import t as student
from torch import Tensor, nn

from topograd.errors import DivergenceError, GeometryError
from topograd.geometry.factors import Batch, Outputs, each_batch
from topograd.geometry.host_copy import first_not_finite, squared_norm, to_host
from topograd.geometry.inspection import refuse_quantised
from topograd.geometry.losses import OwnLoss
from topograd.geometry.paths import Replaced
from topograd.geometry.singular.criteria import Waic, waic
from topograd.geometry.singular.terms import Weights, per_term, refuse_random, sampled_weights

VIRIAL = 0.15
AGREE = 1.2
DRIFT = 3.0
"""In standard errors of the difference of the traces' halves."""
DECAY = 0.99
"""α"""
DAMPING = 1e-4
"""δ, over the mean of √v"""
TURNS = 12
"""Of the power iteration for the sharpest direction."""
TRIALS = 12
"""Smaller steps that are tried."""
WANDER = 40
"""Steps of the short chain that a step is tried with."""
SLACK = 1.5
"""By how much a step may pass what the short chain's end bears."""
LOOK = 32
"""On a device the losses are looked at every so many steps; a look waits for it."""
LARGEST_BIAS = 0.05
"""Of the virial by the step, where the step is looked for."""


@dataclass(frozen=True)
class Langevin:
    """How to sample; the defaults look for the step themselves."""

    step: float | None = None
    """ε; None: the largest that the sharpest direction bears"""
    localization: float = 1.0
    """γ"""
    chains: int = 4
    burn_in: int = 500
    draws: int = 200
    thin: int = 5
    """Steps from one draw to the next"""
    precondition: Literal["none", "rmsprop"] = "none"

    def __post_init__(self) -> None:
        if (self.step is not None and not 0 < self.step < math.inf) or not 0 <= self.localization < math.inf:
            name = "localization" if self.step is None or 0 < self.step < math.inf else "step"
            allowed = "above 0" if name == "step" else "at least 0"
            raise GeometryError(setting=name, given=getattr(self, name), allowed=f"finite and {allowed}")
        for name, least in (("chains", 1), ("draws", 8), ("thin", 1), ("burn_in", 0)):
            if (given := getattr(self, name)) < least:
                raise GeometryError(setting=name, given=given, allowed=f"at least {least}")
        if self.precondition not in ("none", "rmsprop"):
            raise GeometryError(setting="precondition", given=self.precondition, allowed="none or rmsprop")


@dataclass(frozen=True)
class LearningCoefficient:
    """λ̂ with its traces and its calibration."""

    value: float
    interval: tuple[float, float]
    """90 %, of the sampling alone: over batches of draws of every chain"""
    traces: Tensor
    """nβ (L_n(w) - L_n(w*)), (chains, draws)"""
    calibrated: bool
    reason: str | None
    """Why it is not"""
    virial: float
    agreement: float
    """R̂ of the chains; nan for one"""
    terms: int
    """n"""
    n_beta: float
    step: float
    weights: int
    """d"""
    waic: Waic | None
    """None where the loss is one number a batch"""
    wbic: float | None
    """At n_beta = n / log n; None at another."""
    gradients: int
    """Of a batch"""
    evaluations: int
    """Of a batch, without a gradient"""

    @property
    def fluctuation(self) -> float | None:
        """ν"""
        return None if self.waic is None else self.waic.fluctuation


def learning_coefficient(
    model: nn.Module,
    loss: str | OwnLoss,
    batches: Batch | Iterable[Batch],
    settings: Langevin | None = None,
    *,
    n_beta: float | None = None,
    weights: str | Sequence[str] | None = None,
    outputs: Outputs | None = None,
    seed: int = 0,
) -> LearningCoefficient:
    """λ̂ around the model's weights on these batches (inputs, targets), which are the data.

    `loss` is "cross-entropy", "squared-error" (½|f - y|²), or a function to the loss of each term. `weights`
    restricts the sampling to parameters of these names, or below these modules; other weights stay.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> model, x = nn.Linear(2, 1).double(), torch.randn(300, 2).double()
    >>> few = Langevin(burn_in=60, draws=60, chains=2)
    >>> result = learning_coefficient(model, "squared-error", (x, model(x).detach()), few)
    >>> result.calibrated, abs(result.value - 1.5) < 0.5  # three regular weights count one half each
    (True, True)
    """
    settings = Langevin() if settings is None else settings
    refuse_quantised(model)
    center = sampled_weights(model, weights)
    target = _Target(model, loss, list(each_batch(batches)), outputs)
    default = target.terms / math.log(target.terms)
    tempered = default if n_beta is None else n_beta
    if not 0 < tempered < math.inf:
        raise GeometryError(setting="n_beta", given=n_beta, allowed="a positive number")
    if settings.step is None:
        settings = replace(settings, step=_bearable_step(target, center, tempered, settings, seed))
    base = target.losses(center)
    chains = [
        _chain(target, center, tempered, settings, torch.Generator().manual_seed(seed + 1000 * i), i)
        for i in range(settings.chains)
    ]
    terms = torch.stack([chain.terms for chain in chains]).double()  # (chains, draws, terms or 1)
    traces = tempered * (terms.mean(-1) - base.double().mean())
    virial = sum(chain.virial for chain in chains) / len(chains)
    value, interval = _mean(traces)
    agreement = _agreement(traces)
    reason = _refusal(value, interval, virial, agreement, traces)
    assert settings.step is not None
    steps = settings.burn_in + settings.draws * settings.thin
    return LearningCoefficient(
        value=value,
        interval=interval,
        traces=traces,
        calibrated=reason is None,
        reason=reason,
        virial=virial,
        agreement=agreement,
        terms=target.terms,
        n_beta=tempered,
        step=settings.step,
        weights=sum(w.numel() for w in center.values()),
        waic=waic(-terms.flatten(0, 1), tempered / target.terms) if target.each_term else None,
        wbic=target.terms * float(terms.mean()) if math.isclose(tempered, default) else None,
        gradients=settings.chains * steps,
        evaluations=(settings.chains * settings.draws + 1) * len(target.batches),
    )


class _Target:
    """The data and their loss, at any weights."""

    def __init__(
        self, model: nn.Module, loss: str | OwnLoss, batches: list[Batch], outputs: Outputs | None
    ) -> None:
        refuse_random(model)
        self._network = Replaced(model, outputs)
        self._loss = per_term(loss)
        self.batches = batches
        if not batches:
            raise GeometryError(
                "there are no batches", setting="batches", remedy="give at least one pair (inputs, targets)"
            )
        with torch.no_grad():
            first = [self._of(batch, {}) for batch in batches]
        self.each_term = all(part.dim() > 0 for part in first)
        sizes = [
            part.numel() if part.dim() or targets is None else len(targets)
            for part, (_, targets) in zip(first, batches, strict=True)
        ]
        self.terms = sum(sizes)
        if self.terms < 3:
            raise GeometryError(
                f"there are {self.terms} loss terms",
                setting="batches",
                given=self.terms,
                allowed="at least 3",
            )
        self._shares = [size / self.terms for size in sizes]

    def _of(self, batch: Batch, weights: Weights) -> Tensor:
        inputs, targets = batch
        if targets is None:
            raise GeometryError(
                "a batch has no targets", setting="batches", remedy="give pairs (inputs, targets)"
            )
        return self._loss(self._network(weights, inputs), targets)

    @torch.no_grad()
    def losses(self, weights: Weights) -> Tensor:
        """Of every term, (n,), or their mean (1,) where the loss gives one number a batch."""
        parts = [self._of(batch, weights).detach() for batch in self.batches]
        if self.each_term:
            return torch.cat([part.flatten() for part in parts]).cpu()
        return torch.stack([share * part for share, part in zip(self._shares, parts, strict=True)]).sum()[
            None
        ]

    def gradient(self, weights: Weights, batch: Batch) -> tuple[Tensor, Weights]:
        """A batch's mean loss, and its gradient."""
        learning = {name: w.detach().requires_grad_() for name, w in weights.items()}
        with torch.enable_grad():
            value = self._of(batch, learning).mean()
            gradients = torch.autograd.grad(value, list(learning.values()), allow_unused=True)
        filled = [
            torch.zeros_like(w) if g is None else g for w, g in zip(learning.values(), gradients, strict=True)
        ]
        return value.detach(), dict(zip(learning, filled, strict=True))


@dataclass(frozen=True)
class _Chain:
    terms: Tensor
    virial: float


def _chain(
    target: _Target,
    center: Weights,
    tempered: float,
    settings: Langevin,
    generator: torch.Generator,
    number: int,
) -> _Chain:
    """One chain: the losses of its draws, and its virial over all steps after burn-in."""
    assert settings.step is not None
    weights = {name: w.clone() for name, w in center.items()}
    scale = _Preconditioner(settings.precondition, center)
    draws: list[Tensor] = []
    values: list[Tensor] = []
    virial: list[Tensor] = []
    size = sum(w.numel() for w in center.values())
    steps = settings.burn_in + settings.draws * settings.thin
    every = 1 if next(iter(center.values())).device.type == "cpu" else LOOK
    for i in range(steps):
        place = int(torch.randint(len(target.batches), (), generator=generator))
        value, gradient = target.gradient(weights, target.batches[place])
        values.append(value)
        if (i + 1) % every == 0 or i + 1 == steps:
            first = i - i % every
            for at, loss_value in enumerate(to_host(values[first:]), first):
                if not math.isfinite(loss_value):
                    raise DivergenceError(
                        f"the loss of chain {number} is {loss_value} at step {at}",
                        setting="step",
                        given=settings.step,
                        remedy="choose a smaller one, or leave it out",
                    )
        burning = i < settings.burn_in
        scale.see(gradient, learn=burning)
        moved: list[Tensor] = []
        for name, w in weights.items():
            away = w - center[name]
            u = tempered * gradient[name] + settings.localization * away
            moved.append((away * u).sum())
            noise = _noise(w, generator)
            M = scale[name]
            weights[name] = w - settings.step / 2 * M * u + (settings.step * M) ** 0.5 * noise
        if not burning:
            virial.append(torch.stack([part.to(moved[0]) for part in moved]))
            if (i - settings.burn_in + 1) % settings.thin == 0:
                draws.append(target.losses(weights))
    each = [sum(parts) / size for parts in to_host(virial)]
    return _Chain(torch.stack(draws), sum(each) / len(each))


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU, so that a seed means the same on every device, and not waited for on CUDA."""
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float32)
    return drawn.to(like, non_blocking=like.is_cuda)


class _Preconditioner:
    """M of every weight; of mean 1, so that a step means the same with and without."""

    def __init__(self, kind: str, center: Weights) -> None:
        self._kind = kind
        self._v = {name: torch.zeros_like(w) for name, w in center.items()}
        self._M: Weights | None = None

    def see(self, gradient: Weights, learn: bool) -> None:
        if self._kind == "none" or not learn:
            return
        for name, g in gradient.items():
            self._v[name].mul_(DECAY).addcmul_(g, g, value=1 - DECAY)
        self._M = None

    def __getitem__(self, name: str) -> Tensor | float:
        if self._kind == "none":
            return 1.0
        if self._M is None:
            roots = {key: v.sqrt() for key, v in self._v.items()}
            count = sum(root.numel() for root in roots.values())
            mean = _total(roots) / count
            mean = torch.where(mean == 0, 1.0, mean)
            raw = {key: 1 / ((DAMPING * mean).to(root) + root) for key, root in roots.items()}
            size = _total(raw) / count
            self._M = {key: part / size.to(part) for key, part in raw.items()}
        return self._M[name]


def _total(parts: Weights) -> Tensor:
    """The sum over all tensors, in order, in float64 where the device has it."""
    has_none = any(part.device.type == "mps" for part in parts.values())
    first, *others = (part.sum().to(torch.float32 if has_none else torch.float64) for part in parts.values())
    return functools.reduce(torch.add, others, first)


def _bearable_step(target: _Target, center: Weights, tempered: float, settings: Langevin, seed: int) -> float:
    """ε with ε c / 4 ≤ LARGEST_BIAS for the sharpest curvature c at w*, and about so where a chain gets.

    At a singular w* the curvature may be 0 that a chain meets one step away.
    """
    generator = torch.Generator().manual_seed(seed)

    def bearable(weights: Weights, turns: int) -> float:
        sharpest = _sharpest(target, weights, turns, generator)
        return 4 * LARGEST_BIAS / max(tempered * sharpest + settings.localization, 1e-12)

    step = bearable(center, TURNS)
    for _ in range(TRIALS):
        reached = _wandered(target, center, tempered, settings.localization, step, generator)
        most = step / 4 if reached is None else bearable(reached, TURNS // 3)
        if step <= SLACK * most:
            break
        step = max(most, step / 4)
    return step


def _sharpest(target: _Target, weights: Weights, turns: int, generator: torch.Generator) -> float:
    """The largest curvature of batches at these weights that power iteration finds."""
    x = {name: _noise(w, generator) for name, w in weights.items()}
    sharpest, reach = 0.0, 1e-3 * max(math.sqrt(squared_norm(weights.values())), 1e-3)
    for i in range(turns):
        size = math.sqrt(squared_norm(x.values())) or 1.0
        batch = target.batches[i % len(target.batches)]
        ahead = {name: w + reach / size * x[name] for name, w in weights.items()}
        behind = {name: w - reach / size * x[name] for name, w in weights.items()}
        up, down = target.gradient(ahead, batch)[1], target.gradient(behind, batch)[1]
        x = {name: (up[name] - down[name]) / (2 * reach) for name in weights}
        sharpest = max(sharpest, math.sqrt(squared_norm(x.values())))
    if not math.isfinite(sharpest):
        raise DivergenceError(
            "the loss is not finite around the weights", setting="model", remedy="give a trained model"
        )
    return sharpest


def _wandered(
    target: _Target, center: Weights, tempered: float, pull: float, step: float, generator: torch.Generator
) -> Weights | None:
    """Where a short chain with this step gets; None if it diverges."""
    weights = center
    for i in range(WANDER):
        value, gradient = target.gradient(weights, target.batches[i % len(target.batches)])
        if not math.isfinite(value):
            return None
        moved = {}
        for name, w in weights.items():
            u = tempered * gradient[name] + pull * (w - center[name])
            noise = _noise(w, generator)
            moved[name] = w - step / 2 * u + step**0.5 * noise
        weights = moved
    finite = first_not_finite(weights) is None
    return weights if finite and math.isfinite(target.gradient(weights, target.batches[0])[0]) else None


def _mean(traces: Tensor) -> tuple[float, tuple[float, float]]:
    """The mean, and its 90 % interval from the means of four parts of every chain."""
    chains, draws = traces.shape
    part = draws // 4
    means = traces[:, : 4 * part].reshape(chains * 4, part).mean(1)
    value = float(traces.mean())
    error = float(means.std()) / math.sqrt(len(means))
    reach = float(student.ppf(0.95, len(means) - 1)) * error
    return value, (value - reach, value + reach)


def _agreement(traces: Tensor) -> float:
    """R̂ of Gelman and Rubin."""
    chains, draws = traces.shape
    if chains < 2:
        return math.nan
    within = float(traces.var(1).mean())
    between = float(traces.mean(1).var())
    return math.sqrt((within * (draws - 1) / draws + between) / within) if within > 0 else math.nan


def _refusal(
    value: float, interval: tuple[float, float], virial: float, agreement: float, traces: Tensor
) -> str | None:
    if not math.isfinite(value):
        return f"the value is {value}"
    if virial > 1 + VIRIAL:
        return f"the virial is {virial:.2f} and not 1: the step is too large, and λ̂ too by about as much"
    if virial < 1 - VIRIAL:
        return f"the virial is {virial:.2f} and not 1: the chains have not arrived; give more burn_in"
    if agreement > AGREE:
        return f"the chains disagree (R̂ {agreement:.2f}): more draws"
    if interval[1] < 0:
        return "λ̂ is below 0: the weights are no minimum of the loss on these data"
    half = traces.shape[1] // 2
    first, second = traces[:, :half].mean(1), traces[:, half:].mean(1)
    spread = float((second - first).std()) / math.sqrt(len(first)) if len(first) > 1 else math.inf
    if spread and abs(float((second - first).mean())) > DRIFT * spread and len(first) > 2:
        return "the traces still drift: more burn_in"
    return None
