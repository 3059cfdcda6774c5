"""`topograd score`, as a program calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from topograd.runs.folder import Run


def test_the_one_object(staged: Path, call: Any) -> None:
    answer = call("score", staged, "--context", "stage", "--continuation", " loss", "--json").json
    assert len(answer["stages"]) == 2
    for stage in answer["stages"]:
        assert "".join(token["text"] for token in stage["tokens"]) == " loss"
        assert stage["logprob"] == pytest.approx(sum(token["logprob"] for token in stage["tokens"]))
        assert {"token", "rank", "logit"} <= stage["tokens"][0].keys()


def test_several_continuations_and_one_depth(staged: Path, call: Any) -> None:
    words = ("score", staged, "--context", "", "--continuation", "a", "--continuation", "b")
    answer = call(*words, "--depth", "prefix:1", "--json").json
    assert [each["continuation"] for each in answer["continuations"]] == ["a", "b"]
    assert [len(each["stages"]) for each in answer["continuations"]] == [1, 1]
    table = call(*words).out
    assert "stage 2" in table
    assert "'a'" in table


def test_what_cannot_be_is_one_line(staged: Path, call: Any) -> None:
    context = ("score", staged, "--context", "a")
    assert "--continuation is missing; give the text to score" in call(*context).refusal
    assert "has no token of its own" in call(*context, "--continuation", "").refusal
    assert "--depth 'deep' is unknown" in call(*context, "--continuation", "b", "--depth", "deep").refusal
    long = call(*context, "--continuation", "stage " * 40).refusal
    assert "tokens and the model reads 16; shorten it" in long


def test_a_long_context_is_said(staged: Path, call: Any) -> None:
    answer = call("score", staged, "--context", "stage " * 40, "--continuation", "x", "--json")
    assert "were left out" in answer.err
    assert answer.json["cut"] > 0


def test_with_a_specialist(straight: Run, spec: Path, call: Any) -> None:
    words = ("score", straight.folder, "--context", "stage", "--continuation", " loss")
    plain = call(*words, "--json").json
    found = call(*words, "--specialists", f"{spec}*0.5", "--json").json
    assert found["depths"] == [*plain["depths"], f"{spec}*0.5"]
    for a, b in zip(found["stages"], plain["stages"], strict=False):
        assert a["logprob"] == pytest.approx(b["logprob"], abs=1e-4)
    assert found["stages"][-1]["logprob"] == pytest.approx(plain["stages"][-1]["logprob"], abs=1e-4), (
        "new: none"
    )
    assert "is no specialist" in call(*words, "--specialists", straight.folder).refusal
