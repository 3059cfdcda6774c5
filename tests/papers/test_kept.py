"""What a study has measured is there again after a kill, and is not mixed up with anything else."""

import json
from pathlib import Path
from typing import Any

from papers.kept import Kept
from raising import refused
from topograd.errors import RunError


def make(**row: Any) -> Any:
    return lambda: dict(row)


def forbidden() -> Any:
    raise AssertionError("it is there already")


def test_rows_are_found_by_everything_that_they_depend_on(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    kept = Kept(file, {"steps": 4})
    assert kept.row({"arm": "a", "seed": 0}, make(bpb=1.5, pair=(1, 2))) == {"bpb": 1.5, "pair": [1, 2]}
    assert kept.row({"seed": 0, "arm": "a"}, forbidden) == {"bpb": 1.5, "pair": [1, 2]}
    again = Kept(file, {"steps": 4})
    assert again.row({"arm": "a", "seed": 0}, forbidden) == {"bpb": 1.5, "pair": [1, 2]}
    assert again.found == 1
    assert again.row({"arm": "a", "seed": 1}, make(bpb=2.0)) == {"bpb": 2.0}
    assert Kept(file, {"steps": 5}).row({"arm": "a", "seed": 0}, make(bpb=3.0)) == {"bpb": 3.0}
    assert len(file.read_text().splitlines()) == 3


def test_a_line_that_a_kill_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    kept = Kept(file)
    for seed in range(2):
        kept.row({"seed": seed}, make(bpb=seed))
    whole = file.read_bytes()
    for length in range(len(whole) + 1):
        file.write_bytes(whole[:length])
        after = Kept(file)
        assert [after.row({"seed": seed}, make(bpb=seed)) for seed in range(2)] == [{"bpb": 0}, {"bpb": 1}]
        last = Kept(file)
        assert [last.row({"seed": seed}, forbidden) for seed in range(2)] == [{"bpb": 0}, {"bpb": 1}]


def test_fresh_measures_again_and_the_newest_counts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    Kept(file).row({"seed": 0}, make(bpb=1))
    assert Kept(file, fresh=True).row({"seed": 0}, make(bpb=2)) == {"bpb": 2}
    assert Kept(file).row({"seed": 0}, forbidden) == {"bpb": 2}


def test_a_row_is_changed_by_nobody_who_asked_for_it(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "rows.jsonl")
    kept.row({"seed": 0}, make(bpb=1))["bpb"] = 5
    assert kept.row({"seed": 0}, forbidden) == {"bpb": 1}


def test_several_rows_and_no_file() -> None:
    kept = Kept()
    assert kept.rows({"part": 1}, lambda: [{"a": 1}, {"a": 2}]) == [{"a": 1}, {"a": 2}]
    assert kept.rows({"part": 1}, lambda: [{"a": 3}]) == [{"a": 3}], "nothing is kept"


def test_lines_that_are_something_else(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("5\n[1, 2]\n{}\n\n" + json.dumps([{"seed": 0}, {"bpb": 1}]) + "\n")
    assert Kept(file).row({"seed": 0}, forbidden) == {"bpb": 1}


def test_a_file_that_cannot_be(tmp_path: Path) -> None:
    with refused(RunError, setting="file"):
        Kept(tmp_path)
    with refused(RunError, setting="file"):
        Kept(tmp_path / "none" / "rows.jsonl").row({}, make(bpb=1))
