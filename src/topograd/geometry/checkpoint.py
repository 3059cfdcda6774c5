"""Flat directions of a checkpoint: by symmetry, dead by learning, or live.

Statement. Around the weights w* of a checkpoint, and on a probe batch of its data,

    1  symmetries    the continuous ones (`symmetry_search.py`): flat in every network of this shape
    2  factors       A and G of every layer (`inspection.py`), and the flattest input u and output v of each
    3  a direction   v uᵀ, |v| = |u| = 1, in units of the layer's root mean square singular value; what of it
                     lies along a symmetry's orbit is taken out
    4  a scan        K(t) = KL(p_{w*} ‖ p_{w* + tv}) outward from the checkpoint, t from 1e-3 to 1e-1, float64
    5  an order      K ~ t^{2k} by `fit_rate`, with its guards and interval: k = 1 is live, k > 1 is dead
    6  joint modes   layers that are flat one at a time, together: the order of a singularity is in their
                     joint motion. Beside it the mixture of all scanned directions with the least Fisher.
    7  λ             a direction of order k adds 1/(2k); where the parts of a joint mode are components that
                     cross, anchored lines give their orders, and λ, m follow; ν is that of one component

    8  a share       λ_i(nβ) of every direction at nβ = n / log n of the n loss terms that were read
                     (`finite_share.py`), and its order at w* itself with its crossover (`jets.py`)
    9  all layers    the Fisher along the `SEVERAL` flattest v uᵀ of every layer, from gradients of `SAMPLES`
                     samples (`layer_fisher.py`); the flattest layers by this are those that are scanned

A symmetry's tangent, if not taken out, would read as k = 2: its orbit bends away from the straight line.
A checkpoint of a trained network is not at a singularity: nearly every direction has k = 1. How flat it is,
2K/t² at the smallest t, and its share are then the reading.

Symbols and shapes. u (d_in), v (d_out) of a layer; t in units in which live directions are of size 1.
Cost: that of `inspect`, and some thirty forward passes of the probe for each scan, from the first layer that
moves on. At most `SCANNED` / parameters directions are scanned, the flattest first, `MIN_SCANS` at least. The
factors are gone before the probe, a copy of the weights in float64, is made: of SmolLM2 these are the two
largest things in memory.
Source: "Dead Directions: Geometric Singular Learning", Corollary 28 (the lift), §5.1, §10.1 (the quotient),
§12.1 (static readings), §13 (crossings).
Limits. One direction a layer is scanned, and K is on few tokens: a direction that the probe does not use
reads as dead.
Nothing here is a rate of training. What cannot be said is in `refused`, with its reason.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from topograd.errors import GeometryError
from topograd.geometry.advice import advice
from topograd.geometry.factors import Batch, Outputs, each_batch, outputs_of, refuse_random
from topograd.geometry.finite_share import Share, share_along
from topograd.geometry.gram_sums import Remembered
from topograd.geometry.inspection import Factor, Inspection, inspect, refuse_quantised
from topograd.geometry.jets import Jet
from topograd.geometry.layer_fisher import SAMPLES, LayerFisher, read_layers
from topograd.geometry.line_scan import InDouble, Probe, each_sample, short_example
from topograd.geometry.losses import CrossEntropy, Fisher, Loss, OwnLoss, SquaredError, loss_named
from topograd.geometry.paths import Likelihood
from topograd.geometry.rates import POINTS as RATE_POINTS
from topograd.geometry.rates import fit_rate, local_slope, log_grid
from topograd.geometry.singular.invariants import rlct, singular_fluctuation
from topograd.geometry.sketches import Sketched, flattest
from topograd.geometry.symmetries import Symmetry, length, without_symmetries
from topograd.geometry.symmetry_search import find_symmetries

DirectionKind = Literal["symmetry", "dead", "live"]
OnScan = Callable[[int, int], None]
"""(scans done, scans in all)."""
Parts = dict[str, Tensor]
WINDOWS = ((1e-3, 1e-1), (1e-2, 1e-1))
"""The second where fewer than `RATE_POINTS` of the first are above rounding."""
POINTS = 6
SCANNED = 1e9
"""Parameters times directions that are scanned."""
MIN_SCANS = 6
SEARCHED = 16
"""Tokens that symmetries are looked for on: of any they are exact."""
SEVERAL = 3
"""Directions of a layer whose Fisher is read."""
ALONG = 1 - 1e-8
"""The share along symmetry orbits from which a direction is one of symmetry."""
INTEGER = 0.1
ANCHOR = 0.3
"""Where the other parts of a joint mode are held while one moves, in units of t."""
MAX_PARTS = 8
"""Of a joint mode whose crossing is looked for."""


@dataclass(frozen=True)
class DirectionReading:
    """One direction, or one group of symmetries."""

    layer: str
    kind: DirectionKind
    order: int | None = None
    """k; None for a symmetry, and where it could not be read."""
    interval: tuple[float, float] | None = None
    """Of half the slope of K: the middle 90 % over bootstrap draws."""
    fisher: float | None = None
    """2 K / t² at the smallest t; a bound from above where K is below the rounding of the outputs."""
    limit: float | None = None
    """What it adds to λ as data grow: 1/(2k), or λ of the crossing; 0 for a symmetry."""
    share: Share | None = None
    """What it adds to λ at the scale of the data that were read."""
    jet: Jet | None = None
    """The order at the checkpoint itself, and where the next power is as large."""
    symmetry_share: float = 0.0
    """How much of the square of v uᵀ lies along symmetry orbits; it was taken out."""
    dimensions: int = 1
    group: str | None = None
    moves: tuple[str, ...] = ()
    """The parameters that it moves."""
    crossing: Mapping[str, Any] | None = None
    """Orders of the parts of a joint mode, λ, m and ν."""
    fluctuation: float | None = None
    """ν(k) of one component of this order."""


@dataclass(frozen=True)
class CheckpointReading:
    """The directions of a checkpoint, beside its `inspect` readings."""

    inspection: Inspection
    directions: tuple[DirectionReading, ...]
    refused: tuple[str, ...]
    """What could not be read, each with its reason."""
    layers: Mapping[str, tuple[LayerFisher, ...]]
    """Of every layer the Fisher along its flattest directions; empty where there is no likelihood."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, words and lists; `sentences` interpret them."""
        plain = self.inspection.as_dict()
        plain["directions"] = [asdict(one) for one in self.directions]
        plain["refused"] = list(self.refused)
        for name, readings in self.layers.items():
            plain["layers"][name]["flattest"] = [asdict(one) for one in readings]
        plain["sentences"] = advice(plain)
        return plain


