"""Which continuous symmetries does this network have? Every pair of maps that could share one is tried.

Statement. A candidate (`symmetries.py`) holds if, for a random group element g, on one example and at weights
θ that are the model's with some noise (weights that are zero or diagonal have more symmetries than their
shape),

    ‖f(g·θ) - f(θ)‖ / ‖f(θ)‖ ≤ tolerance      and the network notices when the first tensor of it moves alone,

with log-probabilities in the place of f for shifts of a head. Candidates need no names:

    two maps below one module, the outputs of one as many as the inputs of the other (or a part of them, as
    with grouped heads), or two maps of the same inputs (queries and keys). A map that was called on what was
    there before the other answered does not read it. A factor on the whole of one and its inverse on the
    other is tried first: it is in every group, so that most pairs take one run. Then the block grows from one
    unit by prime factors for as long as it holds; where one unit does not hold, the numbers that commute with
    a rotation are tried. Two maps that share a group are not tried for another: its factors as a whole hold.
    a norm's gain with the maps that read its output, seen in one run
    the rows of a map that has as many outputs as the network

Modules of one class whose maps have the same shapes are tried once; the others are then confirmed all
together, and by halves where that fails.
Cost: some tens of runs of one short example. The model is not changed: values are put in its place for a
call (`torch.func.functional_call`).
Source: the search is ours; `optim/discovery.py` looks for the gauges that an optimizer can respect.
Limits. One example and one g: evidence, not a proof. Matrices of (inputs, outputs), such as GPT-2's Conv1D,
and several maps in one matrix are named in `notes` and not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import Any

import torch
from torch import Tensor, nn

from topograd.geometry.symmetries import ChannelScale, Form, Mixing, Parameters, Shift, Symmetry

Run = Callable[[Parameters], Tensor]
"""The outputs of the network with these values in the place of its own."""
TOLERANCE = 1e-7
ROUNDING = 1e4
"""In units of the type's rounding, where that is more than TOLERANCE."""
NOISE = 0.3
MOST_MAPS = 4
"""Below one module; in larger ones only maps next to one another are paired."""
MOST_SHARED = 64
"""Heads that may share one."""


@dataclass(frozen=True)
class Map:
    """A matrix (outputs, inputs), by the names of its parameters."""

    weight: str
    bias: str | None
    outputs: int
    inputs: int


@dataclass(frozen=True)
class FoundSymmetries:
    """What holds, and what was not tried."""

    symmetries: tuple[Symmetry, ...]
    notes: tuple[str, ...]


def find_symmetries(model: nn.Module, run: Run, *, softmax: bool = True) -> FoundSymmetries:
    """The continuous symmetries of a model, each confirmed by `run` on its example.

    With `softmax` the outputs are logits, whose shift by a constant counts as no change.
    """
    search = _Search(model, run)
    if search.tolerance > 0.1:
        kind = str(search.before.dtype).removeprefix("torch.")
        return FoundSymmetries((), (f"symmetries cannot be told from rounding in {kind}: use float32",))
    found: list[Symmetry] = []
    for template in _templates(search.maps, model):
        first, *others = template
        held = list(search.mixings(first))
        found += [one for _, _, one in held]
        found += search.confirmed([one for maps in others for one in _like(held, first, maps)])
    found += search.confirmed(list(search.scales()))
    found += search.shifts(softmax)
    return FoundSymmetries(tuple(dict.fromkeys(found)), tuple(_notes(model)))


