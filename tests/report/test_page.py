import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from browser import FOUND, MISSING, Browser
from raising import refused
from topograd.errors import RunError
from topograd.report.data import RunData
from topograd.report.drawing import Drawing
from topograd.report.page import escape, write_report

MakeRun = Callable[..., RunData]
NAMES = ("loss", "prefixes", "gap", "reliability", "memory", "rank")
VOID = {"meta"}


class Reader(HTMLParser):
    """Checks that elements nest, and gathers ids, references, attributes and the text of each element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self.ids += [found["id"] or ""] if "id" in found else []
        links = [found.get(key) or "" for key in ("href", "xlink:href")]
        links += re.findall(r"url\((#[^)]*)\)", " ".join(value or "" for value in found.values()))
        self.references += [link for link in links if link]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.text.setdefault(tag, []).append(data)


def test_a_whole_report(tmp_path: Path, make_run: MakeRun, comparison: dict[str, Any]) -> None:
    staged, backprop = make_run(3, steps=50), make_run(1, steps=50)
    staged = replace(staged, name="<script>alert('&')</script>")
    path = tmp_path / "deep" / "report.html"
    assert write_report(path, staged, backprop, comparison) == path
    page = path.read_text(encoding="utf-8")
    reader = Reader(page)

    # it stands alone: references stay inside it, and nothing runs or loads
    tags = [tag for tag, _ in reader.tags]
    assert not {"script", "link", "img", "iframe", "object"} & set(tags)
    assert len(reader.ids) == len(set(reader.ids))
    assert {link.removeprefix("#") for link in reader.references} <= set(reader.ids)
    assert set(re.findall(r"https?://[^\"\s]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }

    # every figure is described, has its numbers, and lies beside the page
    images = [attributes for tag, attributes in reader.tags if tag == "svg"]
    assert [image["class"] for image in images] == ["broad", "narrow"] * len(NAMES)
    assert all(image["role"] == "img" and image["aria-label"] for image in images)
    assert tags.count("details") == len(NAMES)
    assert tags.count("table") == len(NAMES) + 3
    for name in NAMES:
        assert (tmp_path / "deep" / "figures" / f"{name}.svg").read_text().startswith("<?xml")
        assert (tmp_path / "deep" / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    left = {entry.suffix for entry in path.parent.rglob("*") if entry.is_file()}
    assert left == {".html", ".svg", ".png"}

    # what a run says is text, and samples are shown as they are
    assert reader.text["h1"] == ["<script>alert('&')</script> against demo-1"]
    assert "".join(reader.text["pre"]).count("    if size < 0 && <b>self.closed</b>:\n") == 3
    assert "+4.1\u00a0%" in reader.text["dd"]
    assert "".join(reader.text["td"]).count("differs") == 1


def test_an_empty_run_gets_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    stale = tmp_path / "figures" / "memory.png"
    stale.parent.mkdir()
    stale.write_bytes(b"of an earlier report")
    foreign = stale.with_name("mine.png")
    foreign.write_bytes(b"not ours")
    page = write_report(tmp_path / "report.html", RunData("none", {}, [], {}), None, None).read_text()
    reader = Reader(page)
    assert "svg" not in {tag for tag, _ in reader.tags}
    assert len(reader.text["li"]) - len(reader.text["a"]) == len(NAMES), "one list has every reason"
    assert not set(NAMES) & set(reader.ids), "a figure that is left out has no section"
    assert [entry.name for entry in stale.parent.iterdir()] == ["mine.png"]
    assert 'id="samples"' not in page


@pytest.mark.skipif(FOUND is None, reason=MISSING)
def test_a_page_is_whole_on_a_phone_and_on_a_desk(
    tmp_path: Path, make_run: MakeRun, comparison: dict[str, Any]
) -> None:
    """Nothing is cut and nothing scrolls sideways, with every table open; each width shows one layout."""
    page = write_report(tmp_path / "report.html", make_run(3, steps=20), make_run(1, steps=20), comparison)
    page.write_text(page.read_text().replace("<details", "<details open"))
    browser = Browser(tmp_path / "profile")
    try:
        for width, layout in ((390, "narrow"), (1400, "broad")):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            browser.open(page.as_uri())
            wide = "[document.documentElement, ...document.querySelectorAll('.wide, .plot')]"
            assert browser.ask(f"{wide}.every(e => e.scrollWidth <= e.clientWidth)"), width
            shown = "[...document.querySelectorAll('.plot svg')].filter(e => e.clientWidth)"
            assert browser.ask(f"{shown}.map(e => e.getAttribute('class'))") == [layout] * len(NAMES)
    finally:
        browser.close()


def test_unequal_training_is_warned_of(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topograd.report.page._panels", lambda *_: ())
    staged, backprop = make_run(2, steps=20), make_run(1, steps=20)
    longer = replace(backprop, evaluation={**backprop.evaluation, "steps": 60})
    pages = [write_report(tmp_path / "r.html", staged, one, None).read_text() for one in (backprop, longer)]
    equal, unequal = (re.findall(r'<p class="warning">(.*?)</p>', page) for page in pages)
    assert equal == []
    assert {str(staged.evaluation["steps"]), "60"} <= set(re.findall(r"\d+", unequal[0]))


def test_one_run_of_one_stage(tmp_path: Path, make_run: MakeRun) -> None:
    page = write_report(tmp_path / "report.html", make_run(1, steps=20), None, {}).read_text()
    reader = Reader(page)
    assert "one stage (partition 6): plain backprop" in "".join(reader.text["p"])
    assert sorted(entry.stem for entry in (tmp_path / "figures").glob("*.svg")) == ["loss", "reliability"]
    assert "backprop</th>" not in page


@pytest.mark.parametrize(
    ("config", "cut"),
    [
        ({"topology": {"graph": "forest", "branches": ["1", "1"]}}, " (a forest)"),
        ({"topology": {"graph": "soft"}}, " (soft)"),
        ({"topology": {"graph": "chain", "partition": "3,3"}}, " (partition 3,3)"),
        ({"partition": "3,3"}, " (partition 3,3)"),
        ({"topology": 3}, ""),
    ],
    ids=["forest", "soft", "chain", "before 0.2", "damaged"],
)
def test_the_lead_says_how_it_is_cut_and_what_it_predicts_by(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], cut: str
) -> None:
    monkeypatch.setattr("topograd.report.page._panels", lambda *_: ())
    run = make_run(2, steps=20)
    run = replace(run, config=config, evaluation={**run.evaluation, "predicts_by": "a pool of stages 1-2"})
    lead = "".join(Reader(write_report(tmp_path / "report.html", run, None, None).read_text()).text["p"])
    assert f"cut into 2 stages{cut}. " in lead
    assert "It predicts by a pool of stages 1-2." in lead


def test_the_same_data_gives_the_same_bytes(tmp_path: Path, make_run: MakeRun) -> None:
    run = replace(make_run(2, steps=20), evaluation={"bpb": {"prefix": [1.8, 1.7]}})
    pages = [write_report(tmp_path / name / "report.html", run, None, None) for name in "ab"]
    one, two = (
        {file.relative_to(page.parent): file.read_bytes() for file in page.parent.rglob("*.*")}
        for page in pages
    )
    assert len(one) == 5
    assert one == two


@pytest.mark.parametrize("value", [float("nan"), 1e-300, "text", {}], ids=repr)
def test_a_value_of_the_wrong_kind_anywhere_never_stops_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    """Drawn without rendering, which is where matplotlib would fail or warn, and fast."""

    def draw(figure: Any) -> Drawing:
        figure.draw_without_rendering()
        return Drawing("<svg></svg>", b"", "<svg></svg>")

    monkeypatch.setattr("topograd.report.page.render", draw)
    metrics: list[Any] = [
        {"kind": "train", "step": k, "loss": [value, 3.0], "seconds": value, "tokens": value} for k in (1, 2)
    ]
    metrics += [{"kind": "eval", "step": k, "bpb": {"last": value, "prefix": [2.0, value]}} for k in (1, 2)]
    metrics += [value, {"kind": value}, {"kind": "train", "step": value, "loss": value}]
    evaluation = {
        "steps": value,
        "bpb": {"last": value, "sum": value, "mean": 1.0, "prefix": [value, 2.0]},
        "ece": value,
        "reliability": [value, {"confidence": [0.5, value], "accuracy": [0.5, value], "count": [3, value]}],
        "effective_rank": [value, 3.0],
        "usefulness": [None, value],
        "tokens": value,
    }
    comparison = {
        "step_time_ratio": value,
        "memory": {"staged": value, "backprop": 3.0, "ratio": value, "by_stages": {"1": value, "2": 5}},
        "gap": value,
        "samples": [value, {"title": value, "prompt": value, "text": value}],
    }
    run = RunData("broken", {"partition": value, "model": value}, metrics, evaluation)
    Reader(write_report(tmp_path / "report.html", run, run, comparison).read_text(encoding="utf-8"))


def test_the_prompt_is_marked_once(tmp_path: Path) -> None:
    samples = [{"title": "a", "prompt": "def ", "text": text} for text in ("def f():", "g():")]
    run = RunData("x", {}, [], {})
    page = write_report(tmp_path / "report.html", run, None, {"samples": samples}).read_text()
    assert re.findall(r"<pre>(.*?)</pre>", page) == ["<b>def </b>f():", "<b>def </b>g():"]


def test_escape_makes_control_characters_visible_and_mends_surrogates() -> None:
    assert escape("a<b>&\"'") == "a&lt;b&gt;&amp;&quot;&#x27;"
    assert escape("\x00\x1b[0m\x7f\n\t") == "␀␛[0m␡\n\t"
    assert escape("\ud800") == "?"


def test_a_report_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    with refused(RunError, setting="out", given=str(file / "report.html")):
        write_report(file / "report.html", RunData("x", {}, [], {}), None, None)
    assert file.read_text() == "kept"
    with refused(RunError, setting="out", given=str(tmp_path)):
        write_report(tmp_path, RunData("x", {}, [], {}), None, None)
