"""Rows of a study that were measured already: one line of JSON for each, so that a killed study goes on.

A row is found again by everything that it depends on: its study and sizes, what names it (arm and seed), and
the versions of this package and of Python, whose library is the corpus. A line that a kill cut off is
dropped. Needs no torch.

A study that only judges (`measure=False`) gets the rows that are there; any other raises NotMeasured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from topograd.errors import RunError

Row = dict[str, Any]
"""One measurement, such as what one arm came to with one seed."""


class NotMeasured(RunError):
    """A row is not there and is not to be measured now."""


class Kept:
    """The rows of one file; without a file, nothing is kept."""

    def __init__(
        self,
        file: Path | None = None,
        setting: Mapping[str, Any] | None = None,
        fresh: bool = False,
        measure: bool = True,
    ) -> None:
        self.file, self._measure = file, measure
        self._setting = dict(setting or {})
        self._rows, self._torn = ({}, False) if file is None else _read(file)
        if fresh:
            self._rows = {}
        self.found = 0
        """How many rows were there already when they were asked for."""

    def row(self, key: Mapping[str, Any], make: Callable[[], Row]) -> Row:
        """The row of `key`: as it was kept, or made now. Both are what JSON makes of it."""
        name = json.dumps({**self._setting, **key}, sort_keys=True)
        if name in self._rows:
            self.found += 1
            return dict(self._rows[name])
        if not self._measure:
            raise NotMeasured(
                f"{', '.join(f'{part} {value}' for part, value in key.items())} is not measured",
                setting="judge",
                given=self.file,
                remedy="run the study without --judge",
            )
        line = json.dumps([json.loads(name), make()])
        made: Row = json.loads(line)[1]
        if self.file is not None:
            self._keep(self.file, line)
            self._rows[name] = made
        return dict(made)

    def rows(self, key: Mapping[str, Any], make: Callable[[], list[Row]]) -> list[Row]:
        """Several rows that are measured together."""
        result: list[Row] = self.row(key, lambda: {"rows": make()})["rows"]
        return result

    def _keep(self, file: Path, line: str) -> None:
        try:
            with file.open("ab") as out:
                out.write(b"\n" * self._torn + line.encode() + b"\n")
                out.flush()
                os.fsync(out.fileno())
            self._torn = False
        except OSError as problem:
            raise RunError(
                f"cannot write {file} ({problem.strerror})",
                setting="file",
                given=file,
                remedy="pass another --out",
            ) from None


def _read(file: Path) -> tuple[dict[str, Row], bool]:
    """The rows of a file, and whether its last line was cut off."""
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return {}, False
    except OSError as problem:
        raise RunError(
            f"cannot read {file} ({problem.strerror})",
            setting="file",
            given=file,
            remedy="pass another --out",
        ) from None
    result: dict[str, Row] = {}
    for line in lines:
        try:
            key, row = json.loads(line)
        except (ValueError, TypeError):
            continue  # cut off by a kill, or the empty end
        if isinstance(key, dict) and isinstance(row, dict):
            result[json.dumps(key, sort_keys=True)] = row
    return result, bool(lines[-1])
