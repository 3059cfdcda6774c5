"""Drafters by category of prompts: what is written, where it loops, and what stands beside the goal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import drafters
from categories import CATEGORIES, prompts_of
from drafters import LOOP, Settings, measure, show, without_loop
from topograd.data.windows import Text
from topograd.pretrained import REFERENCE
from topograd.runs.session import open_session


def test_where_a_text_loops_or_ends() -> None:
    text = [*range(20), *range(20), *range(20)]
    assert without_loop(text, frozenset()) == 20 + LOOP - LOOP
    assert without_loop(text, frozenset(), loops=True) == 60
    assert without_loop(text, frozenset({7}), loops=True) == 8


def test_prompts_of_every_category() -> None:
    session = open_session(REFERENCE)
    prompts = prompts_of(session, 2)
    assert [p.kind for p in prompts] == [kind for kind in ("code", *CATEGORIES) for _ in range(2)]
    texts = [session.tokenizer.decode(p.tokens) for p in prompts[2:]]
    assert texts == [text for texts in CATEGORIES.values() for text in texts[:2]]


def test_every_way_stands_beside_full_depth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("categories.CATEGORIES", {"chat": CATEGORIES["chat"]})
    text = Text(windows := torch.arange(6 * 128).reshape(6, 128), windows, 0)
    monkeypatch.setattr(drafters, "heldout_text", lambda *_: text)
    monkeypatch.setattr("topograd.decode.calibration.measure.ROUNDS", 1)
    monkeypatch.setattr("topograd.decode.calibration.measure.SIZES", (1, 2, 4))
    monkeypatch.setattr("topograd.decode.calibration.tune.OWN_TOKENS", 4)
    monkeypatch.setattr("topograd.decode.calibration.tune.OWN_TEXTS", 2)
    found: dict[str, Any] = measure(open_session(REFERENCE), Settings(tokens=10, prompts=1))
    assert (found["run"], found["goal"], found["kinds"]) == ("reference", 1.87, ["code", "chat"])
    ways = {row["way"]: row for row in found["ways"]}
    assert ways.keys() == {"full depth", "lookup", "first stage", "tuned"}
    assert ways["full depth"]["over_full_depth"] == 1
    for name in ("lookup", "first stage"):
        assert ways[name]["by_kind"].keys() == {"code", "chat"}
        assert ways[name]["mismatches"] == 0
    assert ways["first stage"]["acceptance_by_kind"].keys() == {"code", "chat"}
    show(found)
    assert "goal 1.87" in capsys.readouterr().out