class _Search:
    """The network on one example, and which candidates it does not notice."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        self.model = model
        self.names = {id(tensor): name for name, tensor in model.named_parameters()}
        self.parameters = _jittered(model)
        self.run = lambda moved: run({**self.parameters, **moved})
        self.maps = dict(_maps(model, self.names))
        self._tried: set[tuple[str, str, bool]] = set()
        self._sharing: set[frozenset[str]] = set()
        self.calls = _Calls()
        with self.calls.of(model, self.maps):
            self.before = self.run({})
        rounding = torch.finfo(self.before.dtype).eps
        self.tolerance = max(TOLERANCE, ROUNDING * rounding)

    def holds(self, *symmetries: Symmetry) -> bool:
        """Whether the network does not notice these, and notices the first tensor of the first alone."""
        generator = torch.Generator().manual_seed(0)
        moved: dict[str, Tensor] = {}
        for one in symmetries:
            moved |= one.act({**self.parameters, **moved}, generator)
        softmax = any(one.up_to_softmax for one in symmetries)
        if not self._away(moved, softmax) <= self.tolerance:
            return False
        name = symmetries[0].names[0]
        alone = {name: moved[name]} if len(moved) > 1 else {name: 1.5 * self.parameters[name]}
        return self._away(alone, softmax) > self.tolerance

    def confirmed(self, symmetries: Sequence[Symmetry]) -> list[Symmetry]:
        """All, if they hold together; else what is confirmed of either half."""
        if not symmetries or self.holds(*symmetries):
            return list(symmetries)
        middle = len(symmetries) // 2
        halves = (symmetries[:middle], symmetries[middle:]) if middle else ()
        return [one for half in halves for one in self.confirmed(half)]

    def mixings(self, maps: Mapping[str, Map]) -> Iterator[tuple[str, str, Mixing]]:
        """The pairs among these maps that have a symmetry, with the largest block for which it holds."""
        for one, other in _pairs(maps):
            for by_rows in (False, True):
                start = _candidate(maps[one], maps[other], by_rows)
                key = (maps[one].weight, maps[other].weight, by_rows)
                if start is None or key in self._tried or self._idle(start):
                    continue
                self._tried |= {key, (key[1], key[0], True)} if by_rows else {key}
                if self._as_a_whole(start) and (held := self._largest(start)) is not None:
                    self._sharing.add(frozenset(key[:2]))
                    yield one, other, held

    def _idle(self, pair: Mixing) -> bool:
        """Whether there is nothing to find: the two share a group, or one never reads the other."""
        if frozenset((pair.producer, pair.consumer)) in self._sharing:
            return True
        return not pair.by_rows and not self.calls.may_read(pair.consumer, pair.producer)

    def _as_a_whole(self, pair: Mixing) -> bool:
        """A factor on one and its inverse on the other: in every group, so the test to begin with."""
        up, down = 1.5, 1 / 1.5
        moved = {pair.producer: up * self.parameters[pair.producer]}
        moved[pair.consumer] = down * self.parameters[pair.consumer]
        for name, factor in ((pair.bias, up), (pair.consumer_bias, down)):
            if name is not None:
                moved[name] = factor * self.parameters[name]
        return self._away(moved, softmax=False) <= self.tolerance

    def _largest(self, pair: Mixing) -> Mixing | None:
        units = self.parameters[pair.producer].shape[0]
        sizes = [n for n in range(units, 1, -1) if units % n == 0]
        across = self.parameters[pair.consumer].shape[0 if pair.by_rows else 1]
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
        for size in (n for n in sizes if n % 2 == 0):
            for form in forms:
                if self.holds(turned := replace(pair, size=size, form=form)):
                    return turned
        return None

    def scales(self) -> Iterator[ChannelScale]:
        """Every module with a gain, with the maps that read its output in one run."""
        for path, readers in self.calls.readers.items():
            own = dict(self.model.get_submodule(path).named_parameters(recurse=False))
            gain, bias = own.get("weight"), own.get("bias")
            if gain is None or gain.dim() != 1 or own.keys() - {"weight", "bias"}:
                continue
            found = tuple(dict.fromkeys(self.maps[reader].weight for reader in readers))
            if all(self.parameters[name].shape[1] == len(gain) for name in found):
                yield ChannelScale(
                    self.names[id(gain)], found, None if bias is None else self.names[id(bias)]
                )

    def shifts(self, softmax: bool) -> Iterator[Shift]:
        """Of maps with as many outputs as the network."""
        widths = {self.before.shape[-1]} if self.before.shape[-1] > 1 else set()
        for one in self.maps.values():
            for name in (one.weight, one.bias) if one.outputs in widths else ():
                kinds = (False, True) if softmax else (False,)
                tried = [Shift(name, kind) for kind in kinds if name is not None]
                yield from [shift for shift in tried if self.holds(shift)][:1]

    def _away(self, moved: Parameters, softmax: bool) -> float:
        after, before = self.run(moved), self.before
        if softmax:
            after, before = after.log_softmax(-1), before.log_softmax(-1)
        found = ((after - before).norm() / before.norm().clamp_min(1e-30)).item()
        return found if found == found else float("inf")


def _jittered(model: nn.Module) -> dict[str, Tensor]:
    """The parameters in float64, with noise of a part of their own size."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().double()
        size = NOISE * (float(value.square().mean().sqrt()) or 1.0)
        noise = torch.randn(value.shape, generator=generator).to(value)
        found[name] = value.add(noise, alpha=size)
    return found


def _maps(model: nn.Module, names: Mapping[int, str]) -> Iterator[tuple[str, Map]]:
    """Every module whose parameters are a matrix (outputs, inputs) and perhaps a bias."""
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        weight = own.get("weight")
        if weight is None or weight.dim() != 2 or own.keys() - {"weight", "bias"}:
            continue
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or type(module).__name__ == "Conv1D":
            continue
        bias = None if own.get("bias") is None else names[id(own["bias"])]
        yield path, Map(names[id(weight)], bias, *weight.shape)


