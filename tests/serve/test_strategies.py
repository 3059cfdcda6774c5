"""Strategies of a server: which requests share one, and what each runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from topograd.decode.calibration.measure import PositionCosts
from topograd.decode.depths import strategy_of
from topograd.decode.engine import choose
from topograd.decode.sampling import Sampling, draw, probabilities
from topograd.decode.strategies import generate_batch
from topograd.errors import ConfigError
from topograd.nn.translator import Translator
from topograd.serve.scheduler import MAX_STRATEGIES, Scheduler


def test_each_text_draws_by_its_own_settings(make_desk: Callable[..., Any]) -> None:
    cache = make_desk().model.engine.new_cache()
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    settings = [Sampling(), Sampling(temperature=0.7, seed=3), Sampling(temperature=2.0, top_k=5, seed=4)]
    found = choose(logits, [cache.new(sampling) for sampling in settings])
    assert found[0] == int(logits[0].argmax())
    for row in (1, 2):
        own = torch.Generator().manual_seed(settings[row].seed)
        assert found[row] == draw(probabilities(logits[row], settings[row]), own)


def test_requests_of_one_depth_share_a_strategy(make_desk: Callable[..., Any]) -> None:
    """Drafts too, so that those of many requests are verified in one pass."""
    scheduler: Scheduler = make_desk().scheduler
    assert scheduler.strategy("full") is scheduler.strategy("full", greedy=False)
    assert scheduler.strategy("speculate:lookup") is scheduler.strategy("speculate:lookup")
    assert scheduler.strategy("speculate:2") is not scheduler.strategy("speculate:2", greedy=False)
    plan = scheduler.engine.plan
    assert scheduler.strategy("prefix:2").engine.plan is plan
    assert scheduler.strategy("path:1,3").engine.plan is not plan
    for k in range(2 * MAX_STRATEGIES):
        scheduler.strategy(f"speculate:2:{k}")
    assert len(scheduler._strategies) == MAX_STRATEGIES
    with pytest.raises(ConfigError):
        scheduler.strategy("shallow")


@pytest.mark.covers("gpt", "serve", feature="retrofit")
def test_exits_of_a_retrofit_are_served(make_desk: Callable[..., Any]) -> None:
    texts = []
    for translators in ({}, {0: Translator(16).double()}):
        for translator in translators.values():
            nn.init.normal_(translator.affine.weight)
        desk = make_desk()
        engine = desk.model.engine
        engine.translators = lambda found=translators: found
        jobs = [desk.job([1, 2, 3], 8, depth) for depth in ("full", "prefix:1")]
        desk.scheduler.add(jobs)
        desk.run()
        texts.append([desk.tokens(job) for job in jobs])
        alone = strategy_of("prefix:1", desk.session, engine)
        assert texts[-1][1] == [emitted.token for emitted in generate_batch(alone, [[1, 2, 3]], 8)[0]]
    assert texts[0][0] == texts[1][0]
    assert texts[0][1] != texts[1][1]


def test_what_a_step_runs_and_what_a_prompt_needs(make_desk: Callable[..., Any]) -> None:
    strategy = make_desk().scheduler.strategy
    depths = ("full", "prefix:2", "speculate:2", "speculate:lookup")
    assert [strategy(depth).sure_stages for depth in depths] == [[0, 1, 2, 3], [0, 1], [0], []]
    assert strategy("speculate:2").prompt_stages == [0, 1, 2, 3]
    assert strategy("prefix:1").prompt_stages == [0]


def test_drafts_stop_before_the_end_of_the_context(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    job = desk.job([100] * 8, 8, "speculate:6", logprobs=0)
    desk.scheduler.add([job])
    desk.run()
    assert desk.finish(job) == "length"
    full = desk.job([100] * 8, 8)
    desk.scheduler.add([full])
    desk.run()
    assert desk.tokens(job) == desk.tokens(full)


def test_drafts_of_many_requests_are_verified_in_one_pass(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [1, 2, 1, 2, 1], [9, 9, 9], [3, 4]]
    alone = []
    for prompt in prompts:
        job = desk.job(prompt, 6)
        desk.scheduler.add([job])
        desk.run()
        alone.append(desk.tokens(job))
    desk.scheduler._costs = PositionCosts({1: 1.0, 64: 1.1})  # drafts pay, whatever the machine does now
    layer = desk.model.engine.stack.layers[-1]
    calls: list[int] = []
    hook = layer.register_forward_pre_hook(lambda module, given: calls.append(given[0].shape[1]))
    jobs = [desk.job(prompt, 6, "speculate:lookup") for prompt in prompts]
    desk.scheduler.add(jobs)
    steps = 0
    while desk.scheduler.step():
        steps += 1
    hook.remove()
    assert [desk.tokens(job) for job in jobs] == alone
    assert len(calls) <= steps + 1, "one pass of the last stage for all texts of a step"
    assert sum(job.timings.drafted for job in jobs) > 0
