"""Texts become tokens as lm-eval splits them, and scores say which token is how likely."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pieces import pooled
from raising import refused
from topograd.decode.model import Model
from topograd.decode.strategies import PathEnsemble
from topograd.errors import ConfigError
from topograd.evaluation.texts import _scored, encode_pair, score, score_texts
from topograd.exec.forward import Predictor
from topograd.runs.adapter import update_adapter
from topograd.runs.session import LoadedTextRun
from topograd.specialists.attach import new_specialist
from topograd.specialists.model import SpecialistPool


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
    with refused(ConfigError, setting="continuation", given=""):
        score(model, "a", "")
    with refused(ConfigError, setting="continuation", given=17):
        score(model, "a", "x" * 17)
    with refused(ConfigError, setting="continuation", given=1000001):
        score(model, "a" * 1_000_000, "b")


@pytest.fixture(scope="module")
def pool(
    make_session: Callable[..., LoadedTextRun], tmp_path_factory: pytest.TempPathFactory
) -> SpecialistPool:
    """A base of two stages with two specialists that have learned something, each its own."""
    base, place = make_session(2, 1), tmp_path_factory.mktemp("specialists")
    generator = torch.Generator().manual_seed(1)
    for name in ("a", "b"):
        adapter = new_specialist(place / name, base, layers=1, head_rank=2, seed=ord(name))
        noisy = {n: t + 0.3 * torch.randn(t.shape, generator=generator) for n, t in adapter.tensors.items()}
        update_adapter(adapter, noisy, adapter.settings)
    return SpecialistPool.open(base, {name: place / name for name in ("a", "b")}, runtime="torch")


def test_specialists_that_are_active_are_scored(pool: SpecialistPool) -> None:
    active = pool.model({"a": 0.6, "b": 0.7})
    [found] = score(active, "a stage", " loss")
    [alone] = score(Model(pool.attached.base, "torch"), "a stage", " loss")
    assert len(found.score.total) == 4, "the base's stages, a alone, both"
    torch.testing.assert_close(found.score.logprob[:2], alone.score.logprob, rtol=1e-5, atol=1e-5)
    tokens = list(b"a stage loss")
    with torch.no_grad():
        z = Predictor(pool.attached.stack, active.session.plan)(torch.tensor([tokens]))[0].log_softmax(-1)
    slow = [float(z[i - 1, tokens[i]]) for i in range(len(tokens) - 5, len(tokens))]
    assert found.score.logprob[-1].tolist() == pytest.approx(slow, abs=1e-5)
    assert found.score.total[-1] != pytest.approx(found.score.total[1], abs=1e-3)
    [one] = score(pool.model({"a": 1.0}), "a stage", " loss", "prefix:3")
    assert one.score.total[0] == pytest.approx(found.score.total[2], abs=1e-5), "a by itself"


def test_a_path_may_end_at_a_specialist(pool: SpecialistPool) -> None:
    model = pool.model({"a": 1.0})
    [found] = score(model, "a stage", " loss", "path:1,3")
    strategy = PathEnsemble(model.engine, {(0, 2): 1.0})
    tokens = list(b"a stage loss")
    places = range(len(tokens) - 5, len(tokens))
    slow = [float(pooled(strategy, tokens[:place])[tokens[place]]) for place in places]
    assert found.score.logprob[0].tolist() == pytest.approx(slow, abs=1e-5)


def test_tokens_that_a_specialist_added_have_a_place(model: Model) -> None:
    [one] = score(model, "a", "b")
    text = _scored(model.session.tokenizer, "b", [98, 999], one.score, 0)
    assert text.pieces == ["b", "[999]"]
