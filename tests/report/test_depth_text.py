import re
from html.parser import HTMLParser
from itertools import combinations, pairwise

import numpy as np
import pytest

from raising import refused
from topograd.errors import ConfigError
from topograd.report.depth_text import depth_fragment, depth_page, stage_colour
from topograd.report.markup import POLICY

PIECES = [("re", 0), ("ad", 0), ("", 1), ("(", 0), ("<&>\x1b", 1), ("\n", 2), (" é", 2), ("", 0), (")", 1)]


class Reader(HTMLParser):
    """The tags, the text of the <pre>, and each <span> within it as (text, title)."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.pre = ""
        self.spans: list[tuple[str, str | None]] = []
        self.cells: list[str] = []
        self.feed(fragment)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "meta":
            return
        self.open.append(tag)
        if tag == "span" and "pre" in self.open:
            self.spans.append(("", dict(attrs)["title"]))
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self.open:
            self.pre += data
            if "span" in self.open:
                text, title = self.spans[-1]
                self.spans[-1] = text + data, title
        elif {"th", "td"} & set(self.open):
            self.cells[-1] += data


def test_the_text_is_whole_and_neighbours_of_a_stage_are_one_span() -> None:
    reader = Reader(depth_fragment("def\n ", PIECES, 4))
    assert reader.pre == "def\n read(<&>␛\n é)"
    assert reader.spans == [
        ("read(", "left after stage 1 of 4"),
        ("<&>␛", "left after stage 2 of 4"),
        ("\n é", "left after stage 3 of 4"),
        (")", "left after stage 2 of 4"),
    ]


def test_every_token_is_counted_also_those_without_text() -> None:
    shares = "stage 1|4|44.4\u00a0%|stage 2|3|33.3\u00a0%|stage 3|2|22.2\u00a0%|stage 4|0|0.0\u00a0%"
    assert Reader(depth_fragment("", PIECES, 4)).cells == [
        "left after",
        "tokens",
        "share",
        *shares.split("|"),
    ]
    nothing = Reader(depth_fragment("", [], 1))
    assert nothing.cells[3:] == ["stage 1", "0", "–"]
    assert nothing.pre == ""


def test_stages_differ_without_colour_too() -> None:
    fragment = depth_fragment("", [(str(stage), stage) for stage in range(5)], 5)
    [pre] = re.findall("<pre.*</pre>", fragment, re.DOTALL)
    assert len(set(re.findall(r"underline (\w+)", pre))) == 5


def test_a_page_stands_alone_and_what_is_written_is_text() -> None:
    evil = "</title></pre><script>alert('&')</script><!--\"'"
    page = depth_page(evil, depth_fragment(evil, [(evil, 0), ("\ud800", 0)], 1))
    reader = Reader(page)
    assert not {"script", "link", "img", "iframe", "object", "a"} & reader.tags
    assert reader.pre == evil + evil + "?"
    assert f'content="{POLICY}"' in page
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"https?:|url\(|@import", page)


def test_a_stage_that_does_not_exist_is_refused() -> None:
    for stage in (2, -1):
        with refused(ConfigError, setting="stage", given=stage + 1):
            depth_fragment("", [("a", 0), ("b", stage)], 2)


# Colours


def linear(colour: str) -> np.ndarray:
    """The light of #rrggbb, by the sRGB curve."""
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8, 12])
def test_colours_go_from_dark_to_light_and_are_legible_on_black_and_white(stages: int) -> None:
    light = [luminance(stage_colour(stage, stages)) for stage in range(stages)]
    assert all(a < b for a, b in pairwise(light))
    # contrast as WCAG defines it; 3 is its bound for large text and for lines
    assert min((value + 0.05) / 0.05 for value in light) >= 3
    assert min(1.05 / (value + 0.05) for value in light) >= 3


# Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB
SEEN_BY = {
    "all cones": np.eye(3),
    "no L cones": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "no M cones": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "no S cones": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear RGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ rgb.clip(0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", SEEN_BY)
@pytest.mark.parametrize(("stages", "least"), [(2, 80), (4, 30), (6, 14)])
def test_colours_are_told_apart_by_all_kinds_of_eyes(eyes: str, stages: int, least: float) -> None:
    """A distance of about 2 can just be seen."""
    seen = [lab(SEEN_BY[eyes] @ linear(stage_colour(stage, stages))) for stage in range(stages)]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > least
