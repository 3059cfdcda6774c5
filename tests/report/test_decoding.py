"""The part of a report on decoding, from records made by hand, whole, hostile and damaged."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from topograd.report.page import decoding_html

FULL = {
    "way": "full",
    "tokens_per_second": 1234.4,
    "speedup": 1.0,
    "agreement": 1.0,
    "identical": 1.0,
    "mean_stage": 4,
    "acceptance": None,
}
DRAFTS = {
    "way": "speculate",
    "tokens_per_second": 1851.6,
    "speedup": 1.5,
    "agreement": 0.99876,
    "identical": 0.5,
    "mean_stage": 2.25,
    "acceptance": 0.875,
}
DECODING: dict[str, Any] = {
    "bench": {"ways": [FULL, DRAFTS]},
    "picture": {
        "prompt": "def ",
        "depth": "wand:flip-rate:0.01",
        "stages": 4,
        "pieces": [["re", 0], ["ad", 0], ["(", 3], ["", 1], ["x)", 1]],
    },
}


class Reader(HTMLParser):
    """Checks that elements nest; the tags, the cells of each row, the text of the <pre>."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.pre = ""
        self.feed(fragment)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self.open:
            self.pre += data
        elif {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def test_ways_as_a_table_and_a_text_with_its_stages() -> None:
    html = decoding_html(DECODING)
    reader = Reader(html)
    assert reader.rows[:3] == [
        [
            *("way", "tokens/s", "speedup", "agreement", "identical texts", "mean stage", "acceptance"),
        ],
        ["full", "1\u00a0234", "1.00", "1.0000", "1.00", "4.00", "–"],
        ["speculate", "1\u00a0852", "1.50", "0.9988", "0.50", "2.25", "0.88"],
    ]
    assert reader.pre == "def read(x)"
    found = re.findall(r'title="left after stage (\d) of 4">([^<]+)</span>', html)
    assert found[:3] == [("1", "read"), ("4", "("), ("2", "x)")]


def test_what_names_and_texts_say_is_shown_and_not_done() -> None:
    hostile = "</td><script>alert('&\"')</script>\x1b"
    decoding = copy.deepcopy(DECODING)
    decoding["bench"]["ways"][0]["way"] = hostile
    decoding["picture"] |= {"prompt": hostile, "pieces": [[hostile, 2]]}
    html = decoding_html(decoding)
    reader = Reader(html)
    assert "<script" not in html
    assert "\x1b" not in html
    shown = hostile.replace("\x1b", "␛")
    assert reader.rows[1][0] == shown
    assert reader.pre == 2 * shown
    decoding["bench"]["ways"][0]["speedup"] = hostile
    assert Reader(decoding_html(decoding)).rows[1][2] == "–", "what is no number is a dash"


@pytest.mark.parametrize(
    "decoding",
    [
        None,
        {},
        [],
        "fast",
        {"bench": None},
        {"bench": []},
        {"bench": {}},
        {"bench": {"ways": None}},
        {"bench": {"ways": []}},
        {"bench": {"ways": {"way": "full"}}},
        {"picture": DECODING["picture"]},
    ],
    ids=str,
)
def test_without_ways_there_is_no_part(decoding: Any) -> None:
    assert decoding_html(decoding) == ""


@pytest.mark.parametrize("way", [None, 5, [], {}, {"way": None}, {"speedup": "x"}], ids=str)
def test_a_damaged_way_is_a_row_of_dashes(way: object) -> None:
    reader = Reader(decoding_html({"bench": {"ways": [way, FULL]}}))
    assert reader.rows[1][1:] == ["–"] * 6
    assert reader.rows[2][0] == "full"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, None, "1.5"], ids=str)
def test_a_damaged_number_is_a_dash(value: object) -> None:
    assert Reader(decoding_html({"bench": {"ways": [FULL | {"speedup": value}]}})).rows[1][2] == "–"


@pytest.mark.parametrize(
    "damage",
    [
        {"pieces": None},
        {"pieces": "text"},
        {"pieces": [5]},
        {"pieces": ["ab", "c"]},
        {"pieces": [["a"]]},
        {"pieces": [["a", 1, 2]]},
        {"pieces": [["a", None]]},
        {"pieces": [["a", "deep"]]},
        {"pieces": [["a", 4]]},
        {"pieces": [["a", -1]]},
        {"pieces": [["a", float("nan")]]},
        {"stages": None},
        {"stages": "4"},
        {"stages": 0},
    ],
    ids=str,
)
def test_a_damaged_text_leaves_the_table_alone(damage: dict[str, Any]) -> None:
    reader = Reader(decoding_html(DECODING | {"picture": DECODING["picture"] | damage}))
    assert [row[0] for row in reader.rows] == ["way", "full", "speculate"]
    assert "pre" not in reader.tags


@pytest.mark.parametrize("picture", [None, [], "text", {}], ids=str)
def test_without_a_text_there_is_only_the_table(picture: object) -> None:
    html = decoding_html(DECODING | {"picture": picture})
    assert html == decoding_html({"bench": DECODING["bench"]})
    assert Reader(html).tags.count("table") == 1


def test_a_text_without_a_prompt_is_shown() -> None:
    decoding = copy.deepcopy(DECODING)
    del decoding["picture"]["prompt"]
    assert Reader(decoding_html(decoding)).pre == "read(x)"
