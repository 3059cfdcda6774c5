"""lm-eval asks a run as it asks its own models, and gets the scores that we compute, item by item."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from local_task import QUESTIONS, samples_of
from topograd.decode.model import Model
from topograd.evaluation.texts import score

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; the extra `eval` brings it")

from topograd.evaluation.lm_eval_adapter import RunLM


class Request:
    def __init__(self, *args: Any) -> None:
        self.args = args


@pytest.mark.parametrize("depth", ["full", "prefix:1"])
def test_likelihoods_are_our_scores(model: Model, depth: str) -> None:
    pairs = [(q["query"], f" {choice}") for q in QUESTIONS for choice in q["choices"]]
    found = RunLM(model, depth).loglikelihood([Request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, text), (total, greedy) in zip(pairs, found, strict=True):
        [one] = score(model, context, text, depth)
        assert total == pytest.approx(one.score.total[0], rel=1e-12)
        assert greedy == bool(one.score.greedy.all())


def test_an_empty_context_and_a_long_one(model: Model) -> None:
    adapter = RunLM(model)
    long = "relay " * 9
    requests = [Request("", "loss"), Request(long, "loss")]
    (empty, _), (cut, _) = adapter.loglikelihood(requests, disable_tqdm=True)
    assert empty == pytest.approx(score(model, "", "loss")[0].score.total[-1])
    assert cut == pytest.approx(score(model, long, "loss")[0].score.total[-1])
    assert adapter.cut == 1


def test_a_whole_text_is_scored_window_by_window(model: Model) -> None:
    text = "stage of loss and relay of stage"
    [total] = RunLM(model).loglikelihood_rolling([Request(text)], disable_tqdm=True)
    tokens = model.encode(text)
    # lm-eval's windows: 16 tokens behind the separator, then the rest behind as much as fits.
    first = model.logits([model.session.tokenizer.separator, *tokens[:15]]).log_softmax(-1)
    slow = sum(float(first[i, t]) for i, t in enumerate(tokens[:16]))
    second = model.logits(tokens[15:31]).log_softmax(-1)
    slow += sum(float(second[i, t]) for i, t in enumerate(tokens[16:32]))
    assert total == pytest.approx(slow, rel=1e-9)


def test_text_is_written_until_a_stop(model: Model) -> None:
    [text] = RunLM(model).generate_until([Request("stage", {"until": ["zzz"], "max_gen_toks": 5})])
    assert text == model.generate("stage", 5, depth="full")


@pytest.mark.filterwarnings("ignore")
def test_a_local_task_agrees_to_the_item(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    samples, accuracy = samples_of(RunLM(model), tmp_path)
    assert len(samples) == len(QUESTIONS)
    right = []
    for question, sample in zip(QUESTIONS, samples, strict=True):
        each = score(model, str(question["query"]), [f" {choice}" for choice in question["choices"]])
        totals = [one.score.total[-1] for one in each]
        assert [float(answer[0][0]) for answer in sample["resps"]] == pytest.approx(totals, rel=1e-12)
        right.append(totals.index(max(totals)) == question["gold"])
    assert accuracy == pytest.approx(sum(right) / len(right))
