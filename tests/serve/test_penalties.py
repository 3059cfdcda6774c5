"""Bias, penalties and stop tokens of requests: exact at every depth, in company, and behind reused caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.oracles.processing import processed_greedy, stage_predictor
from topograd.decode.sampling import Sampling

PENALTIES = Sampling(logit_bias={9: 1.0}, presence_penalty=0.3, frequency_penalty=0.6, repetition_penalty=1.3)
DEPTHS = {"full": 3, "prefix:2": 1, "speculate:3": 3, "speculate:lookup": 3, "speculate:lookup+2": 3}


def test_texts_of_every_depth_are_those_of_token_by_token(make_desk: Callable[..., Any]) -> None:
    """Each prompt comes three times: the second and third begin in caches that the others left."""
    desk, prompts = make_desk(rows=3), [[1, 2, 3, 1, 2], [7, 7, 8, 9, 4, 4, 5, 6, 1, 2, 3], [5]]
    stack, plan = desk.model.engine.stack, desk.model.engine.plan
    context = desk.model.engine.context
    jobs = [
        (desk.job(prompt, 12, depth, sampling=sampling), prompt, depth, sampling)
        for _ in range(3)
        for prompt in prompts
        for depth in DEPTHS
        for sampling in (PENALTIES, Sampling())
    ]
    for job, *_ in jobs:
        desk.scheduler.add([job])
    desk.run()
    known: dict[Any, list[int]] = {}
    for job, prompt, depth, sampling in jobs:
        key = tuple(prompt), DEPTHS[depth], sampling is PENALTIES
        if key not in known:
            predict = stage_predictor(stack, plan, DEPTHS[depth])
            known[key] = processed_greedy(predict, prompt, 12, context, sampling)
        assert desk.tokens(job) == known[key], depth
    assert any(known[prompt, stage, True] != known[prompt, stage, False] for prompt, stage, _ in known)


@pytest.mark.parametrize("depth", ["full", "prefix:1", "speculate", "speculate:lookup"])
def test_a_forbidden_token_is_not_written_and_a_certain_one_is(ask: Callable[..., Any], depth: str) -> None:
    plain = ask(max_tokens=4, depth=depth, stages=True)["choices"][0]
    first = plain["tokens"][0]["id"]
    biased = ask(max_tokens=4, depth=depth, stages=True, logit_bias={str(first): -100})["choices"][0]
    assert first not in [token["id"] for token in biased["tokens"]]
    one = ask(max_tokens=3, depth=depth, stages=True, logit_bias={"65": 100})["choices"][0]
    assert [token["id"] for token in one["tokens"]] == [65] * 3


def test_penalties_end_a_loop(ask: Callable[..., Any]) -> None:
    looped = {"prompt": "a = 1\n" * 6, "max_tokens": 48, "stages": True}
    plain, changed = (
        [token["id"] for token in ask(**looped, **more)["choices"][0]["tokens"]]
        for more in ({}, {"frequency_penalty": 2.0, "depth": "speculate:lookup"})
    )
    assert len(set(changed)) > 2 * len(set(plain))
    assert changed == [
        token["id"] for token in ask(**looped, frequency_penalty=2.0, depth="full")["choices"][0]["tokens"]
    ]


def test_a_stop_token_ends_the_text_and_is_no_part_of_it(ask: Callable[..., Any]) -> None:
    whole = ask(max_tokens=8, stages=True)["choices"][0]
    ids, texts = ([token[name] for token in whole["tokens"]] for name in ("id", "text"))
    place = next(i for i in range(2, 8) if ids[i] not in ids[:i])
    for more in ({}, {"ignore_eos": True}, {"depth": "speculate:lookup"}):
        cut = ask(max_tokens=8, stop_token_ids=[ids[place]], **more)["choices"][0]
        assert cut["text"] == "".join(texts[:place])
        assert cut["finish_reason"] == "stop"


def test_several_texts_with_speculation(ask: Callable[..., Any]) -> None:
    fields = {"n": 3, "max_tokens": 12, "frequency_penalty": 0.5}
    texts = [choice["text"] for choice in ask(**fields, depth="speculate:lookup")["choices"]]
    assert texts == [choice["text"] for choice in ask(**fields, depth="full")["choices"]]
    assert len(set(texts)) == 1
    drawn = ask(**fields | {"temperature": 1.0, "seed": 5}, depth="speculate:lookup")["choices"]
    assert len({choice["text"] for choice in drawn}) == 3, "each has a seed of its own"


def test_a_bias_of_a_token_that_the_model_does_not_have_is_refused(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "logit_bias": {"999999": 1}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logit_bias"
