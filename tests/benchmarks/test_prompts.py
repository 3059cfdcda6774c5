"""Early exits and drafts by category: what stands beside full depth, and what a calibration is for."""

from __future__ import annotations

from typing import Any

import pytest

import prompts
import questions
from prompts import CATEGORIES, PromptSettings, bench_prompts
from topograd.decode.model import load
from topograd.errors import ConfigError
from topograd.pretrained import REFERENCE


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Two categories of one prompt on the reference model, which is calibrated."""
    patch = pytest.MonkeyPatch()
    patch.setattr(prompts, "CATEGORIES", {name: CATEGORIES[name][:1] for name in ("code", "prose")})
    patch.setattr(questions, "QUESTIONS", {"world": questions.QUESTIONS["world"][:1]})
    try:
        return bench_prompts(load(REFERENCE), PromptSettings(tokens=6, drafts=2, rounds=1))
    finally:
        patch.undo()


def test_every_way_stands_beside_full_depth(found: dict[str, Any]) -> None:
    exits = found["exits"]
    drafters = [f"draft by stage {k + 1}" for k in range(exits - 1)]
    assert list(found["all"]) == ["full", "wand:sum-of-bounds", "wand:flip-rate", *drafters]
    assert found["not_measured"] is None
    for ways in (*found["categories"].values(), found["all"]):
        assert ways["full"]["identical"] == 1.0
        assert ways["full"]["mean_stage"] == exits
        assert ways["full"]["acceptance"] is None
        for name in drafters:
            assert ways[name]["mismatches"] == 0, "a draft never changes a text"
            assert 0 <= ways[name]["acceptance"] <= 1
        for name in ("wand:sum-of-bounds", "wand:flip-rate"):
            assert 1 <= ways[name]["mean_stage"] <= exits
    both = [ways["draft by stage 1"]["mean_stage"] for ways in found["categories"].values()]
    assert found["all"]["draft by stage 1"]["mean_stage"] == pytest.approx(sum(both) / 2)
    assert found["compute"][-1] == 1.0
    assert found["compute"] == sorted(found["compute"])
    assert found["right"].keys() == {"world"}


def test_without_a_calibration_only_drafts(model_without: Any) -> None:
    modes, problem = prompts._modes(model_without, 3)
    assert problem is not None
    assert "is not calibrated" in problem
    assert list(modes) == ["full", "draft by stage 1"]


@pytest.fixture
def model_without(make_session: Any) -> Any:
    from topograd.decode.model import Model

    return Model(make_session(2))


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="drafts is 0; it must be at least 1"):
        PromptSettings(drafts=0)
    with pytest.raises(ConfigError, match="more than 1000000 tokens"):
        PromptSettings(tokens=100_000, rounds=100)
