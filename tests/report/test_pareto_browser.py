"""The Pareto page in a real browser: its marks are pointed at, clicked, tapped and walked through by keys.

Where no Chromium is installed the tests are skipped.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import FOUND, MISSING, Browser
from topograd.report.pareto import write_pareto

pytestmark = pytest.mark.skipif(FOUND is None, reason=MISSING)

OBJECTIVES = {"bpb": "minimize", "gradient_depth": "minimize", "pipeline_granularity": "maximize"}
PARTITIONS = [(6,), (3, 3), (2, 2, 2), (4, 2), (2, 4), (1, 5), (5, 1), (1, 2, 3), (3, 2, 1), (2, 1, 3)]
FRONT = {0, 1, 2}


class ParetoBrowser(Browser):
    """A browser that shows the page of a front."""

    def card(self) -> str:
        """The id of the card that lies on top, which is empty for the one that says what to do."""
        x, y = self.middle(".hint")
        return str(self.ask(f"document.elementFromPoint({x}, {y}).closest('.card').id"))


def _trial(number: int, parts: tuple[int, ...]) -> dict[str, Any]:
    done = number < 6
    values = {
        "bpb": 3.0 + 0.1 * len(parts) + 0.004 * number + (0 if done else 0.3),
        "gradient_depth": max(parts),
        "pipeline_granularity": len(parts),
    }
    return {
        "number": number,
        "partition": list(parts),
        "settings": {"stage_heads": "shared"},
        "steps": 80 if done else 20,
        "values": values,
        "state": "complete" if done else "stopped",
        "on_front": number in FRONT,
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trials = [_trial(number, parts) for number, parts in enumerate(PARTITIONS)]
    record = {"trials": trials, "objectives": OBJECTIVES, "space": 64}
    return write_pareto(tmp_path_factory.mktemp("page") / "pareto.html", record)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParetoBrowser]:
    browser = ParetoBrowser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(started: ParetoBrowser, page: Path) -> ParetoBrowser:
    started.open(page.as_uri())
    return started


def _shown(browser: ParetoBrowser, selector: str) -> list[str]:
    """Class names of the elements that the page draws, of those that `selector` finds."""
    every = f"[...document.querySelectorAll('{selector}')]"
    names: list[str] = browser.ask(
        f"{every}.filter(e => getComputedStyle(e).display != 'none').map(e => e.getAttribute('class'))"
    )
    return names


def test_nothing_is_loaded_and_nothing_is_refused(browser: ParetoBrowser, page: Path) -> None:
    asked = [e["params"]["request"]["url"] for e in browser.events if "WillBeSent" in e.get("method", "")]
    assert asked == [page.as_uri()]
    assert [e for e in browser.events if e.get("method") == "Log.entryAdded"] == []
    assert browser.ask("document.styleSheets.length") == 2


def test_at_first_it_shows_two_properties_and_no_card(browser: ParetoBrowser) -> None:
    assert _shown(browser, "g.part") == ["part up-0", "part across-1"]
    assert _shown(browser, "polyline") == ["part line-1-0"]
    assert _shown(browser, ".card") == ["card hint"]


def test_pointing_shows_the_configuration_and_leaving_hides_it(browser: ParetoBrowser) -> None:
    before = browser.picture()
    browser.point_at("#point-4")
    assert browser.card() == "card-4"
    words = browser.ask("document.querySelector('#card-4').innerText")
    for part in ("Trial 4", "2,4", "shared", "3.2160", "beaten"):
        assert part in words
    assert (np.abs(browser.picture() - before).max(axis=2) > 32).sum() > 1000, "the card is painted"
    browser.mouse("mouseMoved", 1, 1)
    assert browser.card() == ""
    assert _shown(browser, ".card") == ["card hint"]
    assert np.abs(browser.picture() - before).max() <= 32, "edges may be smoothed a little differently"


def test_a_click_keeps_the_card_and_another_mark_covers_it_for_a_while(browser: ParetoBrowser) -> None:
    browser.click("#point-2")
    browser.mouse("mouseMoved", 1, 1)
    assert browser.card() == "card-2"
    browser.point_at("#point-0")
    assert browser.card() == "card-0"
    browser.mouse("mouseMoved", 1, 1)
    assert browser.card() == "card-2"
    browser.click("#point-7")
    browser.mouse("mouseMoved", 1, 1)
    assert browser.card() == "card-7"
    assert _shown(browser, ".card") == ["card", "card hint"], "only one is kept"


def test_keys_reach_every_mark_the_front_first(browser: ParetoBrowser) -> None:
    for _ in range(12):
        browser.press("Tab", 9)
        if browser.ask("document.activeElement.name") == "point":
            break
    assert browser.card() == "card-0", "the focus alone shows it"
    seen = [browser.card()]
    for _ in PARTITIONS[1:]:
        browser.press("ArrowRight", 39)
        seen.append(browser.card())
    assert set(seen) == {f"card-{number}" for number in range(len(PARTITIONS))}
    assert set(seen[:3]) == {f"card-{number}" for number in FRONT}
    names = browser.call("Accessibility.getFullAXTree")["nodes"]
    radios = [n["name"]["value"] for n in names if n.get("role", {}).get("value") == "radio"]
    assert any(name.startswith("partition 2,2,2, stage heads shared, bpb 3.3080") for name in radios)


def test_a_tap_on_a_narrow_screen_shows_the_card_below(browser: ParetoBrowser) -> None:
    size = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        browser.tap("#point-0")
        assert browser.card() == "card-0"
        below = browser.ask(
            "document.querySelector('#card-0').getBoundingClientRect().top"
            " - document.querySelector('.plot').getBoundingClientRect().bottom"
        )
        assert below > 0
    finally:
        browser.call("Emulation.setTouchEmulationEnabled", enabled=False)
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_the_choice_moves_the_marks_to_their_values(browser: ParetoBrowser) -> None:
    for across, up in itertools.permutations(range(3), 2):
        browser.click(f"label:has(#across-{across})")
        browser.click(f"label:has(#up-{up})")
        assert sorted(_shown(browser, "g.part")) == sorted([f"part across-{across}", f"part up-{up}"])
        assert _shown(browser, "polyline") == [f"part line-{across}-{up}"]
        boxes = np.array(
            browser.ask(
                f"[...Array({len(PARTITIONS)}).keys()].map(i => document.getElementById('point-' + i)"
                ".getBoundingClientRect()).map(b => [b.x + b.width / 2, -b.y - b.height / 2])"
            )
        )
        values = [list(_trial(i, parts)["values"].values()) for i, parts in enumerate(PARTITIONS)]
        for side, chosen in enumerate((across, up)):
            column = np.array(values)[:, chosen]
            fitted = np.polyval(np.polyfit(column, boxes[:, side], 1), column)
            assert np.abs(fitted - boxes[:, side]).max() < 30, "in line but for steps aside"
            assert np.corrcoef(column, boxes[:, side])[0, 1] > 0.98


def test_no_mark_is_hidden_by_others(browser: ParetoBrowser) -> None:
    for across, up in itertools.permutations(range(3), 2):
        browser.click(f"label:has(#across-{across})")
        browser.click(f"label:has(#up-{up})")
        for number in range(len(PARTITIONS)):
            browser.point_at(f"#point-{number}")
            assert browser.card() == f"card-{number}", (across, up)


def test_shapes_and_colours_of_the_marks(browser: ParetoBrowser) -> None:
    where = {number: browser.middle(f"#point-{number}") for number in (0, 5, 7)}
    picture = browser.picture()

    def around(number: int) -> np.ndarray:
        x, y = (round(v) for v in where[number])
        return picture[y - 7 : y + 8, x - 7 : x + 8]

    front, beaten, early = (around(number) for number in (0, 5, 7))
    blue, orange = np.array([0, 0x72, 0xB2]), np.array([0xD5, 0x5E, 0])
    assert np.abs(front[7, 7] - blue).max() < 6
    assert np.abs(front - blue).max(axis=2).min(axis=1)[1] < 60, "a diamond reaches up by its tip"
    assert beaten[7, 7].min() > 240, "a ring"
    assert np.abs(beaten - orange).max(axis=2).min() < 40
    grey = early[7, 7]
    assert grey.max() - grey.min() < 40
    assert grey.max() < 180, "a cross"
    assert early[7, 3].min() > 200, "a cross"
