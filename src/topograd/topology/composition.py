"""Compositions of L and the Boolean lattice that they form.

A composition π = (d_0, ..., d_{K-1}) of L cuts a stack of L layers into K contiguous stages of d_k ≥ 1
layers. Its terminal indices are ℓ_k = d_0 + ... + d_k; the first K - 1 of them are its internal
boundaries, a subset of {1, ..., L - 1}. That subset determines π, so there are 2^(L-1) compositions.
π' refines π, written π ≼ π' and here `a <= b`, when every boundary of π is one of π'. Join is the union
of the boundaries, meet the intersection, the minimum (L) is backprop and the maximum (1, ..., 1) is one
layer per stage.

The order is partial: `a <= b` and `b <= a` may both be false, so `sorted` on compositions means nothing.
Compositions of different L belong to different lattices; comparing, joining or meeting them is an error.

Symbols: L `layers`, K `stages`, d_k `parts`, ℓ_k `terminals`, b ∈ {0, 1}^(L-1) `boundary_vector`.
Cost: O(L) for each operation; enumeration is lazy, O(K) for each composition that is taken.
Source: "Stage-Partitioned Learning" §2.1 (Def. 2.1-2.3), §3.1 (Def. 3.1, Prop. 3.2), §9.1 (eq. 25).
Limits: at most `MAX_LAYERS` layers, so that a typing error raises and does not fill the memory.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, SupportsIndex

from topograd.errors import TopologyError, shown

MAX_LAYERS = 10_000
"""More layers than this raise TopologyError."""


class Lattice:
    """The operators of a lattice, from `<=`, `join` and `meet`."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __le__(self, other: Self) -> bool: ...
        def join(self, other: Self) -> Self: ...
        def meet(self, other: Self) -> Self: ...

    def __lt__(self, other: Self) -> bool:
        return self <= other and self != other if isinstance(other, type(self)) else NotImplemented

    def __ge__(self, other: Self) -> bool:
        return other <= self if isinstance(other, type(self)) else NotImplemented

    def __gt__(self, other: Self) -> bool:
        return other < self if isinstance(other, type(self)) else NotImplemented

    def __or__(self, other: Self) -> Self:
        return self.join(other) if isinstance(other, type(self)) else NotImplemented

    def __and__(self, other: Self) -> Self:
        return self.meet(other) if isinstance(other, type(self)) else NotImplemented


