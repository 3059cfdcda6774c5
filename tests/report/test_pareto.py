"""The page of a Pareto study, from a record as JSON holds it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raising import refused
from topograd.cli import search
from topograd.errors import RunError
from topograd.report.markup import POLICY
from topograd.report.pareto import write_pareto
from topograd.report.pareto_plot import BOTTOM, LEFT, RIGHT, TOP, Axis, field_html
from topograd.search import pareto
from topograd.search.candidates import Candidate
from topograd.search.pareto import Tried
from topograd.topology.composition import Composition

BPB, DEPTH = [3.4, 3.1, 3.0, 3.3], [1, 2, 4, 4]
VOID = {"meta", "input"}


def trial(number: int, parts: list[int], bpb: float, **changes: Any) -> dict[str, Any]:
    return {
        "number": number,
        "partition": parts,
        "settings": {"stage_heads": "per-stage"},
        "steps": 80,
        "values": {"bpb": bpb, "gradient_depth": max(parts)},
        "state": "complete",
        "on_front": number != 3,
    } | changes


@pytest.fixture
def record() -> dict[str, Any]:
    parts = [[1, 1, 1, 1], [2, 2], [4], [4]]
    trials = [trial(i, part, bpb) for i, (part, bpb) in enumerate(zip(parts, BPB, strict=True))]
    trials[3]["settings"] = {"stage_heads": "<script>&</script>"}
    trials.append(trial(4, [3, 1], 3.9, state="stopped", steps=20, on_front=False))
    trials.append(trial(5, [1, 3], 0, state="running", steps=0, on_front=False, values={}))
    objectives = {"bpb": "minimize", "gradient_depth": "minimize"}
    return {"trials": trials, "objectives": objectives, "space": 16}


class Reader(HTMLParser):
    """Checks that elements nest, and gathers the tags and the cells of tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"th", "td"} & set(self.open):
            self.rows[-1][-1] += data

    def find(self, kind: str) -> list[dict[str, str | None]]:
        """The attributes of the elements of a CSS class."""
        return [found for _, found in self.tags if kind in (found.get("class") or "").split()]


def test_the_page_stands_alone(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "pareto.html"
    assert write_pareto(path, json.loads(json.dumps(record))) == path
    page = path.read_text(encoding="utf-8")
    reader = Reader(page)
    assert not {"script", "link", "img", "image", "iframe", "object"} & {tag for tag, _ in reader.tags}
    assert not re.search(r"https?://|url\(|@import|<[^>]* on\w+=", page)
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}) in reader.tags
    ids = [found["id"] for _, found in reader.tags if "id" in found]
    assert len(ids) == len(set(ids))
    links = {(found["href"] or "").removeprefix("#") for tag, found in reader.tags if tag == "a"}
    assert links <= set(ids)
    assert write_pareto(tmp_path / "again.html", record).read_bytes() == path.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again.html", "pareto.html"]


def test_every_configuration_has_a_mark_a_card_and_a_row(record: dict[str, Any], tmp_path: Path) -> None:
    reader = Reader(write_pareto(tmp_path / "pareto.html", record).read_text(encoding="utf-8"))
    marks = reader.find("point")
    kinds = {mark["id"]: (mark["class"] or "").split()[-1] for mark in marks}
    assert kinds == {
        "point-2": "front",
        "point-1": "front",
        "point-0": "front",
        "point-3": "done",
        "point-4": "early",
    }
    assert [mark["id"] for mark in marks] == list(kinds), "the front first, the best bpb first"
    assert all(mark["type"] == "radio" and mark["name"] == "point" for mark in marks)
    words = (
        "partition 2,2, stage heads per-stage, bpb 3.1000, gradient depth 2, steps 80, outcome on the front"
    )
    assert marks[1]["aria-label"] == words
    assert [card["id"] for card in reader.find("card") if "id" in card] == [
        (mark["id"] or "").replace("point", "card") for mark in marks
    ]
    header, *rows = reader.rows
    assert header == [
        "trial",
        "partition",
        "outcome",
        "bpb",
        "gradient depth",
        "steps",
        "stage heads",
    ]
    assert rows[0] == ["2", "4", "on the front", "3.0000", "4", "80", "per-stage"]
    assert rows[3] == ["3", "4", "beaten", "3.3000", "4", "80", "<script>&</script>"]
    assert rows[4][2:6] == ["stopped early", "3.9000", "3", "20"]
    assert rows[5] == ["5", "1,3", "under way", "–", "–", "0", "per-stage"]


def _lines(record: dict[str, Any], page: str) -> dict[str, np.ndarray]:
    """The corners of each line in the units of its two properties, which are all of the trials' values."""
    keys = list(record["objectives"])
    measured = [found for found in record["trials"] if found["values"]]
    axes = [Axis.of(key, record["objectives"][key], measured) for key in keys]
    lines = {}
    for across, up, points in re.findall(r'class="part line-(\d)-(\d)" points="([^"]*)"', page):
        corners = np.array([[float(number) for number in pair.split(",")] for pair in points.split()])
        shares = (corners - [LEFT, BOTTOM]) / [RIGHT - LEFT, TOP - BOTTOM]
        ends = np.array([(axis.low, axis.high) for axis in (axes[int(across)], axes[int(up)])])
        lines[f"{across}{up}"] = ends[:, 0] + shares * (ends[:, 1] - ends[:, 0])
    return lines