def _templates(maps: Mapping[str, Map], model: nn.Module) -> Iterator[list[dict[str, Map]]]:
    """Modules with some maps below them, small ones first, those of one class and shape together."""
    groups: dict[Any, list[dict[str, Map]]] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        below = {name.removeprefix(prefix): one for name, one in maps.items() if name.startswith(prefix)}
        if isinstance(module, nn.Sequential | nn.ModuleList):
            below = {name: one for name, one in below.items() if "." not in name}
        elif len(below) > MOST_MAPS:
            continue
        if len(below) > 1:
            shapes = tuple((name, m.outputs, m.inputs, m.bias is None) for name, m in below.items())
            groups.setdefault((type(module), shapes), []).append(below)
    return iter(sorted(groups.values(), key=lambda group: len(group[0])))


def _pairs(maps: Mapping[str, Map]) -> Iterator[tuple[str, str]]:
    if len(maps) > MOST_MAPS:
        yield from pairwise(maps)
    else:
        yield from permutations(maps, 2)


def _candidate(one: Map, other: Map, by_rows: bool) -> Mixing | None:
    """With blocks of one unit; None where the shapes do not meet or a tensor is shared."""
    units = other.outputs if by_rows else other.inputs
    fits = units % one.outputs == 0 and units // one.outputs <= MOST_SHARED
    if one.weight == other.weight or not fits or (by_rows and one.inputs != other.inputs):
        return None
    consumer_bias = other.bias if by_rows else None
    return Mixing(one.weight, other.weight, by_rows=by_rows, bias=one.bias, consumer_bias=consumer_bias)


def _like(
    held: Sequence[tuple[str, str, Mixing]], first: Mapping[str, Map], maps: Mapping[str, Map]
) -> Iterator[Mixing]:
    """What held in one module, for another of its kind."""
    for one, other, pair in held:
        yield replace(
            pair,
            producer=maps[one].weight,
            consumer=maps[other].weight,
            bias=maps[one].bias,
            consumer_bias=maps[other].bias if pair.by_rows else None,
        )


class _Calls:
    """What one run shows: which maps are called on which tensors, in which order, and who made these."""

    def __init__(self) -> None:
        self.readers: dict[str, list[str]] = {}
        """For each module with a gain whose output went into maps, their paths."""
        self._places: dict[str, list[tuple[int, int]]] = {}  # weight -> when it was called, since when its
        self._since: dict[tuple[int, int], int] = {}  # input had been there
        self._sources: dict[int, str] = {}
        self._alive: list[Tensor] = []  # so that no address is used twice
        self._calls = 0

    def may_read(self, reader: str, source: str) -> bool:
        """Whether a call of one weight has an input that came after the first call of the other."""
        if reader not in self._places or source not in self._places:
            return True  # used without its module: unknown
        first = self._places[source][0][0]
        return any(since > first for _, since in self._places[reader])

    @contextmanager
    def of(self, model: nn.Module, maps: Mapping[str, Map]) -> Iterator[None]:
        """While this is open, calls of the model are seen."""
        handles = []
        for path, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            if path in maps:
                handles.append(module.register_forward_pre_hook(self._enters(path, maps[path].weight)))
            elif own and all(parameter.dim() == 1 for parameter in own):
                handles.append(module.register_forward_hook(self._leaves(path)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()

    def _leaves(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                self._alive.append(output)
                self._sources[output.data_ptr()] = path

        return hook

    def _enters(self, path: str, weight: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            given = inputs[0] if inputs else None
            if not isinstance(given, Tensor):
                return
            self._alive.append(given)
            self._calls += 1
            since = self._since.setdefault((given.data_ptr(), given._version), self._calls)
            self._places.setdefault(weight, []).append((self._calls, since))
            if (source := self._sources.get(given.data_ptr())) is not None:
                self.readers.setdefault(source, []).append(path)

        return hook


def _notes(model: nn.Module) -> Iterator[str]:
    """What is there and was not tried."""
    fused = {"c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "in_proj_weight"}
    for path, module in model.named_modules():
        names = [*dict(module.named_children()), *dict(module.named_parameters(recurse=False))]
        if both := fused.intersection(names):
            where = f"{path}.{min(both)}".lstrip(".")
            yield f"symmetries of {where} were not looked for: it is several maps in one matrix"
            break
    if any(type(module).__name__ == "Conv1D" for module in model.modules()):
        yield "symmetries of Conv1D maps were not looked for: their matrices are (inputs, outputs)"
    if any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in model.modules()):
        yield "symmetries of convolutions were not looked for"


def _primes(n: int) -> list[int]:
    """The prime factors of n, each as often as it divides.

    >>> _primes(12)
    [2, 2, 3]
    """
    found, divisor = [], 2
    while n > 1:
        while n % divisor == 0:
            found.append(divisor)
            n //= divisor
        divisor += 1
    return found
