"""The workspace of a training: a folder with a lock, a log and checkpoints.

    lock             held by the process that trains here
    metrics.jsonl    one JSON object per line, appended as training goes
    checkpoints/     see `topograd.runs.checkpoint`

A process may be killed at any instant. `metrics.jsonl` may end in half a line, which readers skip and the
next writer cuts. The kernel releases the lock. Lines of metrics reach the operating system at once but are
not forced to the disk: they survive a kill, not always a power cut.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topograd.errors import RunError
from topograd.files import dump_json, hold_lock, naming, write_atomic

if TYPE_CHECKING:
    from topograd.runs.checkpoint import CheckpointStore


class Inside:
    """The path of a name in a workspace's folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, workspace: Workspace, kind: type) -> Path:
        return workspace.folder / self.name


@dataclass(frozen=True)
class Workspace:
    """A folder that a training keeps its log and checkpoints in."""

    folder: Path

    metrics_file = Inside("metrics.jsonl")
    checkpoints = Inside("checkpoints")

    @property
    def lock_file(self) -> Path:
        return self.folder / "lock"

    @property
    def store(self) -> CheckpointStore:
        """Where its checkpoints are kept."""
        from topograd.runs.checkpoint import FolderStore  # brings torch, which a folder does not need

        return FolderStore(self.checkpoints)

    def drop_checkpoint(self, name: str) -> None:
        """Delete a checkpoint, if it is there."""
        from topograd.runs.checkpoint import discard

        if (self.checkpoints / name).exists():
            discard(self.checkpoints / name)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record to the metrics. Half a line that a kill left behind is cut first."""
        line = dump_json(dict(record)) + "\n"
        with naming(self.metrics_file), open(self.metrics_file, "a+b") as file:
            _cut_torn_line(file)
            file.write(line.encode())

    def log_mark(self, step: int) -> dict[str, Any]:
        """Size and SHA-256 of the log up to a step. Records after it are discarded on rewind."""
        content = b"".join(self._lines_up_to(step))
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def has_log(self, mark: Mapping[str, Any]) -> bool:
        """Whether the log begins with what `log_mark` saw; an emptied one was given up on purpose."""
        content = self.metrics_file.read_bytes() if self.metrics_file.is_file() else None
        if content is None:
            return mark["bytes"] == 0
        return not content or hashlib.sha256(content[: mark["bytes"]]).hexdigest() == mark["sha256"]

    def metrics(self) -> list[dict[str, Any]]:
        """Every complete record, in order. Half a last line, as a kill leaves it, is skipped."""
        return [record for _, record in self._read_metrics()]

    def rewind_metrics(self, step: int) -> None:
        """Drop the records whose "step" is beyond `step`, and half a last line; keep the rest as it is."""
        if self.metrics_file.exists():
            write_atomic(self.metrics_file, b"".join(self._lines_up_to(step)))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process; a second holder, here or in another process, is refused.

        The file `lock` stays behind; only the system's lock on it counts, and that dies with its process.
        """
        with hold_lock(self.lock_file):
            for leftover in self.folder.glob(".metrics.jsonl.*.tmp"):
                leftover.unlink()  # of a rewind that was killed: only the holder rewinds
            yield

    def check_unmodified(self, known: Sequence[str]) -> None:
        """Raise RunError where the checkpoints are not those that were `known` when it was opened."""
        if self.store.names() != known:
            raise RunError(
                f"{self.folder} was trained on by another process while it was being opened",
                remedy="resume it again",
            )

    def check_log(self, name: str) -> None:
        """Raise RunError for a log that is not the one checkpoint `name` was saved with; name one it fits."""
        mark = self.store.extra(name).get("metrics")
        if mark is None or self.has_log(mark):
            return
        names = self.store.names()
        marks = {n: self.store.extra(n).get("metrics") for n in names[: names.index(name)]}
        fits = [n for n, m in marks.items() if m is not None and self.has_log(m)]
        earlier = f"resume with --from {fits[-1]}, which it fits, " if fits else ""
        raise RunError(
            f"{self.metrics_file} is not the log that {name} was saved with: it is missing, cut "
            "or of another run",
            remedy=f"restore it, {earlier}or make it an empty file to continue without its records",
        )

    def _lines_up_to(self, step: int) -> list[bytes]:
        return [line for line, record in self._read_metrics() if record.get("step", step) <= step]

    def _read_metrics(self) -> list[tuple[bytes, dict[str, Any]]]:
        """Each complete line with its record. A line is complete when it ends in a newline."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_bytes().split(b"\n")[:-1]  # the last piece is empty, or torn
        return [(line + b"\n", self._parse(line, number)) for number, line in enumerate(lines, start=1)]

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise RunError(
                f"{self.metrics_file} is damaged: line {number} is no JSON object", remedy="delete that line"
            )
        return record


def _cut_torn_line(file: io.BufferedRandom) -> None:
    """Truncate a file after its last newline. Reads one byte unless the last line is torn."""
    if file.seek(0, os.SEEK_END) == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
