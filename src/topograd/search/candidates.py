"""The search space of a Pareto study: partitions of a stack, and settings of the topology.

A candidate is a partition and a value for each setting, such as {"heads": "per-stage"}. A study sees it as
L - 1 bits, one for each place where a boundary may be, and one category for each setting.

    graph       chain: the parts are stages in sequence; forest: each part is a branch from the input
    relay       what a stage makes of what it receives from the stage before
    source      what later stages receive beside it: none, embedding, or layer:N
    join        how that source is joined
    decoder     layers that every stage has to itself before its head
    grad_scale, grad_delay, grad_bits   how much gradient crosses boundaries, how late, in how many bits
    heads, objective, ctx, and every other setting of `TopologyConfig` that is a word

What is mended. Bits that break a rule of the space: from the first layer on, a boundary that would leave a
stage too short, or come after the last allowed one, is left out. Settings that have nothing to act on take
their defaults: one stage has no graph, relay, source, join, gradient across boundaries or residual objective;
branches have no relay, source, join or such gradient; without a source there is no join, and without gradient
it is neither late nor rounded. So several proposals may mean one candidate, and `key` tells.

What is skipped. A source layer:N that no stage behind it would receive in addition: layer N lies in the last
stage, or is what the only later stage receives anyway. Such a proposal is no candidate.

Cost: `size` is O(L² K²) for each source; iterating is lazy.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from topograd.errors import ConfigError
from topograd.runs.topology_config import TopologyConfig
from topograd.search.dynamic import stage_counts
from topograd.topology.composition import Composition, count_compositions, enumerate_compositions

Settings = Mapping[str, str]
_GRADIENT = {"grad_delay": "0", "grad_bits": "32"}
_ON_EDGES = {"relay": "identity", "source": "none", "join": "identity", "grad_scale": "0", **_GRADIENT}
_NUMBERS = {"decoder": int, "grad_scale": float, "grad_delay": int, "grad_bits": int}
"""Settings that are no words."""
_ALONE = {"graph": "chain", **_ON_EDGES}
DEFAULTS = {"objective": "cross-entropy", "decoder": "0", **_ALONE}


@dataclass(frozen=True)
class Candidate:
    """A point of the space."""

    composition: Composition
    settings: Settings = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Equal for equal candidates, whatever the order of their settings."""
        return " ".join([str(self.composition), *(f"{k}={v}" for k, v in sorted(self.settings.items()))])

    def topology(self, base: TopologyConfig) -> TopologyConfig:
        """The table of a run's settings that this candidate means, with the rest of `base`."""
        given: dict[str, Any] = dict(self.settings)
        if given.get("graph", base.graph) == "forest":
            given["branches"] = tuple(map(str, self.composition.parts))
        else:
            given["partition"] = str(self.composition)
        given |= {name: kind(given[name]) for name, kind in _NUMBERS.items() if name in given}
        if given.get("source") == "none":
            given["source"] = None
        return replace(base, **given)


