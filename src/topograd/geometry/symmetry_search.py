"""Search for a network's continuous symmetries: candidates by structure, each tested with numbers.

Statement. A candidate (`symmetries.py`) holds if, for a random group element g, on one example and at weights
θ that are the model's with some noise (weights that are zero or diagonal have more symmetries than their
shape),

    ‖f(g·θ) - f(θ)‖ / ‖f(θ)‖ ≤ tolerance      and the network notices when the first tensor of it moves alone,

with log-probabilities in the place of f for shifts of a head. Tried are

    two maps (`symmetry_candidates.py`), the outputs of one as many as the inputs of the other (or a part of
    them, as with grouped heads), or two maps of the same inputs. A map that was called on what was there
    before the other answered does not read it. A factor on the whole of one and its inverse on the other
    comes first: it is in every group, so that most pairs take one run. Then the block grows from one unit by
    prime factors for as long as it holds; where one unit does not hold, the numbers that commute with a
    rotation are tried, then one factor for each block. Activations are not looked up: degree 1 is tried
    (ReLU, linear, the ungated half of SwiGLU), then degree 2 (ReLU²). Two maps that share a group are not
    tried for another: its factors as a whole hold.
    a norm's gain with the maps that read its output, and the kernel of a LayerNorm in each of them, seen in
    one run
    the rows of a map that has as many outputs as the network, with the heads that its stages have, or as many
    as a LayerNorm reads: a stream that LayerNorms alone read does not show a shift of all its channels; and
    those of a router of experts, by its name

Of modules of one class and shape the first is tried; the others are then confirmed all together, and by
halves where that fails. Names matter little: degree 2 and one factor for each block are tried of likely
pairs alone, and only these are reported where they do not hold.
Cost: some tens of runs of one short example. The model is not changed: values are replaced for a call
(`torch.func.functional_call`).
Source: the search is ours; `optim/discovery.py` makes an optimizer's gauges of its result.
Limits. One example and one g: evidence, not a proof. Several maps in one matrix and convolutions are named in
`notes` and not tried.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from topograd.geometry.monitors.layernorm import normalises
from topograd.geometry.symmetries import (
    ChannelScale,
    Form,
    HeadShift,
    KernelShift,
    Mixing,
    Parameters,
    Shift,
    Symmetry,
)
from topograd.geometry.symmetry_candidates import (
    ROUTERS,
    Calls,
    Map,
    Maps,
    Pair,
    any_pairs,
    candidate,
    families,
    find_maps,
    fused_maps,
    like,
    likely_pairs,
)

Run = Callable[[Parameters], Any]
"""The outputs of the network with these values in the place of its own."""
TOLERANCE = 1e-7
"""Largest residual of a symmetry; broken ones showed 1e-5 and more, rounding 1e-15."""
ROUNDING = 1e4 * torch.finfo(torch.float64).eps
"""Of the outputs, which are in float64."""
NOISE = 0.3
CLEAR = 1e3
"""A smaller effect of one tensor alone counts where it is this many times the residual: in a fresh model that
of queries is."""
FACTOR = 1.5
"""On a tensor as a whole."""


@dataclass(frozen=True)
class FoundSymmetries:
    """The symmetries that hold, and notes on what was not tried."""

    symmetries: tuple[Symmetry, ...]
    notes: tuple[str, ...]
    unconfirmed: tuple[Symmetry, ...] = ()
    """Likely by structure, but broken, or without effect, in the first module of their kind."""


def find_symmetries(model: nn.Module, run: Run, *, softmax: bool = True) -> FoundSymmetries:
    """The continuous symmetries of a model, each confirmed by `run` on its example.

    With `softmax` the outputs are logits, whose shift by a constant counts as no change.
    """
    search = _Search(model, run)
    held: list[Symmetry] = []
    for family in families(search.maps, model):
        held += search.mixings(*family)
    held += search.links()
    held += search.confirmed(list(search.scales()))
    held += search.shifts(softmax)
    held += search.stream_shifts()
    held += search.confirmed(list(search.kernel_shifts()))
    missed = [one for one in dict.fromkeys(search.missed) if one not in held]
    notes = []
    if where := next(fused_maps(model), None):
        notes.append(f"symmetries of {where} were not looked for: it is several maps in one matrix")
    if any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in model.modules()):
        notes.append("symmetries of convolutions were not looked for")
    return FoundSymmetries(tuple(dict.fromkeys(held)), tuple(notes), tuple(missed))


class Response:
    """How far the outputs of a network move when some of its parameters have other values."""

    def __init__(self, run: Run, parameters: Parameters) -> None:
        self.parameters = parameters
        self._run = run
        self.before = self.outputs()

    def outputs(self, moved: Parameters | None = None) -> list[Tensor]:
        """Of the network with these values in the place of its own."""
        return floating_tensors(self._run({**self.parameters, **(moved or {})}))

    def away(self, moved: Parameters, softmax: bool = False) -> float:
        """The largest relative change of an output, or of its log-probabilities; infinite if not finite."""
        worst = 0.0
        for before, after in zip(self.before, self.outputs(moved), strict=True):
            if softmax:
                before, after = before.log_softmax(-1), after.log_softmax(-1)
            change = ((after - before).norm() / before.norm().clamp_min(1e-30)).item()
            worst = max(worst, change if change == change else float("inf"))
        return worst


class _Search(Response):
    """The network on one example, and the candidates that leave its outputs alone."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        self.model = model
        self.names = {id(tensor): name for name, tensor in model.named_parameters()}
        self.maps = dict(find_maps(model, self.names))
        self.missed: list[Symmetry] = []
        """Likely ones that do not hold."""
        self._tried: set[Pair] = set()
        self._held: list[Mixing] = []
        self.calls = Calls(self.maps)
        with self.calls.of(model):
            super().__init__(run, jittered(model))
        self._width = self.before[0].shape[-1] if self.before[0].dim() else 0

    def holds(self, *symmetries: Symmetry) -> bool:
        """Whether these leave the outputs alone, and the first tensor of the first alone changes them."""
        generator = torch.Generator().manual_seed(0)
        moved: dict[str, Tensor] = {}
        for one in symmetries:
            moved |= one.act({**self.parameters, **moved}, generator)
        softmax = any(one.up_to_softmax for one in symmetries)
        residual = self.away(moved, softmax)
        if not residual <= TOLERANCE:
            return False
        name = symmetries[0].names[0]
        alone = {name: moved[name]} if len(moved) > 1 else {name: FACTOR * self.parameters[name]}
        effect = self.away(alone, softmax)
        return effect > min(TOLERANCE, max(ROUNDING, CLEAR * residual))

    def confirmed(self, symmetries: Sequence[Symmetry]) -> list[Symmetry]:
        """All, if they hold together; else what is confirmed of either half."""
        if not symmetries or self.holds(*symmetries):
            return list(symmetries)
        if len(symmetries) == 1:
            self.missed += symmetries
            return []
        middle = len(symmetries) // 2
        return self.confirmed(symmetries[:middle]) + self.confirmed(symmetries[middle:])

    def mixings(self, first: Maps, *others: Maps) -> list[Symmetry]:
        """The pairs among these maps that have a symmetry, and those of other modules with such maps."""
        held: dict[tuple[str, str], Mixing] = {}
        missed: dict[tuple[str, str], Mixing] = {}
        likely = list(likely_pairs(first))
        for one, other, by_rows in dict.fromkeys([*likely, *any_pairs(first)]):
            start = candidate(first[one], first[other], by_rows)
            if start is None or self._known(start) or self._idle(start):
                continue
            listed = (one, other, by_rows) in likely
            if mixing := self._mixing(start, listed):
                held[one, other] = mixing
            elif listed:
                missed[one, other] = start
        alike = []
        for maps in others:
            alike += [like(mixing, maps[one], maps[other]) for (one, other), mixing in held.items()]
            self.missed += [like(mixing, maps[one], maps[other]) for (one, other), mixing in missed.items()]
            self._tried |= {(a.weight, b.weight, False) for a, b in permutations(maps.values(), 2)}
        return [*held.values(), *self.confirmed(alike)]

    def links(self) -> list[Mixing]:
        """The pairs of which one read the other in the run, in whatever modules they are."""
        mixings = []
        for source, reader in self.calls.links():
            pair = candidate(self.maps[source], self.maps[reader], by_rows=False)
            if pair is not None and not self._known(pair) and (held := self._mixing(pair, listed=True)):
                mixings.append(held)
        return mixings

    def _mixing(self, pair: Mixing, listed: bool) -> Mixing | None:
        """The group that two maps share, with the largest block for which it holds."""
        self._tried.add((pair.producer, pair.consumer, pair.by_rows))
        squared = replace(pair, degree=2)
        held = None
        if self._as_a_whole(pair):
            held = self._largest(pair) or (self._by_block(pair) if listed else None)
        elif listed and not pair.by_rows and self._as_a_whole(squared) and self.holds(squared):
            held = squared
        if held is not None:
            self._held.append(held)
        elif listed:
            self.missed.append(pair)
        return held

    def _idle(self, pair: Mixing) -> bool:
        """Whether there is nothing to find: the two share a group, or one never reads the other."""
        if any({pair.producer, pair.consumer} == {one.producer, one.consumer} for one in self._held):
            return True
        return not pair.by_rows and not self.calls.may_read(pair.consumer, pair.producer)

    def _known(self, pair: Mixing) -> bool:
        """Whether it was tried, for rows in either order."""
        one, other = pair.producer, pair.consumer
        key = (one, other, pair.by_rows)
        return key in self._tried or (pair.by_rows and (other, one, True) in self._tried)

    def _as_a_whole(self, pair: Mixing) -> bool:
        """A factor on one and its inverse on the other: in every group, so the test to begin with."""
        up, down = FACTOR, FACTOR**-pair.degree
        factors = {pair.producer: up, pair.bias: up, pair.consumer: down, pair.consumer_bias: down}
        moved = {name: f * self.parameters[name] for name, f in factors.items() if name is not None}
        return self.away(moved) <= TOLERANCE

    def _largest(self, pair: Mixing) -> Mixing | None:
        units = pair.units(self.parameters)
        sizes = [n for n in range(units, 1, -1) if units % n == 0]
        across = self.parameters[pair.consumer].shape[0 if pair.by_rows != pair.turned else 1]
        if across > units:  # heads that share one: only their own size fits
            for size in sizes:
                if self.holds(shared := replace(pair, size=size)):
                    return shared
        elif self.holds(pair):
            for prime in sorted({*_primes(units)}):
                while units % (size := pair.size * prime) == 0 and self.holds(
                    larger := replace(pair, size=size)
                ):
                    pair = larger
            return pair
        forms: tuple[Form, ...] = ("half", "pairs")
        tried = [replace(pair, size=n, form=form) for n in sizes if n % 2 == 0 for form in forms]
        return next((one for one in tried if self.holds(one)), None)

    def _by_block(self, pair: Mixing) -> Mixing | None:
        """One factor for each block; not where maps between the two have it: a map feeds and is fed once."""
        if any(pair.producer == one.producer or pair.consumer == one.consumer for one in self._held):
            return None
        units = pair.units(self.parameters)
        tried = (replace(pair, size=n, form="scalar") for n in range(2, units + 1) if units % n == 0)
        return next((one for one in tried if self.holds(one)), None)

    def scales(self) -> Iterator[ChannelScale]:
        """Every module with a gain, with the maps that read its output in one run."""
        shared, stages = self._head()
        for path, readers in self.calls.readers.items():
            own = dict(self.model.get_submodule(path).named_parameters(recurse=False))
            gain, bias = own.get("weight"), own.get("bias")
            if gain is None or gain.dim() != 1 or own.keys() - {"weight", "bias"}:
                continue
            maps = [self.maps[reader] for reader in readers]
            weights = dict.fromkeys(one.weight for one in maps)
            weights |= dict.fromkeys(stages if shared is not None and shared.weight in weights else ())
            fit = all(one.inputs == len(gain) and one.turned == maps[0].turned for one in maps)
            if fit and (bias is None or bias.shape == gain.shape):
                label = None if bias is None else self.names[id(bias)]
                yield ChannelScale(self.names[id(gain)], tuple(weights), label, int(not maps[0].turned))

    def shifts(self, softmax: bool) -> Iterator[Symmetry]:
        """Of maps with as many outputs as the network, and of the head with what stages have beside it."""
        head, stages = self._head()
        if head is not None and stages:
            yield from self.confirmed([HeadShift(head.weight, stages)])
        kinds = (False, True) if softmax else (False,)
        for one in self.maps.values():
            names = (None if one.turned else one.weight, one.bias) if one.outputs == self._width > 1 else ()
            for tried in [[Shift(name, kind) for kind in kinds] for name in names if name is not None]:
                held = next((shift for shift in tried if self.holds(shift)), None)
                self.missed += [tried[-1]] if held is None and one == head else []
                yield from [] if held is None else [held]

    def stream_shifts(self) -> Iterator[Symmetry]:
        """Of maps that write into a stream which LayerNorms read, and of routers: theirs are logits too.

        One of each kind first, then all of it.
        """
        norms = [module for module in self.model.modules() if isinstance(module, nn.LayerNorm)]
        widths = {norm.normalized_shape[0] for norm in norms if len(norm.normalized_shape) == 1}
        writers = [
            (path, one.outputs, one.weight, one.bias, int(one.turned)) for path, one in self.maps.items()
        ]
        for path, module in self.model.named_modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):  # patches of images
                weight, bias = (
                    None if p is None else self.names[id(p)] for p in (module.weight, module.bias)
                )
                writers.append((path, module.out_channels, str(weight), bias, 0))
        kinds: dict[tuple[str, bool], list[Shift]] = {}
        for path, outputs, weight, bias, dim in writers:
            routes = path.rpartition(".")[2] in ROUTERS
            if (outputs in widths or routes) and outputs != self._width:
                like = re.sub(r"\d+", "", path)
                kinds.setdefault((like, False), []).append(Shift(weight, False, dim, stream=True))
                if bias is not None:
                    kinds.setdefault((like, True), []).append(Shift(bias, False, stream=True))
        for first, *others in kinds.values():
            if self.holds(first):
                yield from (first, *self.confirmed(others))

    def kernel_shifts(self) -> Iterator[KernelShift]:
        """Of every map that was seen to read a LayerNorm's output."""
        every = {*self.calls.readers, *self.calls.attentions.values()}
        for path, norm in self.model.named_modules():
            if path not in every or not isinstance(norm, nn.LayerNorm) or len(norm.normalized_shape) != 1:
                continue
            gain = None if norm.weight is None else self.names[id(norm.weight)]
            zero = norm.bias is None or not norm.bias.any()
            beta = None if zero else self.names[id(norm.bias)]
            maps = [self.maps[reader] for reader in self.calls.readers.get(path, ())]
            maps += self._packed(path)
            for one in dict.fromkeys(maps):
                if one.inputs == norm.normalized_shape[0] and (beta is None or one.bias is not None):
                    yield KernelShift(one.weight, one.bias if beta else None, gain, beta, one.turned)

    def _packed(self, source: str) -> Iterator[Map]:
        """Queries, keys and values in one matrix, of the attentions that read a module."""
        for path, made in self.calls.attentions.items():
            attention: Any = self.model.get_submodule(path)
            weight, bias = attention.in_proj_weight, attention.in_proj_bias
            if made == source and weight is not None:
                label = None if bias is None else self.names[id(bias)]
                yield Map(self.names[id(weight)], label, *weight.shape)

    def _head(self) -> tuple[Map | None, tuple[str, ...]]:
        """The last map that was called with as many outputs as the network, and its stages' own matrices."""
        heads = [path for path in self.calls.order if self.maps[path].outputs == self._width > 1]
        if not heads:
            return None, ()
        deltas = getattr(self.model.get_submodule(heads[-1]), "deltas", None)
        own = [getattr(delta, "weight", None) for delta in deltas.children()] if deltas is not None else []
        return self.maps[heads[-1]], tuple(self.names[id(w)] for w in own if isinstance(w, nn.Parameter))


def jittered(model: nn.Module) -> dict[str, Tensor]:
    """The parameters in float64, with noise of a part of their own size.

    Gains and biases of norms that are one number stay: what is flat for that alone is flat in this model.
    """
    generator = torch.Generator().manual_seed(0)
    norms = [module for module in model.modules() if normalises(module)]
    own = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    values = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().double()
        if id(parameter) in own and (parameter == parameter.flatten()[0]).all():
            values[name] = value
            continue
        size = NOISE * (float(value.square().mean().sqrt()) or 1.0)
        noise = torch.randn(value.shape, generator=generator).to(value)
        values[name] = value.add(noise, alpha=size)
    return values


def floating_tensors(output: Any) -> list[Tensor]:
    """The floating tensors in a model's output; only `logits` where it has them."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(getattr(output, "logits", None), Tensor):
        return [output.logits]
    if isinstance(output, Mapping):
        return floating_tensors(list(output.values()))
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [tensor for part in output for tensor in floating_tensors(part)]
    return []


def _primes(n: int) -> list[int]:
    """The prime factors of n, each as often as it divides.

    >>> _primes(12)
    [2, 2, 3]
    """
    factors, divisor = [], 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors
