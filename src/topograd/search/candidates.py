"""The space that a Pareto study looks through: partitions of a stack, and named choices beside them.

A candidate is a partition and a value for each choice, such as {"stage_heads": "per-stage"}. A study sees it
as L - 1 bits, one for each place where a boundary may be, and one category for each choice. Bits that break a
rule of the space are mended: from the first layer on, a boundary that would leave a stage too short, or come
after the last allowed one, is left out. So several proposals may mean one candidate, and `key` tells.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from topograd.errors import ConfigError
from topograd.search.dynamic import stage_counts
from topograd.topology.composition import Composition, count_compositions, enumerate_compositions


@dataclass(frozen=True)
class Candidate:
    """A point of the space."""

    composition: Composition
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Equal for equal candidates, whatever the order of their settings."""
        return " ".join([str(self.composition), *(f"{k}={v}" for k, v in sorted(self.settings.items()))])


@dataclass(frozen=True)
class Space:
    """Partitions of `layers` into at most `max_stages` stages of at least `min_depth` layers."""

    layers: int
    min_depth: int = 1
    max_stages: int | None = None
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stage_counts(self.layers, None, 1, self.max_stages, self.min_depth)
        for name, values in self.choices.items():
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"the choice {name} has the values {list(values)}; give some, each once")

    def mended(self, bits: Sequence[bool], settings: Mapping[str, str]) -> Candidate:
        """The candidate that these bits mean; bit i - 1 asks for a boundary after layer i."""
        cuts: list[int] = []
        most = self.layers if self.max_stages is None else self.max_stages
        for i, bit in enumerate(bits, start=1):
            before = cuts[-1] if cuts else 0
            fits = i - before >= self.min_depth and self.layers - i >= self.min_depth
            if bit and fits and len(cuts) + 1 < most:
                cuts.append(i)
        return Candidate(Composition.from_boundaries(self.layers, cuts), dict(settings))

    def __len__(self) -> int:
        ways = 1
        for values in self.choices.values():
            ways *= len(values)
        return ways * sum(count_compositions(self.layers, k, self.min_depth) for k in self._counts())

    def __iter__(self) -> Iterator[Candidate]:
        for count in self._counts():
            for composition in enumerate_compositions(self.layers, count, self.min_depth):
                for values in itertools.product(*self.choices.values()):
                    yield Candidate(composition, dict(zip(self.choices, values, strict=True)))

    def _counts(self) -> range:
        return stage_counts(self.layers, None, 1, self.max_stages, self.min_depth)
