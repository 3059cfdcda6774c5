"""Which symmetries does this network have? Candidates from its structure, each tested with numbers.

Statement. For each candidate gauge (`discovery_models.py`) with a random group element g, on a float64 copy,

    residual = ‖f(g·θ) - f(θ)‖ / ‖f(θ)‖         of log-probabilities for gauges that need a softmax

It holds if the residual is at most TOLERANCE, and the network notices when one block of it moves alone: a
symmetry that the example does not reach, or that a norm behind it makes trivial, is none to rely on.
Activations between two maps are not looked up but tried: degree 1 (ReLU, linear, the ungated half of
SwiGLU), then degree 2 (ReLU²). Pairs that share a map join to chains.

Overlaps. A tensor belongs to one gauge. In this order, the first keeps it:
HeadShift; LNScale, which has a dimension for each channel; chains and pairs, which have one for each map but
one, and give up the ends that are taken; attention's values with outputs, then queries with keys; the shifts
of softmax cross-entropy, which are symmetries of a loss and not of the function.

Symbols. `Found.gauges` are disjoint and pass every check of DDCAdam with the model's named_parameters().

Cost: one copy of the model in float64, and a few runs of it for each candidate. The model is not changed.

Source: the gauges are those of "Dead Directions: Geometric Singular Learning" section 11.1 and of
`optim/gauges`; their discovery is ours.

Limits. One example and one g: evidence, not a proof. TOLERANCE is above the rounding of models that compute
norms in float32 whatever their weights are. The loss is not known here: if it is not softmax cross-entropy,
leave out gauges with `up_to_softmax`, or what they freeze cannot be learnt.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import OptimError
from topograd.optim.assignment import check_gauges
from topograd.optim.discovery_models import candidates
from topograd.optim.gauges import ChainedReLURescale, Gauge, HeadShift, LNScale, ReLURescale
from topograd.optim.gauges.base import Example, default_example, floating_tensors, run
from topograd.optim.gauges.rescaling import Rescaling

TOLERANCE = 1e-7
"""Largest residual of a symmetry; broken ones showed 1e-5 and more, rounding 1e-15."""
DEGREES = (1.0, 2.0)
ALONE = 1.5
"""The factor on one block, to see whether the network notices."""


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not hold."""

    gauge: Gauge
    residual: float


@dataclass(frozen=True)
class Undecided:
    """Something that may be a symmetry, or is one that cannot be used, and why."""

    what: str
    reason: str


@dataclass(frozen=True)
class SetAside:
    """A gauge that holds and shares a tensor with another, which was preferred."""

    gauge: Gauge
    preferred: Gauge


@dataclass(frozen=True)
class Found:
    """What a network has: gauges for an optimizer, and everything else that was looked at."""

    gauges: tuple[Gauge, ...]
    undecided: tuple[Undecided, ...]
    rejected: tuple[Rejected, ...]
    set_aside: tuple[SetAside, ...]


def find_gauges(model: nn.Module, example: Example | None = None) -> Found:
    """The symmetries of a network, each confirmed on an example (an input, or a function that runs it).

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> found = find_gauges(model)
    >>> [type(gauge).__name__ for gauge in found.gauges]
    ['ChainedReLURescale', 'CEShiftBias']
    >>> found.set_aside[0].gauge
    CEShiftRowShift(weight='4.weight')
    """
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise OptimError(f"find_gauges needs a module with parameters, not {type(model).__name__}")
    search = _Search(model, example)
    found = candidates(search.twin, search.example)
    search.undecided += [Undecided(*remark) for remark in found.remarks]
    confirmed = [gauge for gauge in found.gauges if search.holds(gauge)]
    if any(isinstance(gauge, HeadShift) and gauge.rows for gauge in confirmed):  # it is both
        confirmed = [gauge for gauge in confirmed if not isinstance(gauge, HeadShift) or gauge.rows]
    chosen = _Choice()
    chosen.take(gauge for gauge in confirmed if isinstance(gauge, HeadShift))
    chosen.take(gauge for gauge in confirmed if isinstance(gauge, LNScale))
    chosen.take(_chains(chosen.free(search.pairs(found.pairs)), search))
    chosen.take(gauge for gauge in found.attentions if search.holds(gauge))
    chosen.take(gauge for gauge in confirmed if not isinstance(gauge, (HeadShift, LNScale)))
    return Found(
        tuple(chosen.gauges), tuple(search.undecided), tuple(search.rejected), tuple(chosen.set_aside)
    )