def test_the_line_is_the_edge_of_what_is_beaten(record: dict[str, Any], tmp_path: Path) -> None:
    page = write_pareto(tmp_path / "pareto.html", record).read_text(encoding="utf-8")
    lines = _lines(record, page)
    assert set(lines) == {"01", "10"}
    corners = lines["10"]  # gradient depth across, bpb up
    np.testing.assert_allclose(
        corners[1:-1], [[1, 3.4], [2, 3.4], [2, 3.1], [4, 3.1], [4, 3.0]], atol=2e-3, rtol=0
    )
    assert corners[0, 1] > 3.9, "from the poor end of one property"
    assert corners[-1, 0] > 4, "to that of the other"
    inner = lines["01"][1:-1]
    np.testing.assert_allclose(inner[::2], [[3.0, 4], [3.1, 2], [3.4, 1]], atol=2e-3, rtol=0)


def test_more_may_be_better(record: dict[str, Any], tmp_path: Path) -> None:
    record["objectives"]["gradient_depth"] = "maximize"
    page = write_pareto(tmp_path / "pareto.html", record).read_text(encoding="utf-8")
    corners = _lines(record, page)["10"]
    np.testing.assert_allclose(corners[1:-1], [[4, 3.0]], atol=2e-3, rtol=0)
    assert corners[-1, 0] < 1, "the poor end is now the low one"
    assert "gradient depth (more is better)" in page
    assert "bpb (less is better)" in page


def test_places_and_ticks(record: dict[str, Any]) -> None:
    trials = [found for found in record["trials"] if found["values"]]
    depth = Axis.of("gradient_depth", "minimize", trials)
    assert depth.ticks == (1, 2, 3, 4)
    assert depth.text(4) == "4"
    bpb = Axis.of("bpb", "minimize", trials)
    assert all(bpb.low <= tick <= bpb.high for tick in bpb.ticks)
    assert len(bpb.ticks) >= 3
    assert 0 < bpb.place(3.0) < 10 < 90 < bpb.place(3.9) < 100
    same = Axis.of("gradient_depth", "maximize", trials[2:4])
    assert same.place(4) == pytest.approx(50), "equal values are in the middle"
    assert 4 in same.ticks


def test_marks_in_one_place_step_aside_and_the_first_stays() -> None:
    trials = [trial(number, [2, 2], 3.0) for number in range(9)] + [trial(9, [4], 3.5)]
    axes = [Axis.of(key, "minimize", trials) for key in ("bpb", "gradient_depth")]
    html = field_html(trials, axes, ["name"] * 10, [""] * 10)
    styles = re.findall(r'class="point mark \w+" style="([^"]*)"', html)
    assert "--o" not in styles[0]
    assert "--o" not in styles[9], "it has its place alone"
    plots = [
        np.array(
            [re.findall(rf"--o{pair}:(\S+?)px (\S+?)px", style)[0] for style in styles[1:9]], dtype=float
        )
        for pair in ("0-1", "1-0")
    ]
    steps = np.vstack([np.zeros((1, 2)), plots[0]])
    gaps = np.hypot(*(steps[:, None] - steps).transpose(2, 0, 1))
    assert gaps[~np.eye(9, dtype=bool)].min() >= 11
    assert steps[:, 0].min() >= 0, "never to the better side of the first"
    assert steps[:, 1].max() <= 0, "nor of the second, which is better below"
    assert np.abs(steps).max() <= 40
    np.testing.assert_array_equal(plots[1], -plots[0][:, ::-1], "right is up when the sides are swapped")


def test_what_cannot_be_drawn_is_said(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "pareto.html"
    single = record | {"objectives": {"bpb": "minimize"}}
    page = write_pareto(path, single).read_text(encoding="utf-8")
    assert "Left out: the study has one objective, and a plot needs two." in page
    assert len(Reader(page).rows) == 7
    page = write_pareto(path, record | {"trials": record["trials"][5:]}).read_text(encoding="utf-8")
    assert "Left out: nothing is measured yet." in page
    assert Reader(page).rows[1] == ["5", "1,3", "under way", "–", "–", "0", "per-stage"]
    page = write_pareto(path, record | {"trials": record["trials"][4:]}).read_text(encoding="utf-8")
    assert "<polyline" not in page, "nothing has trained to the end"
    assert len(Reader(page).find("point")) == 1


def test_a_place_that_cannot_be_written(record: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(RunError, setting="out"):
        write_pareto(tmp_path / "file" / "pareto.html", record)


def test_a_study_leaves_its_page_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"bpb": 3.0, "gradient_depth": 2.0}
    tried = Tried(0, Candidate(Composition((2, 2)), {"heads": "shared"}), 80, values, "complete", True)
    monkeypatch.setattr(pareto, "explore", lambda *given: [tried])
    assert search.run(["pareto", "--out", str(tmp_path), "--json"]) == 0
    page = Path(json.loads(capsys.readouterr().out)["page"])
    assert page == tmp_path / "pareto.html"
    assert Reader(page.read_text(encoding="utf-8")).rows[1][:3] == ["0", "2,2", "on the front"]
