"""The numbers of docs/reference/devices.md: how often the host may wait for the device, by path."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from devices import Transfers

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "devices.md"


@cache
def _table() -> dict[str, tuple[int, int]]:
    rows = [line.strip("|").split("|") for line in _PAGE.read_text().splitlines() if line.startswith("| ")]
    return {row[0].strip(): (int(row[1]), int(row[2])) for row in rows if row[1].strip().isdigit()}


def pinned(path: str) -> tuple[int, int]:
    """Reads and writes of the row that begins with these words."""
    (result,) = [counts for name, counts in _table().items() if name.startswith(path)]
    return result


def check(transfers: Transfers, path: str, times: int = 1) -> None:
    """Whether as much crossed as the page says, `times` over."""
    reads, writes = pinned(path)
    assert (transfers.reads, transfers.writes) == (reads * times, writes * times), (
        transfers.places("read"),
        transfers.places("write"),
    )
