"""A log is continued where it was cut, and never taken for another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raising import refused
from topograd.errors import RunError
from topograd.evaluation.item_log import ItemLog

HEADER = {"log": "topograd core 1", "weights": "w"}


def record(item: int, task: str = "copa") -> dict[str, Any]:
    return {"task": task, "item": item, "correct": [True, False], "cut": False}


def test_what_was_written_is_there(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ItemLog(path, HEADER) as log:
        log.write([record(0), record(1)])
        assert log.has("copa", range(2))
        assert not log.has("copa", range(3))
    with ItemLog(path, HEADER) as log:
        assert log.done == {("copa", 0): record(0), ("copa", 1): record(1)}
        log.write([record(2)])
    assert len(path.read_text().splitlines()) == 4


def test_a_line_cut_short_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ItemLog(path, HEADER) as log:
        log.write([record(0), record(1)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with ItemLog(path, HEADER) as log:
        assert set(log.done) == {("copa", 0)}
        log.write([record(1)])
    assert path.read_bytes() == whole
    path.write_bytes(whole[:10])
    with ItemLog(path, HEADER) as log:
        assert not log.done
    assert path.read_text().count("\n") == 1


def test_logs_of_others_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ItemLog(path, HEADER) as log:
        log.write([record(0)])
    kept = path.read_bytes()
    with (
        refused(RunError, setting="log"),
        ItemLog(path, HEADER | {"weights": "v"}),
    ):
        pass
    for rest in (b"{}\n", b"[1]\n", b"nonsense\n", b'{"task": "a", "item": 0, "correct": 1, "cut": 0}\n'):
        path.write_bytes(kept + rest)
        with refused(RunError, setting="log"), ItemLog(path, HEADER):
            pass
    assert path.read_bytes() == kept + rest, "nothing of it was lost"


def test_without_a_file_it_is_kept_here() -> None:
    with ItemLog(None, HEADER) as log:
        log.write([record(0)])
        assert log.has("copa", [0])