def read_checkpoint(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    loss: str | Loss | OwnLoss | None = "cross-entropy",
    fisher: Fisher = "monte-carlo",
    *,
    layers: list[nn.Module] | str | None = None,
    outputs: Outputs | None = None,
    generator: torch.Generator | None = None,
    scans: int | None = None,
    on_scan: OnScan | None = None,
) -> CheckpointReading:
    """Read a model's directions on batches (inputs, targets); the first rows of the first are the probe.

    `scans` is how many directions are followed outward; the other arguments are those of `inspect`.
    """
    if scans is not None and scans < 1:
        raise GeometryError(setting="scans", given=scans, allowed="at least 1 direction")
    refuse_quantised(model)
    refuse_random(model)
    first, every, samples = _first_and_all(batches)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    softmax = loss == "cross-entropy" or isinstance(loss, CrossEntropy)
    likelihood: Likelihood = "cross-entropy" if softmax else "squared-error"
    example = short_example(first[0], parameters)
    _refuse_noise(model, example, outputs or outputs_of)
    flat = _Candidates(model)
    how: dict[str, Any] = {"outputs": outputs, "generator": generator}
    inspection = inspect(model, every, loss, fisher, layers=layers, on_factors=flat.take, **how)
    candidates = [flat.found[name] for name in inspection.layers if name in flat.found]
    places = {name: place for place, name in enumerate(inspection.layers)}
    n_beta = inspection.terms / math.log(max(inspection.terms, 3))
    known = softmax or loss == "squared-error" or isinstance(loss, SquaredError)
    fishers: dict[str, tuple[LayerFisher, ...]] = {}
    if known:
        assert loss is not None
        directions = {one.layer: (one.inputs, one.outputs, one.scale) for one in candidates}
        fishers = read_layers(model, samples, loss_named(loss), directions, n_beta, **how)
    few = short_example(example, parameters, SEARCHED)
    search = find_symmetries(model, InDouble(model, few, outputs), softmax=softmax)
    probe = Probe(model, example, likelihood, outputs, layers)
    refused = [*inspection.notes, *search.notes, "rotations of the whole stream were not looked for"]
    if loss is not None and not known:
        refused.append("K is that of a Gaussian around the outputs: a loss of one's own has no distribution")
    candidates.sort(key=lambda one: fishers[one.layer][0].fisher if one.layer in fishers else one.flatness)
    most = scans or max(MIN_SCANS, int(SCANNED / max(parameters, 1)))
    if len(candidates) > most:
        refused.append(f"{len(candidates) - most} layers were not scanned, the flattest {most} were: --scans")
    scanner = _Scanner(probe, search.symmetries, refused, n_beta)
    total = min(most, len(candidates)) + 1
    readings: list[DirectionReading] = []
    for done, candidate in enumerate(candidates[:most]):
        if on_scan is not None:
            on_scan(done, total)
        readings += scanner.read(candidate)
    joint = scanner.joint()
    if on_scan is not None:
        on_scan(total, total)
    readings.sort(key=lambda one: places[one.layer])
    every_one = (*scanner.groups(), *joint, *readings)
    return CheckpointReading(inspection, every_one, tuple(dict.fromkeys(refused)), fishers)


