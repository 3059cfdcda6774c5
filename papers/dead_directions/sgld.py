"""The local learning coefficient by sampling: Langevin chains around a trained parameter.

Statement. L_n(w) is the mean negative log-likelihood of n samples, w* a local minimum, β = 1/log n. The
estimator

    λ̂ = nβ ( E[L_n(w)] - L_n(w*) ),    w ~ exp(-nβ L_n(w) - (γ/2)|w - w*|²),

draws w by stochastic gradient Langevin dynamics, several chains that all start at w*:

    w ← w - (ε/2)( nβ ∇L_b(w) + γ(w - w*) ) + √ε N(0, I),

L_b on a batch of b samples that each chain draws anew. L_b(w) - L_b(w*) on that batch is what enters the
mean, so most of the batch's noise cancels.

Symbols. ε step, γ localisation, b batch. Cost: chains · (burn-in + draws) gradients of a batch, all chains at
once under `vmap`; a forward pass more for each where b < n. Nothing is written to the module.
Source: Lau, Furman, Wang, Murfet and Wei, "The Local Learning Coefficient: A Singularity-Aware Complexity
Measure"; Watanabe, "A widely applicable Bayesian information criterion". "Dead Directions: Geometric Singular
Learning", §13.5 is the reading that this one is compared with.
Limits. Biased in ε (a direction of curvature H counts ½/(1 - εc/4), c = nβH + γ), in γ (½·nβH/c), and in
1/log n. The spread over chains is not the error: chains share the biases. Dropout and batch statistics must
be switched off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from topograd.errors import DivergenceError, GeometryError
from topograd.geometry.host_copy import check_finite

LOOK = 100
"""Every so many steps the losses are looked at; a look waits for the device."""

Loss = Callable[[Tensor, Tensor], Tensor]
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Sgld:
    """How to sample. The defaults suit a curvature nβH of up to about 1000."""

    step: float = 1e-4
    """ε"""
    localization: float = 1.0
    """γ"""
    chains: int = 4
    burn_in: int = 500
    draws: int = 2000
    batch: int | None = None
    """b; all samples where it is None"""

    def __post_init__(self) -> None:
        if not 0 < self.step < math.inf:
            raise GeometryError(setting="step", given=self.step, allowed="finite and above 0")
        if not 0 <= self.localization < math.inf:
            raise GeometryError(
                setting="localization", given=self.localization, allowed="finite and at least 0"
            )
        for name, least in (("chains", 1), ("draws", 1), ("burn_in", 0), ("batch", 1)):
            if (given := getattr(self, name)) is not None and given < least:
                raise GeometryError(setting=name, given=given, allowed=f"at least {least}")


@dataclass(frozen=True)
class SampledCoefficient:
    """λ̂, its standard deviation over chains, and what it cost."""

    estimate: float
    spread: float
    by_chain: tuple[float, ...]
    batch_gradients: int
    example_gradients: int


def sample_learning_coefficient(
    module: nn.Module,
    loss: Loss,
    inputs: Tensor,
    targets: Tensor,
    settings: Sgld | None = None,
    *,
    seed: int = 0,
) -> SampledCoefficient:
    """λ̂ around the module's present parameters; those with `requires_grad` off stay where they are.

    `loss(outputs, targets)` is the mean negative log-likelihood of a batch.
    """
    settings = Sgld() if settings is None else settings
    n, center = _checked(module, inputs, targets)
    batch = min(settings.batch or n, n)
    tempered = n / math.log(n)  # nβ
    excess = _Excess(module, loss, center, inputs, targets, None if batch == n else batch)
    generator = torch.Generator(inputs.device).manual_seed(seed)
    weights = {name: w.expand(settings.chains, *w.shape).clone() for name, w in center.items()}
    losses = inputs.new_empty(settings.burn_in + settings.draws, settings.chains, dtype=torch.float64)
    for i in range(len(losses)):
        gradients, losses[i] = excess(weights, generator, settings.chains)
        for name, w in weights.items():
            pull = tempered * gradients[name] + settings.localization * (w - center[name])
            noise = torch.randn(w.shape, dtype=w.dtype, device=w.device, generator=generator)
            w.add_(-settings.step / 2 * pull + math.sqrt(settings.step) * noise)
        if (i + 1) % LOOK == 0 or i + 1 == len(losses):
            _finite(losses[: i + 1], settings)
    by_chain = tempered * losses[settings.burn_in :].mean(0)
    spread = float(by_chain.std()) if settings.chains > 1 else math.nan
    steps = len(losses) * settings.chains
    return SampledCoefficient(float(by_chain.mean()), spread, tuple(by_chain.tolist()), steps, steps * batch)


class _Excess:
    """Gradients of L_b, and L_b(w) - L_b(w*), for all chains at once."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        center: Weights,
        inputs: Tensor,
        targets: Tensor,
        batch: int | None,
    ) -> None:
        fixed = {name: p.detach() for name, p in module.named_parameters() if name not in center}
        fixed |= {name: b.detach().clone() for name, b in module.named_buffers()}

        def value(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
            return loss(functional_call(module, fixed | weights, (x,)), y)

        self.center, self.inputs, self.targets, self.batch = center, inputs, targets, batch
        over_data = None if batch is None else 0
        self.gradients = vmap(grad_and_value(value), in_dims=(0, over_data, over_data))
        self.value = value
        with torch.no_grad():
            self.base = value(center, inputs, targets) if batch is None else None

    def __call__(self, weights: Weights, generator: torch.Generator, chains: int) -> tuple[Weights, Tensor]:
        if self.batch is None:
            gradients, losses = self.gradients(weights, self.inputs, self.targets)
            return gradients, losses - self.base
        n = len(self.inputs)
        chosen = torch.randint(n, (chains, self.batch), device=self.inputs.device, generator=generator)
        x, y = self.inputs[chosen], self.targets[chosen]
        gradients, losses = self.gradients(weights, x, y)
        with torch.no_grad():
            base = vmap(lambda x, y: self.value(self.center, x, y))(x, y)
        return gradients, losses - base


def _checked(module: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[int, Weights]:
    """n and the parameters to sample, or why there is nothing to sample."""
    n = len(inputs)
    if n != len(targets) or n < 3:
        raise GeometryError(
            f"{n} inputs and {len(targets)} targets: give as many of each, 3 or more",
            setting="targets",
            given=len(targets),
        )
    center = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    if not center:
        raise GeometryError(
            "no parameter of the module requires a gradient: there is nothing to sample", setting="module"
        )
    check_finite(center)
    return n, center


def _finite(losses: Tensor, settings: Sgld) -> None:
    """Stop at the first loss that is not finite, with its chain and draw."""
    bad = (~torch.isfinite(losses)).nonzero()
    if len(bad):
        i, chain = bad[0].tolist()
        draw = i - settings.burn_in
        at = f"draw {draw}" if draw >= 0 else f"step {i} of the burn-in"
        raise DivergenceError(
            f"the loss of chain {chain} is {losses[i, chain].item()} at {at}: step "
            f"{settings.step:g} is too large here",
            setting="step",
            given=settings.step,
            remedy="choose a smaller one",
        )
