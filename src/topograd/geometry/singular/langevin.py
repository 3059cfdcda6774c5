"""Langevin chains around a model's weights: settings, data, preconditioner, the step that they bear.

Statement. A chain of `coefficient.py`: w ← w - (ε/2) M u + √(ε M) N(0, I) with u = nβ g + γ(w - w*), over
some parameters, and of these over the entries that a mask keeps: gradient and noise are zero elsewhere, and
the weights stay at w*.

The step is the largest with ε c / 4 ≤ `LARGEST_BIAS`, c the largest eigenvalue of √M (nβH + γ) √M that power
iteration finds at w* and where a short chain gets; M is the one that the chain will have.

Chains of one layer compute only what is behind it: what the layers before return on a batch is stored.

Symbols. H the curvature of batches by differences of gradients. Cost of the step: `SEARCHED` gradients where
it is the first that is tried, as most are, and `TRIED` more for each other; with a preconditioner one of each
batch.
Source: Li, Chen, Carlson and Carin, "Preconditioned Stochastic Gradient Langevin Dynamics".
Limits. As of `coefficient.py`.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from topograd.errors import DivergenceError, GeometryError
from topograd.geometry.factors import Batch, Outputs, refuse_random
from topograd.geometry.host_copy import first_not_finite, squared_norm, to_host
from topograd.geometry.losses import OwnLoss
from topograd.geometry.paths import Replaced
from topograd.geometry.replay import Replay
from topograd.geometry.singular.terms import Weights, per_term

OnStep = Callable[[int, int], None]
"""(steps done, steps in all)."""
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
TRIED = WANDER + 1 + 2 * (TURNS // 3)
"""Gradients that a step is tried with."""
SEARCHED = 2 * TURNS + TRIED
TIMED = 3
"""Steps of which the median is taken."""
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
    control: bool = False
    """Whether a draw is the mean of L_b(w) - L_b(w*) over the batches b of its `thin` steps, which cost
    nothing more; else the losses of all terms are evaluated at it"""

    @property
    def steps(self) -> int:
        """Of one chain."""
        return self.burn_in + self.draws * self.thin

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


class Target:
    """The data and their loss, at any weights."""

    def __init__(
        self,
        model: nn.Module,
        loss: str | OwnLoss,
        batches: list[Batch],
        outputs: Outputs | None,
    ) -> None:
        refuse_random(model)
        self.masks: Mapping[str, Tensor] = {}
        """1 where a weight moves, 0 where it stays."""
        self._network = Replaced(model, outputs)
        self._loss = per_term(loss)
        self.batches = batches
        if not batches:
            raise GeometryError(
                "there are no batches", setting="batches", remedy="give at least one pair (inputs, targets)"
            )
        self._replays = {id(batch): Replay(model) for batch in batches}
        first = []
        for batch in batches:
            with torch.no_grad(), self._replays[id(batch)].recording():
                first.append(self._of(batch, {}))
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
        self._base = [part.mean() for part in first]

    def within(self, masks: Mapping[str, Tensor]) -> Self:
        """The same where only these entries move."""
        found = copy.copy(self)
        found.masks = masks
        return found

    def _of(self, batch: Batch, weights: Weights) -> Tensor:
        inputs, targets = batch
        if targets is None:
            raise GeometryError(
                "a batch has no targets", setting="batches", remedy="give pairs (inputs, targets)"
            )
        with self._replays[id(batch)].behind(set(weights)):
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
        found = dict(zip(learning, filled, strict=True))
        return value.detach(), {name: self.inside(name, g) for name, g in found.items()}

    def excess(self, value: Tensor, place: int) -> Tensor:
        """A batch's mean loss over that at w*: L_n(w) - L_n(w*) in the mean over batches drawn alike."""
        return (value - self._base[place]) * self._shares[place] * len(self._shares)

    def at_center(self) -> float:
        """L_n(w*)."""
        return sum(share * float(base) for share, base in zip(self._shares, self._base, strict=True))

    def inside(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor without what is outside of the parameter's mask."""
        return tensor * self.masks[name] if name in self.masks else tensor

    def moving(self, center: Weights) -> int:
        """d, the weights that move."""
        sizes = (int(self.masks[n].sum()) if n in self.masks else w.numel() for n, w in center.items())
        return sum(sizes)


@dataclass(frozen=True)
class Chain:
    terms: Tensor
    """Losses of every draw (draws, terms); with control variates their excess over w* (draws, 1)."""
    virial: float


def run_chain(
    target: Target,
    center: Weights,
    tempered: float,
    settings: Langevin,
    noise: Noise,
    number: int,
    on_step: OnStep | None = None,
) -> Chain:
    """One chain: the losses of its draws, and its virial over all steps after burn-in."""
    assert settings.step is not None
    weights = {name: w.clone() for name, w in center.items()}
    walk = _Walk(target, center, tempered, settings, noise)
    draws: list[Tensor] = []
    values: list[Tensor] = []
    virial: list[Tensor] = []
    excess: list[Tensor] = []
    size, steps = target.moving(center), settings.steps
    every = 1 if next(iter(center.values())).device.type == "cpu" else LOOK
    for i in range(steps):
        place = noise.place(len(target.batches))
        value, gradient = target.gradient(weights, target.batches[place])
        values.append(value)
        excess.append(target.excess(value, place))
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
        walk.scale.see(gradient, learn=burning)
        weights, moved = walk.stepped(weights, gradient, settings.step)
        if not burning:
            virial.append(torch.stack([part.to(moved[0]) for part in moved]))
            if (i - settings.burn_in + 1) % settings.thin == 0:
                mean = torch.stack(excess[-settings.thin :]).mean()[None] if settings.control else None
                draws.append(target.losses(weights) if mean is None else mean.cpu())
        if on_step is not None:
            on_step(number * steps + i + 1, settings.chains * steps)
    each = [sum(parts) / size for parts in to_host(virial)]
    return Chain(torch.stack(draws), sum(each) / len(each))


class Noise:
    """N(0, I) made on the device of the weights, and places among the batches: one seed, no copy."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, weight: Tensor) -> Tensor:
        """Of a weight's shape, where it is."""
        generator = self._of(weight.device)
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32, device=weight.device)
        return drawn.to(weight.dtype)

    def place(self, count: int) -> int:
        """One of so many; drawn on the CPU, where it is needed."""
        return int(torch.randint(count, (), generator=self._of(torch.device("cpu"))))

    def _of(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


class Preconditioner:
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

    def largest(self, names: Iterable[str]) -> float:
        """The largest of all M."""
        parts = [self[name] for name in names]
        return max(to_host([part.max() for part in parts if isinstance(part, Tensor)]), default=1.0)


def _total(parts: Weights) -> Tensor:
    """The sum over all tensors, in order, in float64 where the device has it."""
    has_none = any(part.device.type == "mps" for part in parts.values())
    first, *others = (part.sum().to(torch.float32 if has_none else torch.float64) for part in parts.values())
    return functools.reduce(torch.add, others, first)


class _Walk:
    """Steps around the center of one target: what they need beside the weights of the moment."""

    def __init__(
        self, target: Target, center: Weights, tempered: float, settings: Langevin, noise: Noise
    ) -> None:
        self._target, self._center, self._noise = target, center, noise
        self._tempered, self._pull = tempered, settings.localization
        self.scale = Preconditioner(settings.precondition, center)

    def stepped(self, weights: Weights, gradient: Weights, step: float) -> tuple[Weights, list[Tensor]]:
        """One step from these weights, and (w - w*)·u of every tensor before it."""
        found, virial = {}, []
        for name, w in weights.items():
            away = w - self._center[name]
            u = self._tempered * gradient[name] + self._pull * away
            virial.append((away * u).sum())
            M, noise = self.scale[name], self._target.inside(name, self._noise.like(w))
            found[name] = w - step / 2 * M * u + (step * M) ** 0.5 * noise
        return found, virial

    def bearable(self, weights: Weights, turns: int) -> float:
        """The step that the sharpest curvature here bears."""
        curvature = self._tempered * self._sharpest(weights, turns) + self._pull * self.scale.largest(weights)
        return 4 * LARGEST_BIAS / max(curvature, 1e-12)

    def _sharpest(self, weights: Weights, turns: int) -> float:
        """The largest eigenvalue of √M H √M that power iteration finds, H the curvature of batches here."""
        target, scale = self._target, self.scale
        x = {name: target.inside(name, self._noise.like(w)) for name, w in weights.items()}
        sharpest, reach = 0.0, 1e-3 * max(math.sqrt(squared_norm(weights.values())), 1e-3)
        for i in range(turns):
            before = math.sqrt(squared_norm(x.values())) or 1.0
            y = {name: scale[name] ** 0.5 * part for name, part in x.items()}
            size = math.sqrt(squared_norm(y.values())) or 1.0
            batch = target.batches[i % len(target.batches)]
            ahead = {name: w + reach / size * y[name] for name, w in weights.items()}
            behind = {name: w - reach / size * y[name] for name, w in weights.items()}
            up, down = target.gradient(ahead, batch)[1], target.gradient(behind, batch)[1]
            unit = size / before / (2 * reach)
            x = {name: unit * scale[name] ** 0.5 * (up[name] - down[name]) for name in weights}
            sharpest = max(sharpest, math.sqrt(squared_norm(x.values())))
        if not math.isfinite(sharpest):
            raise DivergenceError(
                "the loss is not finite around the weights", setting="model", remedy="give a trained model"
            )
        return sharpest

    def wandered(self, step: float) -> Weights | None:
        """Where a short chain with this step gets, whose preconditioner learns; None if it diverges."""
        weights, target = self._center, self._target
        for i in range(WANDER):
            value, gradient = target.gradient(weights, target.batches[i % len(target.batches)])
            if not math.isfinite(value):
                return None
            self.scale.see(gradient, learn=True)
            weights, _ = self.stepped(weights, gradient, step)
        finite = first_not_finite(weights) is None
        return weights if finite and math.isfinite(target.gradient(weights, target.batches[0])[0]) else None


def bearable_step(target: Target, center: Weights, tempered: float, settings: Langevin, seed: int) -> float:
    """ε with ε c / 4 ≤ LARGEST_BIAS for the sharpest curvature c at w*, and about so where a chain gets.

    At a singular w* the curvature may be 0 that a chain meets one step away.
    """
    walk = _Walk(target, center, tempered, settings, Noise(seed))
    for batch in target.batches if settings.precondition != "none" else ():
        walk.scale.see(target.gradient(center, batch)[1], learn=True)
    step = walk.bearable(center, TURNS)
    for _ in range(TRIALS):
        reached = walk.wandered(step)
        most = step / 4 if reached is None else walk.bearable(reached, TURNS // 3)
        if step <= SLACK * most:
            break
        step = max(most, step / 4)
    return step


def step_seconds(target: Target, center: Weights, settings: Langevin) -> float:
    """Of one step of a chain, by the clock: the median of some, after one that is slower."""
    walk = _Walk(target, center, 0.0, settings, Noise(0))
    weights, seconds = center, []
    for _ in range(1 + TIMED):
        began = time.perf_counter()
        _, gradient = target.gradient(weights, target.batches[0])
        walk.scale.see(gradient, learn=True)
        weights, moved = walk.stepped(weights, gradient, 1e-12)
        to_host([torch.stack([part.to(moved[0]) for part in moved])])  # a device is waited for
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