@dataclass(frozen=True)
class Candidate:
    """The flattest inputs u and outputs v of a layer, in columns, and uᵀAu · vᵀGv of the first."""

    layer: str
    inputs: Tensor
    outputs: Tensor
    scale: float
    """The length of a step t = 1: the root mean square singular value."""
    flatness: float
    increment: Callable[[Tensor], Parts]
    """From scale · v uᵀ to the shape of the parameter."""

    def parts(self, i: int = 0, j: int = 0) -> Parts:
        """v uᵀ of the i-th output and the j-th input, in the shape of the parameter."""
        return self.increment(self.scale * torch.outer(self.outputs[:, i], self.inputs[:, j]))

    def others(self) -> Iterator[Parts]:
        """The same with the next v, or u, or both: the first may be a symmetry of outputs or inputs."""
        for i, j in ((1, 0), (0, 1), (1, 1)):
            if i < self.outputs.shape[1] and j < self.inputs.shape[1]:
                yield self.parts(i, j)


class _Scanner:
    """Scans directions, and stores those that a joint mode may be made of."""

    def __init__(
        self, probe: Probe, symmetries: Sequence[Symmetry], refused: list[str], n_beta: float
    ) -> None:
        self._probe, self._symmetries, self._refused = probe, symmetries, refused
        self._n_beta = n_beta
        self._has_jets = True
        self._flat: dict[str, Parts] = {}
        self._moving: dict[str, tuple[Parts, Tensor]] = {}

    def read(self, candidate: Candidate) -> list[DirectionReading]:
        """One layer's direction without its symmetric part; where nothing is left, also another one."""
        first = self._read(candidate.layer, candidate.parts())
        if first.kind != "symmetry":
            return [first]
        for parts in candidate.others():
            if (other := self._read(candidate.layer, parts)).kind != "symmetry":
                return [first, other]
        return [first]

    def groups(self) -> list[DirectionReading]:
        """The groups of symmetries that were taken out."""
        return [
            self._symmetry(
                one.names[0].removesuffix(".weight"),
                one.names,
                symmetry_share=1.0,
                dimensions=one.dimensions(self._probe.parameters),
                group=one.group,
            )
            for one in self._symmetries
        ]

    def _symmetry(self, layer: str, moves: tuple[str, ...], **more: Any) -> DirectionReading:
        none = Share(self._n_beta, 0.0, (0.0, 0.0))
        return DirectionReading(layer, "symmetry", limit=0.0, share=none, moves=moves, **more)

    def _read(self, layer: str, raw: Parts) -> DirectionReading:
        left, along = without_symmetries(raw, self._symmetries, self._probe.parameters)
        if along > ALONG:
            return self._symmetry(layer, tuple(left), symmetry_share=along)
        ratio = length(raw) / length(left)
        parts = {name: ratio * part for name, part in left.items() if part.any()}
        reading, change = self._scan(layer, parts)
        reading = self._at_scale(replace(reading, symmetry_share=along), parts)
        jet = reading.jet is not None and reading.jet.order is not None
        if change is not None:
            self._moving[layer] = (parts, change)
        elif jet or (reading.share is not None and reading.share.value > 0):
            reach = WINDOWS[0][1]
            self._refused.append(
                f"{layer}: K leaves the rounding of the outputs only above t = {reach:g}: it has no order"
            )
            return replace(reading, fisher=2 * self._probe.floor / reach**2, limit=None)
        else:
            self._flat[layer] = raw
            self._refused.append(
                f"{layer}: K is 0 along its flattest direction alone, so that it has no order: it is none of "
                "the symmetries, but the probe's outputs do not depend on it"
            )
        return reading

    def _at_scale(self, reading: DirectionReading, parts: Parts) -> DirectionReading:
        """The same with its share and its jet, or the reasons why not."""
        share = jet = None
        try:
            share = share_along(lambda grid: self._probe.curve(parts, grid), self._n_beta, self._probe.floor)
        except GeometryError as problem:
            self._refused.append(f"{reading.layer}: no share: {problem}")
        if self._has_jets:
            try:
                jet = self._probe.jet(parts)
            except (RuntimeError, NotImplementedError) as problem:  # of torch, where a derivative is missing
                self._has_jets = False
                self._refused.append(f"no jets: {' '.join(str(problem).split())[:120]}")
        kind = reading.kind
        if reading.order is None and jet is not None and jet.order is not None:
            kind = "live" if jet.order == 1 else "dead"  # the crossover may lie below the window
        return replace(reading, kind=kind, share=share, jet=jet)

    def _scan(
        self, layer: str, parts: Parts, held: Parts | None = None
    ) -> tuple[DirectionReading, Tensor | None]:
        """The reading of K along a direction, and the sketch of the change; None where there is none."""
        floor = self._probe.floor
        grid, second = (log_grid(*window, POINTS) for window in WINDOWS)
        if float(self._probe.curve(parts, grid[-RATE_POINTS, None], held).mean()) <= floor:
            grid = second  # K rises: below this point there is nothing to read either
        values, change = self._probe.scan(parts, grid, held)
        above = [(t, value) for t, value in zip(grid.tolist(), values, strict=True) if value > floor]
        moves = tuple(parts)
        if not above:
            return DirectionReading(layer, "dead", fisher=0.0, limit=0.0, moves=moves), None
        fisher = 2 * above[0][1] / above[0][0] ** 2
        rate = fit_rate(grid, values, floor=floor, estimator="KL divergence")
        half = None if rate.slope is None else rate.slope / 2
        order = 0 if half is None else round(half)
        if half is None or order < 1 or abs(half - order) > INTEGER:
            why = rate.refused if half is None else f"half the slope of K is {half:.2f}, which is no order"
            self._refused.append(f"{layer}: {why}")
            # no order: live if K begins as a square
            square = len(above) > 1 and local_slope(*zip(*above[:2], strict=True)) < 3
            return DirectionReading(layer, "live" if square else "dead", fisher=fisher, moves=moves), change
        assert rate.interval is not None, "a fitted rate has one"
        reading = DirectionReading(
            layer,
            "live" if order == 1 else "dead",
            order,
            (rate.interval[0] / 2, rate.interval[1] / 2),
            fisher,
            1 / (2 * order),
            moves=moves,
            fluctuation=singular_fluctuation(order),
        )
        return reading, change

    def joint(self) -> list[DirectionReading]:
        """The joint modes: of all layers that are flat alone, and of all that are not."""
        readings = []
        if len(self._flat) > 1:
            left, along = without_symmetries(
                _sum(self._flat.values()), self._symmetries, self._probe.parameters
            )
            reading, _ = self._scan(f"joint: {', '.join(self._flat)}", left)
            crossing = self._with_crossing(replace(reading, symmetry_share=along))
            readings.append(self._at_scale(crossing, left))
        if len(self._moving) > 1:
            readings.append(self._flattest_mixture())
        return readings

    def _flattest_mixture(self) -> DirectionReading:
        changes = torch.stack([change for _, change in self._moving.values()])
        weights = torch.linalg.svd(changes, full_matrices=True).U[:, len(changes) - 1]
        parts = _sum(
            {name: w * part for name, part in one.items()}
            for w, (one, _) in zip(weights.tolist(), self._moving.values(), strict=True)
        )
        leading = weights.abs().argsort(descending=True)[:3].tolist()
        names = [list(self._moving)[i] for i in leading]
        more = f" and {len(self._moving) - 3} more" if len(self._moving) > 3 else ""
        return self._at_scale(self._scan(f"joint: {', '.join(names)}{more}", parts)[0], parts)

    def _with_crossing(self, reading: DirectionReading) -> DirectionReading:
        """Orders of a joint mode's parts on anchored lines; λ and m if they add up to the mode's own."""
        if reading.order is None or not 2 <= len(self._flat) <= MAX_PARTS:
            return reading
        orders = {}
        for name, part in self._flat.items():
            others = _sum(other for layer, other in self._flat.items() if layer != name)
            held = {key: ANCHOR * value for key, value in others.items()}
            orders[name] = self._scan(f"{name} beside the others", part, held)[0].order
        known = [order for order in orders.values() if order is not None]
        if len(known) < len(orders) or sum(known) != reading.order:
            self._refused.append(f"{reading.layer}: its parts do not cross normally (orders {orders})")
            return reading
        coefficient, multiplicity = rlct(known)
        crossing = {"orders": orders, "rlct": coefficient, "multiplicity": multiplicity}
        alone = singular_fluctuation(max(known)) if multiplicity == 1 else None
        return replace(reading, limit=coefficient, crossing=crossing, fluctuation=alone)


