"""The log of an evaluation: a JSON line for each item that is done.

The first line says what the log is of: weights, tokenizer, tasks, limit, depth. A log of something else is
not continued. A block of items is one write. A line that a kill cut short is removed on opening, and its
block is computed again: its items, to the same numbers, then stand there twice, and the last counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from topograd.errors import RunError
from topograd.files import naming, read_bytes

Record = dict[str, Any]


class ItemLog:
    """Items that are done, by task and place; kept in a file, or without a path only here."""

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path, self.header = path, dict(header)
        self.done: dict[tuple[str, int], Record] = {}
        self._file: TextIO | None = None

    def __enter__(self) -> ItemLog:
        if self.path is not None:
            with naming(self.path):
                self._read(self.path)
                self._file = self.path.open("a", encoding="utf-8")
                if self._file.tell() == 0:
                    self._append([self.header])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def has(self, task: str, items: Sequence[int]) -> bool:
        """Whether all of these items are done."""
        return all((task, item) in self.done for item in items)

    def write(self, records: Sequence[Record]) -> None:
        """Add items, all at once."""
        self.done |= {(record["task"], record["item"]): record for record in records}
        self._append(records)

    def _append(self, records: Sequence[Record]) -> None:
        if self._file is not None:
            assert self.path is not None
            with naming(self.path):
                self._file.write("".join(json.dumps(record) + "\n" for record in records))
                self._file.flush()

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        data = read_bytes(path)
        whole = data[: data.rfind(b"\n") + 1]
        try:
            records = [json.loads(line) for line in whole.decode().splitlines()]
            same = not records or records[0] == self.header
            self.done = {(str(r["task"]), int(r["item"])): r for r in records[1:] if same}
            if not all(isinstance(r["correct"], list) and "cut" in r for r in self.done.values()):
                raise KeyError
        except (ValueError, KeyError, TypeError):
            remedy = "move it away and evaluate again"
            raise RunError(f"{path} is damaged", setting="log", given=path, remedy=remedy) from None
        if not same:
            problem = f"{path} is the log of other weights, tasks or settings"
            raise RunError(problem, setting="log", given=path, remedy="move it away")
        if len(whole) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(whole))