@dataclass(frozen=True, slots=True)
class Composition(Lattice):
    """An ordered tuple of positive parts, the depths of the stages (Def. 2.1).

    >>> print(Composition.parse("4,4,4") | Composition.parse("6,6"))
    4,2,2,4
    >>> Composition.parse("12") <= Composition.parse("4,4,4")
    True
    """

    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", _checked_parts(self.parts))

    @classmethod
    def parse(cls, value: str | Composition | Iterable[int]) -> Composition:
        """The composition written as "4,4,4" (spaces allowed); a composition or a sequence is taken too."""
        if isinstance(value, Composition):
            return value
        if not isinstance(value, str):
            return cls.of(value)
        if not value.strip():
            raise _bad(value, "it is empty")
        parts = []
        for k, token in enumerate(value.split(",")):
            digits = token.strip()
            if not (digits.isascii() and digits.isdecimal() and len(digits) <= 9 and int(digits) > 0):
                raise _bad(value, f"part {k + 1} is {shown(digits)}")
            parts.append(int(digits))
        return cls(tuple(parts))

    @classmethod
    def of(cls, parts: Iterable[int]) -> Composition:
        """The composition with these parts, from any sequence of whole numbers."""
        if not isinstance(parts, Iterable):
            raise _bad(parts, f"{type(parts).__name__} is not a sequence")
        return cls(tuple(itertools.islice(parts, MAX_LAYERS + 1)))

    @classmethod
    def from_boundaries(cls, layers: int, boundaries: Iterable[int]) -> Composition:
        """The composition of `layers` with this set of internal boundaries (Prop. 2.2)."""
        layers = positive_int(layers, "layers", MAX_LAYERS)
        cuts = set()
        for boundary in boundaries:
            cut = _whole(boundary)
            if cut is None or not 0 < cut < layers:
                allowed = f"whole numbers from 1 to {layers - 1}" if layers > 1 else "none, with one layer"
                problem = f"boundary {shown(boundary)} in a stack of {layers} layers does not exist"
                remedy = f"internal boundaries are {allowed}"
                raise TopologyError(problem, setting="boundaries", given=boundary, remedy=remedy)
            cuts.add(cut)
        return _from_cuts(layers, cuts)

    @classmethod
    def bottom(cls, layers: int) -> Composition:
        """The minimum (L): one stage, backprop."""
        return cls.from_boundaries(layers, ())

    @classmethod
    def top(cls, layers: int) -> Composition:
        """The maximum (1, ..., 1): one stage per layer."""
        return cls((1,) * positive_int(layers, "layers", MAX_LAYERS))

    @classmethod
    def atoms(cls, layers: int) -> list[Composition]:
        """The L - 1 compositions with one boundary, from the shallowest first stage on."""
        return cls.bottom(layers).refinements()

    @property
    def layers(self) -> int:
        """L, the depth of the stack."""
        return sum(self.parts)

    @property
    def stages(self) -> int:
        """K, the number of stages."""
        return len(self.parts)

    @property
    def terminals(self) -> tuple[int, ...]:
        """ℓ_0 < ... < ℓ_{K-1} = L: the number of layers up to the end of each stage (Def. 2.3)."""
        return tuple(itertools.accumulate(self.parts))

    @property
    def boundaries(self) -> frozenset[int]:
        """The internal boundaries {ℓ_0, ..., ℓ_{K-2}}; boundary i lies after layer i."""
        return frozenset(self.terminals[:-1])

    @property
    def boundary_vector(self) -> tuple[int, ...]:
        """b(π)_i = 1 if i is an internal boundary, for i = 1, ..., L - 1 (eq. 25)."""
        boundaries = self.boundaries
        return tuple(int(i in boundaries) for i in range(1, self.layers))

    @property
    def intervals(self) -> list[tuple[int, int]]:
        """Each stage as (start, stop): layers start, ..., stop - 1, counted from 0."""
        return list(itertools.pairwise((0, *self.terminals)))

    def refines(self, other: Composition) -> bool:
        """Whether every boundary of `other` is one of this composition (Def. 3.1); true of itself."""
        self._check_same_layers(other)
        return other.boundaries <= self.boundaries

    def join(self, other: Composition) -> Composition:
        """The coarsest composition that refines both: the union of the boundaries."""
        self._check_same_layers(other)
        return _from_cuts(self.layers, self.boundaries | other.boundaries)

    def meet(self, other: Composition) -> Composition:
        """The finest composition that both refine: the intersection of the boundaries."""
        self._check_same_layers(other)
        return _from_cuts(self.layers, self.boundaries & other.boundaries)

    def refinements(self) -> list[Composition]:
        """The L - K compositions that cover this one: one boundary added, from the first layer on."""
        layers, boundaries = self.layers, self.boundaries
        return [_from_cuts(layers, boundaries | {i}) for i in range(1, layers) if i not in boundaries]

    def coarsenings(self) -> list[Composition]:
        """The K - 1 compositions that this one covers: one boundary removed, from the first on."""
        layers, boundaries = self.layers, self.boundaries
        return [_from_cuts(layers, boundaries - {i}) for i in sorted(boundaries)]

    def moves(self) -> list[Composition]:
        """One boundary moved by one layer, up or down; the number of stages stays. None of them compares."""
        layers, boundaries = self.layers, self.boundaries
        return [
            _from_cuts(layers, boundaries - {i} | {target})
            for i in sorted(boundaries)
            for target in (i - 1, i + 1)
            if 0 < target < layers and target not in boundaries
        ]

    def __len__(self) -> int:
        return len(self.parts)

    def __str__(self) -> str:
        return ",".join(map(str, self.parts))

    def __le__(self, other: Composition) -> bool:
        return other.refines(self) if isinstance(other, Composition) else NotImplemented

    def _check_same_layers(self, other: Composition) -> None:
        if not isinstance(other, Composition):
            raise TopologyError(setting="other", given=other, allowed="a Composition; see Composition.parse")
        if self.layers != other.layers:
            problem = f"compositions of {self.layers} and of {other.layers} layers do not compare"
            remedy = "give two compositions with the same number of layers"
            raise TopologyError(problem, setting="layers", given=other.layers, remedy=remedy)


