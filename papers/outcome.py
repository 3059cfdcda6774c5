"""What every study gives: the same shape for all, as plain numbers and words. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from papers.kept import Kept, Row
from papers.presets import Preset, Size, size_of
from topograd.errors import ConfigError

if TYPE_CHECKING:
    from papers.verdicts import Claim, Drawing

OnMore = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


@dataclass(frozen=True)
class Asked:
    """One run of a study, as it was asked for."""

    study: str
    preset: Preset
    size: Size
    on_more: OnMore
    data: str | None = None
    """A folder of pictures, for studies on pictures."""
    kept: Kept = field(default_factory=Kept)
    """What an earlier run that was ended has measured already."""

    @property
    def steps(self) -> int:
        return self.parts("steps")[0]

    @property
    def width(self) -> int:
        return self.parts("width")[0]

    @property
    def seeds(self) -> int:
        return self.parts("seeds")[0]

    def parts(self, name: str) -> tuple[int, ...]:
        """Steps or widths of the study's parts, in the order of `presets.py`."""
        numbers = getattr(self.size, name)
        assert numbers is not None, f"study {self.study} has no {name}"
        return numbers if isinstance(numbers, tuple) else (numbers,)


def asked(
    study: str,
    preset: Preset,
    *,
    steps: int | None = None,
    width: int | None = None,
    seeds: int | None = None,
    data: str | None = None,
    on_more: OnMore = lambda done, total: None,
    kept: Kept | None = None,
) -> Asked:
    """A run of `study` with the preset's sizes, or those that are given."""
    size = size_of(study, preset).changed(study, steps=steps, width=width, seeds=seeds)
    return Asked(study, preset, size, on_more, data, kept or Kept())


@dataclass(frozen=True)
class ResultTable:
    """A table as text; the first cell of a row names it."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a study. What a study does not have is left out."""

    setting: str
    """What was trained or read, in a sentence or two."""
    rows: list[Row]
    """Every measurement, in the order in which it was made."""
    tables: tuple[ResultTable, ...]
    findings: tuple[str, ...] = ()
    """What came out, in sentences."""
    drawing: Drawing | None = None
    claims: tuple[Claim, ...] = ()
    """What the paper or the study predicts, each judged by a stated rule (`verdicts.py`)."""
    verdict: str | None = None
    """By default that of the claims together, where there are any."""
    seeds: int | None = None
    """With how many seeds, where there is a choice."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers that its figures are drawn from, by name."""

    def __post_init__(self) -> None:
        if self.verdict is None and self.claims:
            from papers.verdicts import worst  # which needs scipy

            object.__setattr__(self, "verdict", worst([claim.verdict for claim in self.claims]))


def check_seeds(seeds: int) -> None:
    """Refuse a number of seeds that is none."""
    if seeds < 1:
        raise ConfigError(setting="seeds", given=seeds, allowed="at least 1, and at least 2 for a verdict")