class _Candidates:
    """The flattest directions of every layer, from factors that are whole one after the other."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._aliases = dict(model.named_parameters(remove_duplicate=False))
        self._modules = dict(model.named_modules())
        self._of_inputs = Remembered(lambda A: flattest(A, SEVERAL))
        self.found: dict[str, Candidate] = {}

    def take(self, layer: str, A: Factor, G: Factor | None, layout: tuple[str, Tensor] | None) -> None:
        """Read one layer."""
        base, places = layout or (layer if layer in self._aliases else f"{layer}.weight", None)
        owner = self._aliases[base]
        name, weight = self._names[id(owner)], owner.detach().flatten()
        weight = weight if places is None else weight[places.flatten()]
        U = self._of_inputs(A)
        if weight.numel() % len(U):
            return
        size = weight.numel() // len(U)
        if G is None:  # of which every direction is as flat
            G = Sketched(U.new_zeros(0), U.new_zeros(size, 0), float(size))
        V = flattest(G, SEVERAL)
        both = min(U.shape[1], V.shape[1])
        U, V = U[:, :both], V[:, :both]
        turned = owner.shape[-1] != len(U) or type(self._modules.get(layer)).__name__ == "Conv1D"
        scale = float(weight.double().norm()) / min(len(U), size) ** 0.5 or 1.0
        flatness = scale**2 * _along(A, U[:, 0]) * _along(G, V[:, 0])

        def increment(increment: Tensor) -> Parts:
            weight = self._model.get_parameter(name)
            increment = increment.to(weight.device)
            if places is not None:
                empty = increment.new_zeros(weight.numel())
                return {name: empty.index_copy_(0, places.flatten(), increment.flatten()).view(weight.shape)}
            return {name: (increment.mT if turned and weight.dim() == 2 else increment).reshape(weight.shape)}

        self.found[layer] = Candidate(layer, U, V, scale, flatness, increment)


@torch.no_grad()
def _refuse_noise(model: nn.Module, example: Any, call: Outputs) -> None:
    """Raise GeometryError where two calls of a model in training mode differ: dropout that is no module."""
    if any(module.training for module in model.modules()):
        used = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
        with torch.random.fork_rng(used):
            if not torch.equal(call(model, example), call(model, example)):
                raise GeometryError(
                    f"{type(model).__name__} draws at random, as dropout in training mode does",
                    setting="model",
                    remedy="call model.eval() first",
                )


def _along(factor: Factor, x: Tensor) -> float:
    if isinstance(factor, Sketched):
        rest = factor.trace - float(factor.values.sum())
        return max(rest, 0.0) / max(len(x) - len(factor.values), 1)
    return max(float(x @ factor @ x), 0.0)


def _sum(directions: Iterable[Mapping[str, Tensor]]) -> Parts:
    total: Parts = {}
    for direction in directions:
        for name, part in direction.items():
            total[name] = total[name] + part if name in total else part
    return total


def _first_and_all(batches: Any) -> tuple[Batch, Iterator[Batch], list[Batch]]:
    """The first batch, all of them, and a list that the first SAMPLES samples come into meanwhile.

    Mappings must have the same keys.
    """
    rest = each_batch(batches)
    first = next(rest, None)
    if first is None:
        raise GeometryError(
            "there are no batches", setting="batches", remedy="give at least one pair (inputs, targets)"
        )
    one = first[0]
    samples: list[Batch] = []

    def every() -> Iterator[Batch]:
        for batch in chain((first,), rest):
            samples.extend(islice(each_sample(batch), SAMPLES - len(samples)))
            other = batch[0]
            if isinstance(one, Mapping) and (not isinstance(other, Mapping) or one.keys() != other.keys()):
                given = ", ".join(map(str, other)) if isinstance(other, Mapping) else type(other).__name__
                raise GeometryError(
                    f"a batch has inputs {given}",
                    setting="batches",
                    given=given,
                    allowed=f"{', '.join(map(str, one))}, as in the first batch",
                )
            yield batch

    return first, every(), samples
