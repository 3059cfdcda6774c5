"""Gauges of a network: the symmetries that geometry finds, in the form that an optimizer divides by.

Statement. `geometry/symmetry_search.py` finds symmetries; each becomes the gauge of whole tensors in it:

    Mixing          ReLURescale: one factor on the producer, its inverse power on the consumer; those that
                    share a map join to a ChainedReLURescale
    ChannelScale    LNScale
    Shift           CEShiftRowShift of a matrix, CEShiftBias of a bias
    HeadShift       HeadShift, with the rows of every head where these shift too

With a random element g of the gauge itself, on a float64 copy near the model's weights,

    residual = ‖f(g·θ) - f(θ)‖ / ‖f(θ)‖         of log-probabilities for gauges that need a softmax

It holds if the residual is at most TOLERANCE, and the outputs change when one block of it moves alone: a
symmetry that the example does not reach, or that a norm after it makes trivial, is none to rely on.

Overlaps. A tensor belongs to one gauge, the first in this order:
HeadShift; LNScale, which has a dimension for each channel; chains and pairs, which have one for each map but
one, and drop the ends that are taken; queries with keys; the shifts of softmax cross-entropy, which are
symmetries of a loss and not of the function.

Symbols. `Found.gauges` are disjoint and pass every check of DDCAdam with the model's named_parameters().

Cost: three copies of the model in float64, the runs of the search, and a few more for each gauge. The model
is not changed.

Source: the gauges are those of "Dead Directions: Geometric Singular Learning" section 11.1 and of
`optim/gauges`; their discovery is ours.

Limits. One example and one g: evidence, not a proof. TOLERANCE is above the rounding of models that compute
norms in float32 whatever their weights are. The loss is not known here: if it is not softmax cross-entropy,
leave out gauges with `up_to_softmax`, or what they freeze cannot be learnt.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from topograd.errors import OptimError
from topograd.geometry import symmetries
from topograd.geometry.symmetries import ChannelScale, Mixing, Shift, Symmetry
from topograd.geometry.symmetry_search import (
    FACTOR,
    TOLERANCE,
    FoundSymmetries,
    Response,
    find_symmetries,
    fused_maps,
    jittered,
)
from topograd.optim.assignment import check_gauges
from topograd.optim.gauges import (
    CEShiftBias,
    CEShiftRowShift,
    ChainedReLURescale,
    Gauge,
    HeadShift,
    LNScale,
    ReLURescale,
)
from topograd.optim.gauges.base import Example, Parameters, runner
from topograd.optim.gauges.rescaling import Rescaling

DEGREES = (1.0, 2.0)


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
    """The gauges for an optimizer, and all other candidates."""

    gauges: tuple[Gauge, ...]
    undecided: tuple[Undecided, ...]
    rejected: tuple[Rejected, ...]
    set_aside: tuple[SetAside, ...]


@torch.no_grad()
def find_gauges(model: nn.Module, example: Example | None = None) -> Found:
    """The symmetries of a network, each confirmed on an example (an input, or a function that runs it).

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> result = find_gauges(model)
    >>> [type(gauge).__name__ for gauge in result.gauges]
    ['ChainedReLURescale', 'CEShiftBias']
    >>> result.set_aside[0].gauge
    CEShiftRowShift(weight='4.weight')
    """
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise OptimError(setting="model", given=type(model).__name__, allowed="a module with parameters")
    twin, run = runner(model, example)
    check = _Check(model, Response(run, jittered(twin)))
    search = find_symmetries(twin, run)
    check.undecided += _remarks(model, search)
    every = [*search.symmetries, *search.unconfirmed]
    mixings = [one for one in every if isinstance(one, Mixing)]
    others = dict.fromkeys(g for one in every for g in _gauges(one, check.named))
    confirmed = [gauge for gauge in others if check.holds(gauge)]
    if any(isinstance(gauge, HeadShift) and gauge.rows for gauge in confirmed):  # it is both
        confirmed = [gauge for gauge in confirmed if not isinstance(gauge, HeadShift) or gauge.rows]
    chains = check.pairs(_rescaling(one, check.named) for one in mixings if not one.by_rows)
    by_rows = check.pairs(_rescaling(one, check.named) for one in mixings if one.by_rows)
    chosen = _Choice()
    chosen.take(gauge for gauge in confirmed if isinstance(gauge, HeadShift))
    chosen.take(gauge for gauge in confirmed if isinstance(gauge, LNScale))
    chosen.take(_chains(chosen.free(chains), check))
    chosen.take(by_rows)
    chosen.take(gauge for gauge in confirmed if not isinstance(gauge, (HeadShift, LNScale)))
    return Found(tuple(chosen.gauges), tuple(check.undecided), tuple(check.rejected), tuple(chosen.set_aside))


def _gauges(symmetry: Symmetry, named: Parameters) -> Iterator[Gauge]:
    """The gauges that a symmetry, if it is no Mixing, may be to an optimizer."""
    match symmetry:
        case ChannelScale():
            yield LNScale(symmetry.gain, symmetry.readers, symmetry.bias, symmetry.dim)
        case symmetries.HeadShift():
            yield from (HeadShift(symmetry.shared, symmetry.stages, rows) for rows in (True, False))
        case Shift(stream=False):
            kind = CEShiftBias if named[symmetry.weight].dim() == 1 else CEShiftRowShift
            yield kind(symmetry.weight)


def _rescaling(pair: Mixing, named: Parameters) -> ReLURescale:
    """One factor on the producer; where rows meet, on the map that the model has first."""
    one, other = (pair.producer, pair.bias), (pair.consumer, pair.consumer_bias)
    names = list(named)
    if pair.by_rows and names.index(other[0]) < names.index(one[0]):
        one, other = other, one
    return ReLURescale(one[0], other[0], one[1], float(pair.degree))


class _Check:
    """Which gauges an optimizer can use, and why not the others."""

    def __init__(self, model: nn.Module, network: Response) -> None:
        self.named = dict(model.named_parameters())
        self.undecided: list[Undecided] = []
        self.rejected: list[Rejected] = []
        self._network = network
        if not network.before or not all(tensor.isfinite().all() for tensor in network.before):
            raise OptimError(
                f"{type(model).__name__} returned no finite floating tensor on the example", setting="example"
            )
        if network.away({}) > TOLERANCE:
            raise OptimError(
                f"{type(model).__name__} has different outputs in two runs",
                setting="model",
                remedy="make it deterministic",
            )

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

    def pairs(self, given: Iterable[ReLURescale]) -> list[ReLURescale]:
        """The pairs that hold at some degree; a map feeds one other, and is fed by one."""
        confirmed: list[ReLURescale] = []
        for pair in dict.fromkeys(given):
            tried = [replace(pair, degree=degree) for degree in (pair.degree, *DEGREES)]
            best = next((one for one in tried if self.residual(one) <= TOLERANCE), None)
            taken = any(pair.up == other.up or pair.down == other.down for other in confirmed)
            if not (best and taken) and self.holds(best or pair):
                confirmed.append(best or pair)
        return confirmed

    def residual(self, gauge: Gauge) -> float:
        """How much of the output a random element of the gauge changes."""
        here = self._network.parameters
        element = gauge.element(here, torch.Generator().manual_seed(0))
        return self._network.away(gauge.act(here, element), gauge.up_to_softmax)

    def _obstacle(self, gauge: Gauge) -> str:
        """Why a symmetry that holds cannot be used, or nothing."""
        frozen = [name for name in gauge.names if not self.named[name].requires_grad]
        if frozen:
            return f"it holds, but {frozen[0]!r} does not learn (requires_grad is False)"
        group = {"params": list(self.named.values()), "param_names": list(self.named), "weight_decay": 0.0}
        try:
            if isinstance(gauge, Rescaling):
                gauge.check_norms(self.named)
        except OptimError as error:
            return f"{_holds_but(gauge, error)}; or look again after some steps without it"
        try:
            check_gauges([gauge], [group])
        except OptimError as error:
            return _holds_but(gauge, error)
        parts: list[tuple[str, ...]] = [(name,) for name in gauge.names]
        if isinstance(gauge, Rescaling):
            parts = [tuple(piece.name for piece in block) for block in gauge.blocks]
        for names in parts:  # each must change the outputs when it moves alone
            moved = {name: FACTOR * self._network.parameters[name] for name in names}
            if self._network.away(moved, gauge.up_to_softmax) <= TOLERANCE:
                listed = ", ".join(map(repr, names))
                why = "a norm takes it out, or the example does not reach it"
                return f"the size of {listed} does not show: {why}"
        return ""


@dataclass
class _Choice:
    """Disjoint gauges, first come first served."""

    gauges: list[Gauge] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)

    def take(self, gauges: Iterable[Gauge]) -> None:
        """Add each gauge whose tensors are free."""
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


def _chains(pairs: Sequence[ReLURescale], check: _Check) -> list[Gauge]:
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
        gauges += [pair] if len(chain) == 1 else [joint] if check.holds(joint) else chain
    return gauges


def _holds_but(gauge: Gauge, error: OptimError) -> str:
    return f"it holds, but {error}".replace(f"{gauge}: ", "")


def _remarks(model: nn.Module, search: FoundSymmetries) -> Iterator[Undecided]:
    """Parts of the model that no gauge covers."""
    fused = next(fused_maps(model), None)
    if fused is not None:
        yield Undecided(fused, "queries, keys and values are one matrix: split it; gauges move whole tensors")
    if fused is not None or any(isinstance(one, Mixing) and one.size > 1 for one in search.symmetries):
        yield Undecided(
            "attention heads and linear maps",
            "a factor for each head, and an invertible matrix for each head's values and outputs (queries "
            "and keys, if no rotation is between them), may hold too; gauges here scale whole tensors",
        )
    modules = list(model.modules())
    if any(type(module).__name__ == "Conv1D" for module in modules):
        yield Undecided(
            "Conv1D", "its matrices are (inputs, outputs); there is no ReLURescale with a bias for them"
        )
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules):
        yield Undecided(
            "dropout", "it was off; a mask multiplies, so that a rescaling holds for each mask too"
        )
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules):
        yield Undecided(
            "batch norm", "it used running statistics; with a batch's own, sizes before it are lost"
        )
    if any(hasattr(module, "deltas") and getattr(module, "rank", None) for module in modules):
        yield Undecided("per-stage heads", "of low rank, they cannot take every shift of the shared head")
