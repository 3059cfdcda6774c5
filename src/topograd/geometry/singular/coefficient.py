"""Local learning coefficient of any model, by preconditioned Langevin chains with a test of calibration.

Statement. L_n(w) is the mean loss of n terms (tokens count one each), w* the model's weights. With nβ, by
default n / log n,

    λ̂ = nβ ( E[L_n(w)] - L_n(w*) ),     w ~ exp(-U),  U = nβ L_n(w) + (γ/2)|w - w*|².

A chain starts at w* and steps with the gradient g of a batch and a diagonal preconditioner M,

    u = nβ g + γ(w - w*),     w ← w - (ε/2) M u + √(ε M) N(0, I),
    M = 1, or 1 / (δ + √v) over its mean with v ← α v + (1-α) g²  (RMSprop; v is held still after burn-in)

Every `thin` steps the loss of all n terms is evaluated at w, the terms one by one. So L_n(w) and L_n(w*) are
of the same data: no baseline of a few batches is shared by all chains, whose noise times nβ would make
repeats disagree. With `control` a draw is instead the mean of L_b(w) - L_b(w*) over the batches b of its
steps: what batches differ by is common to both and cancels, the batch is drawn after w, so that nothing is
biased, and no evaluation is needed. From the terms, which there are without it alone, follow V = Σ_i Var_w,
ν = βV/2 and WAIC; from the mean WBIC = n E[L_n(w)], at its own β = 1/log n and at no other.

Whether to believe it. For w ~ exp(-U) over d weights E[(w - w*)·u] = d exactly (integration by parts): the
*virial*, E[(w - w*)·u] / d, is 1 at equilibrium, below 1 in a chain that has not yet arrived, above 1 by the
bias of a step that is too large (for curvature c by 1/(1 - εMc/4)), and λ̂ has the same bias. It is not
calibrated, and `reason` says why, if the virial is off by more than `VIRIAL`, chains disagree (R̂ above
`AGREE`), the halves of the traces drift, or λ̂ is below zero (w* is no minimum of these data).

Symbols. ε step, γ localisation, b terms of a batch, d weights that are sampled. Cost: chains · (burn-in +
draws · thin) gradients of a batch, and chains · draws + 1 evaluations of all data, one with `control`.
Source: Lau, Furman, Wang, Murfet and Wei, "The Local Learning Coefficient: A Singularity-Aware Complexity
Measure"; Wang, Hoogland, van Wingerden, Furman and Murfet, "Differentiation and Specialization of Attention
Heads via the Refined Local Learning Coefficient" (restricted to weights and data); Li, Chen, Carlson and
Carin, "Preconditioned Stochastic Gradient Langevin Dynamics"; Watanabe, "A widely applicable Bayesian
information criterion". The virial test is ours.
Limits. Biased in γ (a direction of curvature H counts ½ nβH / (nβH + γ)) and in 1/log n: both are of the
estimator and not of its sampling, and the test does not see them. The change of M with w is left out, as is
usual. Dropout and batch statistics must be switched off.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from scipy.stats import t as student
from torch import Tensor, nn

from topograd.errors import GeometryError
from topograd.geometry.factors import Batch, Outputs, each_batch
from topograd.geometry.inspection import refuse_quantised
from topograd.geometry.losses import OwnLoss
from topograd.geometry.singular.criteria import Waic, waic
from topograd.geometry.singular.langevin import Langevin, Noise, OnStep, Target, bearable_step, run_chain
from topograd.geometry.singular.terms import Weights, sampled_weights

VIRIAL = 0.15
AGREE = 1.2
DRIFT = 3.0
"""In standard errors of the difference of the traces' halves."""


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
    losses: Tensor | None = field(default=None, repr=False)
    """Of every term at every draw, (chains · draws, n): `influence.py`; None as `waic`"""

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
    masks: Mapping[str, Tensor] | None = None,
    outputs: Outputs | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> LearningCoefficient:
    """λ̂ around the model's weights on these batches (inputs, targets), which are the data.

    `loss` is "cross-entropy", "squared-error" (½|f - y|²), or a function to the loss of each term. `weights`
    restricts the sampling to parameters of these names, or below these modules; other weights stay. `masks`
    restricts it further to entries of parameters: 1 where a weight moves (`parts.py` makes those of heads).

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> model, x = nn.Linear(2, 1).double(), torch.randn(300, 2).double()
    >>> few = Langevin(burn_in=60, draws=60, chains=2)
    >>> result = learning_coefficient(model, "squared-error", (x, model(x).detach()), few)
    >>> result.calibrated, abs(result.value - 1.5) < 0.5  # three regular weights count one half each
    (True, True)
    """
    refuse_quantised(model)
    center = sampled_weights(model, weights)
    target = Target(model, loss, list(each_batch(batches)), outputs)
    return sample(target, center, settings or Langevin(), n_beta, masks=masks, seed=seed, on_step=on_step)


def sample(
    target: Target,
    center: Weights,
    settings: Langevin,
    n_beta: float | None = None,
    *,
    masks: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> LearningCoefficient:
    """The same for weights of a target, which may have many parts."""
    target = target.within(_checked(masks, center, settings))
    default = default_n_beta(target.terms)
    tempered = default if n_beta is None else n_beta
    if not 0 < tempered < math.inf:
        raise GeometryError(setting="n_beta", given=n_beta, allowed="a positive number")
    if settings.step is None:
        settings = replace(settings, step=bearable_step(target, center, tempered, settings, seed))
    base = torch.zeros(1) if settings.control else target.losses(center)
    each_term = target.each_term and not settings.control
    chains = [
        run_chain(target, center, tempered, settings, Noise(seed + 1000 * i), i, on_step)
        for i in range(settings.chains)
    ]
    terms = torch.stack([chain.terms for chain in chains]).double()  # (chains, draws, terms or 1)
    traces = tempered * (terms.mean(-1) - base.double().mean())
    virial = sum(chain.virial for chain in chains) / len(chains)
    value, interval = _mean(traces)
    agreement = _agreement(traces)
    reason = _refusal(value, interval, virial, agreement, traces)
    mean = float(terms.mean()) + (target.at_center() if settings.control else 0.0)
    assert settings.step is not None
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
        weights=target.moving(center),
        waic=waic(-terms.flatten(0, 1), tempered / target.terms) if each_term else None,
        wbic=target.terms * mean if math.isclose(tempered, default) else None,
        gradients=settings.chains * settings.steps,
        evaluations=len(target.batches) * (1 if settings.control else settings.chains * settings.draws + 1),
        losses=terms.flatten(0, 1) if each_term else None,
    )


def default_n_beta(terms: int) -> float:
    """nβ at the temperature of WBIC."""
    return terms / math.log(terms)


def _checked(masks: Mapping[str, Tensor] | None, center: Weights, settings: Langevin) -> Mapping[str, Tensor]:
    """Masks of sampled parameters, in their shape and type."""
    if not masks:
        return {}
    if settings.precondition != "none":
        raise GeometryError(setting="precondition", given=settings.precondition, allowed="none with masks")
    for name, mask in masks.items():
        if name not in center or mask.shape != center[name].shape or not mask.any():
            allowed = "a tensor in the shape of a sampled parameter, with an entry that is not 0"
            raise GeometryError(setting="masks", given=name, allowed=allowed)
    return {name: (mask != 0).to(center[name]) for name, mask in masks.items()}


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
