"""The playground in a real browser: typed into, run, pointed at, walked through, in the dark, on a phone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from browser import FOUND, MISSING, Browser
from topograd.serve.app import playground
from topograd.serve.server import Running

pytestmark = pytest.mark.skipif(FOUND is None, reason=MISSING)
DONE = "document.querySelector('#stop').disabled && document.querySelectorAll('.token').length > 8"
FIRST = "#columns section:nth-child(1)"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, running: Running) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    browser.open(running.address())
    browser.wait("document.querySelectorAll('.column').length == 2")
    browser.ask("document.querySelector('#tokens').value = 24")
    browser.click("#run")
    browser.wait(DONE)
    yield browser
    browser.close()


def test_both_columns_write_the_same_text_where_both_are_exact(started: Browser) -> None:
    texts = started.ask("[...document.querySelectorAll('.text')].map(e => e.innerText)")
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("    def read(self, size=-1):")
    stages = started.ask("[...document.querySelectorAll('.stats')].map(e => e.innerText)")
    assert "24" in stages[0]
    spoken = started.ask("[...document.querySelectorAll('.exact')].map(e => e.textContent)")
    assert all(words.startswith("Exact") for words in spoken)


def test_drafts_are_seen(started: Browser) -> None:
    """Every accepted draft has a look of its own, and the legend counts them."""
    started.ask("columns[0].clear()")
    started.ask(
        "[['a', false], ['b', true], ['c', true]].forEach(([text, drafted], id) => "
        "columns[0].add({ id, text, drafted, stage: 4 })); columns[0].show()"
    )
    assert started.ask("columns[0].spans.map(span => span.classList.contains('draft'))") == [
        False,
        True,
        True,
    ]
    looks = started.ask("columns[0].spans.map(span => getComputedStyle(span).backgroundColor)")
    assert looks[0] != looks[1] == looks[2]
    assert started.ask("columns[0].legend.lastChild.textContent").endswith(" 2")
    started.click("#run")
    started.wait(DONE)


@pytest.mark.parametrize("depths", [["full", "wand", "speculate"], ["full", "speculate"]])
def test_a_first_compare_shows_two_depths(started: Browser, depths: list[str]) -> None:
    """Without a calibration too, as with a model that was imported."""
    known = started.ask("model.depths")
    shown = started.ask(
        f"model.depths = {depths}, firstKinds().map((kind, i) => new Column(i, kind).kind.value)"
    )
    started.ask(f"model.depths = {known}")
    assert shown == ["speculate" if "wand" in depths else "lookup", "full"]


def test_no_label_of_a_depth_is_cut(started: Browser) -> None:
    width = "(s, text) => { const c = document.createElement('canvas').getContext('2d');"
    width += " c.font = getComputedStyle(s).font; return c.measureText(text).width }"
    room = "parseFloat(getComputedStyle(s).width) - 2 * parseFloat(getComputedStyle(s).paddingLeft) - 24"
    fits = f"(s => [...s.options].every(o => ({width})(s, o.textContent) <= {room}))(columns[0].kind)"
    assert started.ask(fits), "an arrow takes the last 24 pixels"


def test_nothing_is_loaded_from_elsewhere_and_nothing_is_refused(started: Browser, running: Running) -> None:
    sent = [e["params"] for e in started.events if e.get("method") == "Network.requestWillBeSent"]
    asked = [each["request"]["url"] for each in sent]
    assert asked
    assert all(url.startswith(running.address()) for url in asked)
    wrong = [e for e in started.events if e.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")]
    assert wrong == []
    assert "unsafe" not in playground()[1]


def test_pointing_and_keys_show_every_stages_candidates(started: Browser) -> None:
    started.point_at(f"{FIRST} .text .token:nth-child(4)")
    started.wait("document.querySelectorAll('#card tr').length == 4")
    words = started.ask("document.querySelector('#card').innerText")
    assert "left after stage" in words
    assert "%" in words
    started.ask(f"document.querySelector('{FIRST} .text').focus()")
    for count in (1, 2):
        started.press("ArrowRight", 39)
        started.wait(f"document.querySelector('#card').innerText.startsWith('token {count}:')")
    started.press("Escape", 27)
    started.wait("document.querySelector('#card').hidden")


def test_sliders_change_the_depth_and_the_honest_line(started: Browser) -> None:
    choose = "(k => {{ const s = document.querySelector('{0} select'); s.value = k; "
    choose += "s.dispatchEvent(new Event('change')) }})"
    for kind, words, depth in (
        ("prefix", "Another model", "prefix:1"),
        ("wand", "Approximate", "wand:flip-rate:0.00100"),
        ("branches", "Another model", "branches:1-3*1+1-4*1"),
        ("lookup", "Exact", "speculate:lookup"),
    ):
        started.ask(f"{choose.format(FIRST)}('{kind}')")
        assert started.ask("columns[0].depth") == depth
        assert started.ask(f"document.querySelector('{FIRST} .exact').textContent").startswith(words)
    started.ask(f"{choose.format(FIRST)}('prefix')")
    started.ask("document.querySelector('#compare').click()")
    started.ask("document.querySelector('#prompt').focus()")
    started.call(
        "Input.dispatchKeyEvent",
        type="keyDown",
        key="Enter",
        code="Enter",
        windowsVirtualKeyCode=13,
        modifiers=2,
    )
    started.wait(DONE)
    assert started.ask("columns[0].tokens.every(t => t.stage == 1)")
    assert started.ask("columns[1].box.hidden")
    started.ask("document.querySelector('#compare').click()")


CHOOSE = (
    "(v => {{ const s = document.querySelector('#form'); s.value = v; "
    "s.dispatchEvent(new Event('change')) }})('{}')"
)


def test_json_and_tools(started: Browser) -> None:
    """A schema gives JSON that fits, a tool a call of it, a broken schema one line."""
    assert started.ask("document.querySelector('#schema').hidden")
    started.ask(CHOOSE.format("json"))
    assert not started.ask("document.querySelector('#schema').hidden")
    started.ask("document.querySelector('#tokens').value = 60")
    started.click("#run")
    started.wait("document.querySelector('#stop').disabled && columns[0].result.textContent != ''")
    for column in (0, 1):
        made = started.ask(f"JSON.parse(columns[{column}].result.textContent)")
        assert set(made) == {"name", "size"}
        assert 1 <= made["size"] <= 99
    started.ask(CHOOSE.format("tool"))
    started.click("#run")
    started.wait("document.querySelector('#stop').disabled && columns[1].result.textContent.endsWith(')')")
    assert started.ask("columns[0].result.textContent").startswith('add({"a": ')
    started.ask("document.querySelector('#schema').value = '{'")
    started.click("#run")
    started.wait("columns[0].problem.textContent.startsWith('this is no JSON')")
    started.ask(CHOOSE.format("text"))
    started.click("#run")
    started.wait(DONE)


def test_embeddings_by_depth_are_drawn(started: Browser) -> None:
    started.click("#embed")
    started.wait("document.querySelectorAll('#plot polyline').length == 3")
    words = started.ask("document.querySelector('#plot-words').textContent")
    assert "1 and 2: " in words
    points = started.ask("document.querySelector('#plot polyline').getAttribute('points').split(' ').length")
    assert points == 4, "one for each exit"
    started.ask("document.querySelector('#texts').value = 'one'")
    started.click("#embed")
    started.wait("document.querySelector('#embed-problem').textContent != ''")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_and_both_schemes(started: Browser, scheme: str) -> None:
    started.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    started.call(
        "Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True
    )
    try:
        assert started.ask("document.documentElement.scrollWidth") <= 390
        light = started.picture()[2, 2].min()
        assert (light > 200) == (scheme == "light")
    finally:
        started.call("Emulation.clearDeviceMetricsOverride")
