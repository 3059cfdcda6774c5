"""Texts become tokens as lm-eval splits them, and scores say which token is how likely."""

from __future__ import annotations

import pytest

from topograd.depth.model import Model
from topograd.errors import ConfigError
from topograd.evaluation.texts import encode_pair, score, score_texts


def test_space_belongs_to_what_follows(model: Model) -> None:
    assert encode_pair(model, "ab ", "c") == ([97, 98], [32, 99])
    assert encode_pair(model, "ab", " c") == ([97, 98], [32, 99])
    assert encode_pair(model, "", "c") == ([256], [99])
    assert encode_pair(model, "  ", "c") == ([256], [32, 32, 99])


def test_a_score_has_every_stage_and_every_token(model: Model) -> None:
    [one] = score(model, "a stage", " loss")
    stages = one.stages()
    assert len(stages) == 2
    assert one.cut == 0
    for stage in stages:
        assert [token["text"] for token in stage["tokens"]] == list(" loss")
        assert stage["logprob"] == pytest.approx(sum(token["logprob"] for token in stage["tokens"]))
        assert all(1 <= token["rank"] <= 257 for token in stage["tokens"])
    logits = model.logits(list(b"a stage"))[-1]
    first = stages[-1]["tokens"][0]
    assert first["logit"] == pytest.approx(float(logits[32]))
    assert first["logprob"] == pytest.approx(float(logits.log_softmax(-1)[32]))
    assert first["rank"] == 1 + int((logits > logits[32]).sum())


def test_choices_and_several_contexts_are_scored_as_each_alone(model: Model) -> None:
    requests = [("a stage", [" loss", " relay"]), ("relay", [" of"])]
    for (context, texts), found in zip(requests, score_texts(model, requests), strict=True):
        for text, one in zip(texts, found, strict=True):
            [alone] = score(model, context, text)
            assert one.text == text
            assert one.score.total == pytest.approx(alone.score.total, rel=1e-12)


def test_a_context_that_is_too_long_is_cut_from_the_left_and_said(model: Model) -> None:
    long = "x" * 40 + "a stage and "
    [one] = score(model, long, "loss")
    assert one.cut == len(long) + len("loss") - 17
    [same] = score(model, long[one.cut - 1 :], "loss")
    assert one.score.total == same.score.total


def test_what_cannot_be_scored_is_one_line(model: Model) -> None:
    with pytest.raises(ConfigError, match="the continuation '' has no token of its own; give some text"):
        score(model, "a", "")
    with pytest.raises(
        ConfigError, match="the continuation has 17 tokens and the model reads 16; shorten it"
    ):
        score(model, "a", "x" * 17)
    with pytest.raises(ConfigError, match="give at most 1000000"):
        score(model, "a" * 1_000_000, "b")
