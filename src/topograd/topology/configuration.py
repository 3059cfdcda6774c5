"""Configurations (π, H): a composition of L and a head structure, and the lattice C(L) that they form.

C(L) = Π(L) × {sh, ps} carries the product order: (π, H) ⊑ (π', H') when π' refines π and H ≤ H', with
sh ≤ ps. It has 2^L elements and is Boolean like Π(L): joins and meets go coordinate by coordinate, every
element has exactly L neighbours in the Hasse diagram. The minimum ((L), sh) is backprop, the maximum
((1, ..., 1), ps) is fully local learning.

Symbols: π `composition`, H `heads`, sh "shared", ps "per-stage", d_k the parts of π, K their number.
The properties are those of the hard chain, where stage k reads only stage k - 1, detached; `closed_forms`
has them for any stage DAG. Gradient depth is BP-descending (never grows under refinement, Def. 7.1);
pipeline granularity and the number of projections never shrink (Def. 7.2).
Cost: O(L) for each operation.
Source: "Stage-Partitioned Learning" §2.2-2.3 (Def. 2.4-2.5, Prop. 2.6), §3.2-3.4 (Def. 3.4-3.7, Prop. 3.6,
3.8), §7 (P2, P5, Def. 7.6).
Limits: ((L), sh) and ((L), ps) compute the same functions (Corollary 5.4) but are two elements here, and do
not train alike: W and W_0 get the same gradient, so their sum moves by the sum of both steps (Prop. 5.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from topograd.errors import TopologyError
from topograd.topology.composition import Composition, Lattice, count_compositions, positive_int


class Heads(StrEnum):
    """The head structure H (Def. 2.4), ordered shared < per-stage (Def. 3.4) and not by the alphabet."""

    _value_: Literal["shared", "per-stage"]

    SHARED = "shared"
    """One output head W for all stages."""
    PER_STAGE = "per-stage"
    """W plus a head W_k of its own for each stage: K more vocabulary matrices, or low-rank deltas."""

    @classmethod
    def _missing_(cls, value: object) -> Heads:
        raise TopologyError(setting="heads", given=value, allowed="'shared' or 'per-stage'")

    def __le__(self, other: str) -> bool:
        return Heads(other) is Heads.PER_STAGE or self is Heads.SHARED

    def __lt__(self, other: str) -> bool:
        return Heads(other) is Heads.PER_STAGE and self is Heads.SHARED

    def __ge__(self, other: str) -> bool:
        return Heads(other) <= self

    def __gt__(self, other: str) -> bool:
        return Heads(other) < self


@dataclass(frozen=True, slots=True)
class Configuration(Lattice):
    """A point (π, H) of C(L) (Def. 2.5).

    >>> print(Configuration.parse("4,4,4", heads="per-stage") & Configuration.parse("4,8"))
    4,8 shared
    """

    composition: Composition
    heads: Heads = Heads.SHARED

    def __post_init__(self) -> None:
        if not isinstance(self.composition, Composition):
            raise TopologyError(
                setting="composition",
                given=self.composition,
                allowed="a Composition, or use Configuration.parse",
            )
        object.__setattr__(self, "heads", Heads(self.heads))

    @classmethod
    def parse(
        cls, composition: str | Composition | Iterable[int], heads: Heads | str = Heads.SHARED
    ) -> Configuration:
        """The configuration of a composition written as "4,4,4" and heads "shared" or "per-stage"."""
        return cls(Composition.parse(composition), Heads(heads))

    @classmethod
    def bottom(cls, layers: int) -> Configuration:
        """The minimum ((L), sh): backprop (Theorem 5.1)."""
        return cls(Composition.bottom(layers), Heads.SHARED)

    @classmethod
    def top(cls, layers: int) -> Configuration:
        """The maximum ((1, ..., 1), ps): fully local learning (Theorem 6.1)."""
        return cls(Composition.top(layers), Heads.PER_STAGE)

    @classmethod
    def atoms(cls, layers: int) -> list[Configuration]:
        """The L atoms: one boundary with a shared head, then ((L), ps) (Prop. 3.8)."""
        return cls.bottom(layers).neighbours()

    @property
    def gradient_depth(self) -> int:
        """max_k d_k: the most layers that a gradient passes through (P2)."""
        return max(self.composition.parts)

    @property
    def pipeline_granularity(self) -> int:
        """K: the chunks that train on separate devices without exchanging gradients (P5)."""
        return self.composition.stages

    @property
    def vocabulary_projections(self) -> int:
        """K: how often a training step projects a token onto the vocabulary, once for each stage's loss."""
        return self.composition.stages

    def in_capability_region(self, min_depth: int = 2) -> bool:
        """Whether there are at least two stages, each of at least d_min = `min_depth` layers (Def. 7.6).

        The paper puts d_min at 2 to 6, depending on the capability and the scale. Both endpoints lie
        outside for every d_min ≥ 2 (Remark 7.7).
        """
        min_depth = positive_int(min_depth, "min_depth")
        return self.composition.stages >= 2 and min(self.composition.parts) >= min_depth

    def neighbours(self) -> list[Configuration]:
        """The L configurations one step up or down: a boundary added, one removed, the heads changed."""
        compositions = self.composition.refinements() + self.composition.coarsenings()
        other = Heads.SHARED if self.heads is Heads.PER_STAGE else Heads.PER_STAGE
        return [
            *(Configuration(pi, self.heads) for pi in compositions),
            Configuration(self.composition, other),
        ]

    def join(self, other: Configuration) -> Configuration:
        """The least configuration above both, coordinate by coordinate (Prop. 3.6)."""
        _check(other)
        return Configuration(self.composition.join(other.composition), max(self.heads, other.heads))

    def meet(self, other: Configuration) -> Configuration:
        """The greatest configuration below both, coordinate by coordinate (Prop. 3.6)."""
        _check(other)
        return Configuration(self.composition.meet(other.composition), min(self.heads, other.heads))

    def __str__(self) -> str:
        return f"{self.composition} {self.heads}"

    def __le__(self, other: Configuration) -> bool:
        if not isinstance(other, Configuration):
            return NotImplemented
        return self.composition <= other.composition and self.heads <= other.heads


def count_configurations(layers: int, stages: int | None = None, min_depth: int = 1) -> int:
    """Two for each composition; 2^L without restrictions (Prop. 2.6)."""
    return 2 * count_compositions(layers, stages, min_depth)


def _check(other: Configuration) -> None:
    if not isinstance(other, Configuration):
        raise TopologyError(setting="other", given=other, allowed="a Configuration; see Configuration.parse")
