"""What every study gives: the same shape for all, as plain numbers and words. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from topograd.errors import ConfigError

if TYPE_CHECKING:
    from topograd.studies.verdicts import Claim, Drawing

Preset = Literal["tiny", "small"]
OnMore = Callable[[int, int], None]
"""Called with how much is done, and of how much."""
Row = dict[str, Any]
"""One measurement, such as what one arm came to with one seed."""


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
    """What the paper says, each judged by a stated rule (`verdicts.py`)."""
    verdict: str | None = None
    seeds: int | None = None
    """With how many seeds, where there is a choice."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers that its figures are drawn from, by name."""


def refuse_seeds(study: str, seeds: int | None) -> None:
    """Say that a study has no seeds to choose."""
    if seeds is not None:
        raise ConfigError(f"--seeds is {seeds}; study {study} has seeds of its own, leave --seeds out")


def check_seeds(seeds: int) -> None:
    """Refuse a number of seeds that is none."""
    if seeds < 1:
        raise ConfigError(f"seeds is {seeds}; it must be at least 1, and at least 2 for a verdict")
