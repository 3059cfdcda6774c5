"""What the server says of a prompt's tokens is what `score` says, also through lm-eval's own client."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from local_task import QUESTIONS, samples_of
from topograd.evaluation.scoring import Scorer, TokenRow
from topograd.evaluation.texts import score
from topograd.serve.scheduler import scores
from topograd.serve.server import Running
from topograd.serve.texts import ServedModel

ROUNDING = 2e-4
"""The server and `score` cut batches otherwise; the reference model is float32."""


def test_a_token_is_scored_by_the_log_softmax() -> None:
    z = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = scores(z, [1, 0, 6], 2)
    expected = z.log_softmax(-1)
    assert [each.logprob for each in found] == pytest.approx(
        [float(expected[i, t]) for i, t in enumerate((1, 0, 6))]
    )
    assert [token for token, _ in found[0].top] == z[0].topk(2).indices.tolist()


@pytest.mark.covers("gpt", "serve", feature="scores")
@pytest.mark.parametrize("depth", ["full", "prefix:1", "path:1,3", "branches:1-4*3+1-2"])
def test_echo_with_logprobs_is_score(
    ask: Callable[..., dict[str, Any]], served: ServedModel, depth: str
) -> None:
    tokens = served.encode("def read(self, size=-1):\n    return self.")
    answer = ask(prompt=tokens, echo=True, logprobs=1, max_tokens=0, depth=depth)["choices"][0]["logprobs"]
    [[found]] = Scorer(served.model.engine, depth).score([[TokenRow(tokens, 1)]])
    assert answer["token_logprobs"][0] is None
    assert answer["token_logprobs"][1:] == pytest.approx(found.logprob[0].tolist(), abs=ROUNDING)


@pytest.mark.filterwarnings("ignore")
def test_lm_evals_local_completions_agrees_to_the_item(
    running: Running, served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lm_eval", reason="lm-eval is not installed; the extra `eval` brings it")
    pytest.importorskip("datasets")
    pytest.importorskip("tenacity", reason="lm-eval's clients of servers need tenacity")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    client = LocalCompletionsAPI(
        model="reference", base_url=f"{running.address()}/v1/completions", max_length=200
    )
    assert client.tokenizer_backend == "remote", "it asks the server for tokens"
    samples, accuracy = samples_of(client, tmp_path)
    right = []
    for question, sample in zip(QUESTIONS, samples, strict=True):
        each = score(served.model, question["query"], [f" {choice}" for choice in question["choices"]])
        totals = [one.score.total[-1] for one in each]
        assert [float(answer[0][0]) for answer in sample["resps"]] == pytest.approx(totals, abs=ROUNDING)
        greedy = [bool(one.score.greedy[-1].all()) for one in each]
        assert [str(answer[0][1]) == "True" for answer in sample["resps"]] == greedy
        right.append(totals.index(max(totals)) == question["gold"])
    assert accuracy == pytest.approx(sum(right) / len(right))