class _Search:
    """A float64 copy of the model, what it says on the example, and what became of each candidate."""

    def __init__(self, model: nn.Module, example: Example | None) -> None:
        self.model = model
        self.undecided: list[Undecided] = []
        self.rejected: list[Rejected] = []
        self.twin = copy.deepcopy(model).double().eval().requires_grad_(False)
        self.named = dict(self.twin.named_parameters())
        generator = torch.Generator().manual_seed(0)
        for tensor in self.named.values():
            if not tensor.any():  # zeros hide what holds
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        given = default_example(self.twin, generator) if example is None else example
        self.example = _every_stage(self.twin, given)
        self.before = self._outputs()
        if not self.before or not all(tensor.isfinite().all() for tensor in self.before):
            raise OptimError(f"{type(model).__name__} returned no finite floating tensor on the example")
        if self._away(self._outputs(), softmax=False) > TOLERANCE:
            raise OptimError(f"{type(model).__name__} says different things in two runs; make it repeatable")

    def holds(self, gauge: Gauge) -> bool:
        """Whether a candidate can be used; otherwise it is noted why not."""
        residual = self.residual(gauge)
        if residual > TOLERANCE:
            self.rejected.append(Rejected(gauge, residual))
        elif reason := self._obstacle(gauge):
            self.undecided.append(Undecided(str(gauge), reason))
        else:
            return True
        return False

    def pairs(self, given: Sequence[ReLURescale]) -> list[ReLURescale]:
        """The pairs that hold at some degree; a map feeds one other, and is fed by one."""
        kept: list[ReLURescale] = []
        for pair in given:
            if any(pair.up == other.up or pair.down == other.down for other in kept):
                continue
            tried = [replace(pair, degree=degree) for degree in DEGREES]
            best = min(tried, key=self.residual)
            if self.holds(best):
                kept.append(best)
        return kept

    @torch.no_grad()
    def residual(self, gauge: Gauge) -> float:
        """How much of the output a random element of the gauge changes."""
        element = gauge.element(self.named, torch.Generator().manual_seed(0))
        return self._moved(gauge.act(self.named, element), gauge.up_to_softmax)

    def _obstacle(self, gauge: Gauge) -> str:
        """Why a symmetry that holds cannot be used, or nothing."""
        own = dict(self.model.named_parameters())
        frozen = [name for name in gauge.names if not own[name].requires_grad]
        if frozen:
            return f"it holds, but {frozen[0]!r} does not learn (requires_grad is False)"
        if isinstance(gauge, Rescaling):
            try:
                gauge.check_norms({name: own[name].detach() for name in gauge.names})
            except OptimError as error:
                return f"{_holds_but(gauge, error)}; or look again after some steps without it"
        group = {"params": list(own.values()), "param_names": list(own), "weight_decay": 0.0}
        try:
            check_gauges([gauge], [group])
        except OptimError as error:
            return _holds_but(gauge, error)
        unseen = [names for names in _parts(gauge) if not self._notices(names, gauge.up_to_softmax)]
        if unseen:
            words = ", ".join(map(repr, unseen[0]))
            return f"the size of {words} does not show: a norm takes it out, or the example does not reach it"
        return ""

    @torch.no_grad()
    def _notices(self, names: Sequence[str], softmax: bool) -> bool:
        return self._moved({name: ALONE * self.named[name] for name in names}, softmax) > TOLERANCE

    def _moved(self, tensors: dict[str, Tensor], softmax: bool) -> float:
        """What these values in the place of the copy's own change."""
        kept = {name: self.named[name].clone() for name in tensors}
        for name, tensor in tensors.items():
            self.named[name].copy_(tensor)
        away = self._away(self._outputs(), softmax)
        for name, tensor in kept.items():
            self.named[name].copy_(tensor)
        return away

    @torch.no_grad()
    def _outputs(self) -> list[Tensor]:
        return [tensor.double() for tensor in floating_tensors(run(self.twin, self.example))]

    def _away(self, after: list[Tensor], softmax: bool) -> float:
        """The largest relative change of an output; infinite where one is not finite."""
        worst = 0.0
        for one, other in zip(self.before, after, strict=True):
            if softmax:
                one, other = one.log_softmax(-1), other.log_softmax(-1)
            away = ((other - one).norm() / one.norm().clamp_min(1e-300)).item()
            worst = max(worst, away if away == away else float("inf"))
        return worst


@dataclass
class _Choice:
    """Disjoint gauges, first come first served."""

    gauges: list[Gauge] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)

    def take(self, gauges: Iterable[Gauge]) -> None:
        """Keep each gauge whose tensors are free."""
        for gauge in gauges:
            if self._admits(gauge):
                self.gauges.append(gauge)

    def free(self, pairs: Iterable[ReLURescale]) -> list[ReLURescale]:
        """The pairs whose tensors are free; not taken yet, since they may join."""
        return [pair for pair in pairs if self._admits(pair)]

    def _admits(self, gauge: Gauge) -> bool:
        """Whether all tensors are free; if not, the gauge is set aside."""
        for other in self.gauges:
            if set(gauge.names) & set(other.names):
                self.set_aside.append(SetAside(gauge, other))
                return False
        return True


def _chains(pairs: Sequence[ReLURescale], search: _Search) -> list[Gauge]:
    """Pairs that share a map as one gauge each."""
    after = {pair.up: pair for pair in pairs}
    fed = {pair.down for pair in pairs}
    gauges: list[Gauge] = []
    for pair in pairs:
        if pair.up in fed:
            continue
        chain = [pair]
        while chain[-1].down in after:
            chain.append(after[chain[-1].down])
        weights = [link.up for link in chain] + [chain[-1].down]
        joint = ChainedReLURescale(weights, [link.bias for link in chain], [link.degree for link in chain])
        gauges += [pair] if len(chain) == 1 else [joint] if search.holds(joint) else chain
    return gauges


def _holds_but(gauge: Gauge, error: OptimError) -> str:
    return f"it holds, but {error}".replace(f"{gauge}: ", "")


def _parts(gauge: Gauge) -> list[tuple[str, ...]]:
    """What the network must notice when it moves alone: each block of a rescaling, each tensor of a shift."""
    if isinstance(gauge, Rescaling):
        return [tuple(piece.name for piece in block) for block in gauge.blocks]
    return [(name,) for name in gauge.names]


def _every_stage(model: Any, example: Example) -> Example:
    """For a stack with heads for its stages, a function that reads all of them; else the example itself."""
    has = all(hasattr(model, name) for name in ("embed", "bus", "layers", "readout", "last_stage"))
    if not has or not isinstance(example, Tensor):
        return example

    def read(network: Any) -> list[Tensor]:
        h = network.embed(example)
        bus = network.bus(h, example)
        for layer in network.layers:
            h = layer(h, bus)
        return [network.readout(h, stage) for stage in range(network.last_stage + 1)]

    return read
