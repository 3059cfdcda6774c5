import shutil
from pathlib import Path
from typing import Any

import pytest

from topograd.cli.report import _read


@pytest.fixture
def ours(staged: Path, tmp_path: Path) -> Path:
    return shutil.copytree(staged, tmp_path / "ours")


def test_a_report_of_one_run(ours: Path, call: Any) -> None:
    answer = call("report", ours, "--json").json
    page = ours / "report.html"
    expected = {"run": str(ours), "report": str(page), "staged": str(ours), "backprop": None}
    assert answer == expected
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "It predicts by its last stage." in text
    assert "bits per byte, what the model predicts" in text
    assert list((ours / "figures").glob("*.svg"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take a second each; `test_a_report_of_one_run` has them."""
    monkeypatch.setattr("topograd.report.page._panels", lambda *_: ())


@pytest.mark.usefixtures("undrawn")
def test_a_report_against_another_tells_which_is_backprop(ours: Path, backprop: Path, call: Any) -> None:
    answer = call("report", ours, "--against", backprop, "--json").json
    assert (answer["staged"], answer["backprop"]) == (str(ours), str(backprop))
    turned = shutil.copytree(backprop, ours.parent / "turned")
    answer = call("report", turned, "--against", ours, "--json").json
    assert (answer["staged"], answer["backprop"]) == (str(ours), str(turned))
    assert answer["report"] == str(turned / "report.html")
    assert (turned / "report.html").is_file()


@pytest.mark.usefixtures("undrawn")
def test_people_are_told_where_it_lies(ours: Path, call: Any) -> None:
    assert call("report", ours).out == f"{ours / 'report.html'}\n"


def test_bad_questions_are_one_line(ours: Path, call: Any, tmp_path: Path) -> None:
    assert "it does not exist" in call("report", tmp_path / "nowhere").refusal
    assert "it does not exist" in call("report", ours, "--against", tmp_path / "nowhere").refusal
    refusal = call("report", ours, "--against", ours).refusal
    assert "has 2; a report compares with backprop, a run of one stage" in refusal
    assert not (ours / "report.html").exists()


def test_what_fewer_bits_cost_is_read(ours: Path, call: Any) -> None:
    """`report/stage_figures.py` draws it."""
    pytest.importorskip("onnxruntime")
    cost = call("eval", ours, "--weights", "int8", "--bytes", 2000, "--json").json["precision"]
    found = _read(ours)[1].evaluation["precision"]
    assert found["int8"] == {"of": found["int8"]["of"], **cost}
    assert found["int4"] is None
    kept = ours / "evaluation" / "weights-int8.json"
    kept.write_text(kept.read_text(encoding="utf-8").replace(found["int8"]["of"], "0" * 64))
    assert _read(ours)[1].evaluation["precision"]["int8"] is None, "of other weights"