def enumerate_compositions(
    layers: int, stages: int | None = None, min_depth: int = 1
) -> Iterator[Composition]:
    """Every composition of `layers` whose parts are at least `min_depth`, lazily.

    Coarse ones come first: by number of stages, then by parts in lexicographic order. With `stages` only
    those with that many stages. With K parts of at least m, taking m - 1 off each part leaves an arbitrary
    composition of N = L - K(m - 1), that is, a choice of K - 1 boundaries among N - 1. So nothing is
    generated to be thrown away. If none exists the iterator is empty.
    """
    layers, counts, min_depth = _checked_range(layers, stages, min_depth)
    return (
        _from_cuts(layers, (cut + (k + 1) * (min_depth - 1) for k, cut in enumerate(chosen)))
        for count in counts
        for chosen in itertools.combinations(range(1, layers - count * (min_depth - 1)), count - 1)
    )


def count_compositions(layers: int, stages: int | None = None, min_depth: int = 1) -> int:
    """How many compositions `enumerate_compositions` gives; 2^(L-1) without restrictions (Prop. 2.2).

    With K stages of at least m layers there are C(L - K(m - 1) - 1, K - 1). With any number of stages the
    count f obeys f(n) = f(n - 1) + f(n - m): the last stage has more than m layers, or exactly m.
    """
    layers, counts, min_depth = _checked_range(layers, stages, min_depth)
    if stages is not None:
        return sum(math.comb(layers - count * (min_depth - 1) - 1, count - 1) for count in counts)
    ways = [0] * min(min_depth, layers + 1)  # ways[n] = f(n), without the empty composition of 0
    for n in range(len(ways), layers + 1):
        ways.append(ways[n - 1] + (ways[n - min_depth] if n > min_depth else 1))
    return ways[layers]


def positive_int(value: SupportsIndex, setting: str, most: int | None = None) -> int:
    """`value` as an int between 1 and `most`; anything else raises TopologyError."""
    number = _whole(value)
    if number is None or number < 1 or (most is not None and number > most):
        allowed = "of at least 1" if most is None else f"from 1 to {most}"
        raise TopologyError(setting=setting, given=value, remedy=f"give a whole number {allowed}")
    return number


def _whole(value: object) -> int | None:
    """`value` as an int if it is an integer of any library; True and False are not numbers here."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _bad(given: object, why: str) -> TopologyError:
    return TopologyError(
        f"composition {shown(given)} does not exist: {why}",
        setting="composition",
        given=given,
        remedy=(
            "give whole numbers of at least 1, separated by commas, that sum to at most "
            f"{MAX_LAYERS}, e.g. 4,4,4"
        ),
    )


def _checked_parts(parts: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(parts, tuple):
        raise _bad(parts, f"{type(parts).__name__} is not a tuple, use Composition.of")
    if not parts:
        raise _bad(parts, "it is empty")
    checked = []
    for k, part in enumerate(parts):
        number = _whole(part)
        if number is None or number < 1:
            raise _bad(parts, f"part {k + 1} is {shown(part)}")
        checked.append(number)
    if sum(checked) > MAX_LAYERS:
        raise _bad(parts, "it has too many layers")
    return tuple(checked)


def _checked_range(layers: int, stages: int | None, min_depth: int) -> tuple[int, Iterable[int], int]:
    """The arguments, checked, with the numbers of stages for which a composition exists."""
    layers = positive_int(layers, "layers", MAX_LAYERS)
    min_depth = positive_int(min_depth, "min_depth")
    counts = range(1, layers // min_depth + 1)
    if stages is None:
        return layers, counts, min_depth
    stages = positive_int(stages, "stages")
    return layers, (stages,) if stages in counts else (), min_depth


def _from_cuts(layers: int, cuts: Iterable[int]) -> Composition:
    """The composition with these internal boundaries, which are known to exist."""
    ends = itertools.pairwise((0, *sorted(cuts), layers))
    return Composition(tuple(stop - start for start, stop in ends))