@dataclass(frozen=True)
class Space:
    """Partitions of `layers` into at most `max_stages` stages of at least `min_depth` layers."""

    layers: int
    min_depth: int = 1
    max_stages: int | None = None
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The values to choose from, by setting."""

    def __post_init__(self) -> None:
        stage_counts(self.layers, None, 1, self.max_stages, self.min_depth)
        known = {f.name for f in fields(TopologyConfig)}
        for name, values in self.choices.items():
            if name not in known:
                raise ConfigError(
                    setting="choices",
                    given=name,
                    allowed=f"settings of a topology: {', '.join(sorted(known))}",
                )
            if not values or len(set(values)) < len(values):
                raise ConfigError(
                    f"choices has the values {list(values)} for {name}",
                    setting="choices",
                    given=list(values),
                    remedy="give at least one value, each once",
                )
        for source in self.choices.get("source", ()):
            layer = _layer(source)
            if layer is not None and not 0 < layer < self.layers:
                raise ConfigError(
                    setting="source",
                    given=source,
                    remedy=f"early layers here are layer:1 to layer:{self.layers - 1}",
                )

    def mended(self, bits: Sequence[bool], settings: Settings) -> Candidate | None:
        """The candidate that these bits and settings mean; None if there is none. Bit i - 1 asks for a
        boundary after layer i."""
        cuts: list[int] = []
        most = self.layers if self.max_stages is None else self.max_stages
        for i, bit in enumerate(bits, start=1):
            before = cuts[-1] if cuts else 0
            fits = i - before >= self.min_depth and self.layers - i >= self.min_depth
            if bit and fits and len(cuts) + 1 < most:
                cuts.append(i)
        composition = Composition.from_boundaries(self.layers, cuts)
        candidate = Candidate(composition, mended_settings(settings, composition.stages))
        return candidate if _exists(candidate) else None

    @property
    def size(self) -> int:
        """How many candidates there are."""
        counts = {k: count_compositions(self.layers, k, self.min_depth) for k in self._counts()}
        total = counts.get(1, 0) * len(self._variants(1))
        several = sum(count for k, count in counts.items() if k > 1)
        for settings in self._variants(2):
            layer = _layer(settings.get("source", "none"))
            total += several if layer is None else self._count_reached(layer)
        return total

    def __iter__(self) -> Iterator[Candidate]:
        for count in self._counts():
            variants = self._variants(count)
            for composition in enumerate_compositions(self.layers, count, self.min_depth):
                yield from filter(_exists, (Candidate(composition, settings) for settings in variants))

    def samples(self) -> Iterator[Candidate]:
        """Some candidates in which every value of a setting occurs that can."""
        for count in sorted({self._counts()[0], self._counts()[-1]}):
            composition = next(enumerate_compositions(self.layers, count, self.min_depth))
            yield from filter(_exists, (Candidate(composition, s) for s in self._variants(count)))

    def _variants(self, stages: int) -> list[Settings]:
        """The settings that partitions with so many stages may have, each once."""
        found: dict[tuple[tuple[str, str], ...], Settings] = {}
        for values in itertools.product(*self.choices.values()):
            settings = mended_settings(dict(zip(self.choices, values, strict=True)), stages)
            found.setdefault(tuple(sorted(settings.items())), settings)
        return list(found.values())

    def _count_reached(self, layer: int) -> int:
        """How many partitions have a stage that receives layer N by a layer context alone (`_reaches`)."""
        most, total = self._counts()[-1], 0
        for start in range(layer):
            for stop in range(layer, self.layers):
                if stop - start < self.min_depth:
                    continue
                for before, behind in itertools.product(range(most), repeat=2):
                    if before + 1 + behind <= most and behind > (layer == stop):
                        total += self._ways(start, before) * self._ways(self.layers - stop, behind)
        return total

    def _ways(self, layers: int, stages: int) -> int:
        """Partitions of so many layers into so many stages; nothing has one partition, into none."""
        if not layers or not stages:
            return int(layers == stages == 0)
        return count_compositions(layers, stages, self.min_depth) if stages * self.min_depth <= layers else 0

    def _counts(self) -> range:
        return stage_counts(self.layers, None, 1, self.max_stages, self.min_depth)


def mended_settings(settings: Settings, stages: int) -> dict[str, str]:
    """The settings with defaults in place of what has nothing to act on."""
    mended = dict(settings)
    if stages == 1:
        idle = dict(_ALONE)
        if mended.get("objective") == "residual":
            mended["objective"] = "cross-entropy"
    elif mended.get("graph") == "forest":
        idle = _ON_EDGES
    else:
        idle = {"join": "identity"} if mended.get("source", "none") == "none" else {}
        if not float(mended.get("grad_scale", "0")):
            idle |= _GRADIENT
        elif mended.get("objective") == "residual":
            idle["grad_delay"] = "0"  # its stages read those before them in the same step
    return mended | {name: default for name, default in idle.items() if name in mended}


def _layer(source: str) -> int | None:
    """N of layer:N."""
    kind, colon, number = source.partition(":")
    return int(number) if kind == "layer" and colon and number.isdecimal() else None


def _exists(candidate: Candidate) -> bool:
    """Whether its source, if that is a layer, reaches some stage."""
    layer = _layer(candidate.settings.get("source", "none"))
    return layer is None or _reaches(candidate.composition, layer)


def _reaches(composition: Composition, layer: int) -> bool:
    """Whether some stage receives layer N by a layer context alone.

    Two stages must end behind N: the one that N lies in and one more, or, where N ends its stage, the next
    one, which receives N anyway, and one more.
    """
    return sum(end > layer for end in composition.terminals) > 1
