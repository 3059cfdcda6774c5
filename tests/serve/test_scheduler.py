"""Texts that join and leave write what each writes alone; order, limits, prefixes, cancelling, failures."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.oracles.decoding import next_logits
from topograd.decode.depths import strategy_of
from topograd.decode.sampling import Sampling
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.errors import DivergenceError
from topograd.serve.jobs import Job

DEPTHS = ("full", "prefix:1", "prefix:3", "speculate:3", "speculate:lookup", "path:1,3", "branches:1-4*2+1-2")


def alone(desk: Any, job: Job) -> list[int]:
    """What the mode writes without company, by the loop that `generate` uses."""
    strategy = strategy_of(job.depth, desk.session, desk.model.engine, job.sampling.greedy)
    (row,) = generate_batch(strategy, [job.prompt], job.tokens, job.sampling)
    return [emitted.token for emitted in row]


@pytest.mark.parametrize("seed", range(3))
def test_answers_do_not_depend_on_who_else_is_there(make_desk: Callable[..., Any], seed: int) -> None:
    """Random depths, samplings, lengths and arrivals, more texts than rows, prompts in pieces: float64."""
    desk, dice = make_desk(rows=3, chunk=3), random.Random(seed)
    jobs = []
    for _ in range(14):
        prompt = [dice.randrange(97, 110) for _ in range(dice.randint(1, 9))]
        depth, drawn = dice.choice(DEPTHS), Sampling(temperature=0.9, top_k=20, seed=dice.randrange(99))
        if dice.random() < 0.5 or depth in ("speculate", "speculate:lookup"):
            drawn = Sampling()  # how many lookups pay depends on the company; then other numbers are drawn
        jobs.append(desk.job(prompt, dice.randint(1, 7), depth, sampling=drawn))
    for job in jobs:
        desk.scheduler.add([job])
        for _ in range(dice.randint(0, 3)):
            desk.scheduler.step()
            assert len(desk.scheduler.active) <= 3
    desk.run()
    for job in jobs:
        assert desk.finish(job) == "length"
        assert desk.tokens(job) == alone(desk, job), job.depth
    assert len({tuple(desk.tokens(job)) for job in jobs}) > 5


def test_a_prompt_in_common_is_computed_once(make_desk: Callable[..., Any]) -> None:
    desk = make_desk(rows=2, chunk=4)
    system = list(range(97, 107))
    first, second = desk.job([*system, 120], 3), desk.job([*system, 121], 3)
    desk.scheduler.add([first, second])
    desk.run()
    third = desk.job([*system, 122], 2, "prefix:2")
    desk.scheduler.add([third])
    desk.run()
    assert first.timings.cached == 0
    assert second.timings.cached >= 8, "copied from the row that was still busy"
    assert third.timings.cached >= 10, "left behind by a text that had ended"
    for job in (first, second, third):
        assert desk.tokens(job) == alone(desk, job)


def test_scores_are_the_models_log_probabilities(make_desk: Callable[..., Any]) -> None:
    desk = make_desk(rows=2, chunk=4)
    prompt = [100, 101, 99, 104, 98, 99, 100]
    for depth, stage in (("full", 3), ("prefix:2", 1), ("speculate:3", 3)):
        job = desk.job(prompt, 4, depth, logprobs=3, score_prompt=True)
        desk.scheduler.add([job])
        desk.run()
        told = desk.told[job.number]
        written = [w for progress in told for w in progress.written]
        (scores,) = [progress.prompt for progress in told if progress.prompt is not None]
        text = [*prompt, *(w.token for w in written)]
        everything = [*scores, *(w.score for w in written)]
        assert everything[0] is None
        for place in range(1, len(text)):
            z = next_logits(desk.session.stack, desk.session.plan, text[:place], stage).log_softmax(-1)
            assert everything[place].logprob == pytest.approx(float(z[text[place]]), abs=1e-9)
            best = z.topk(3)
            assert [t for t, _ in everything[place].top] == best.indices.tolist()


def test_a_prompt_of_one_token_and_drafts_that_nobody_asked_for(make_desk: Callable[..., Any]) -> None:
    desk = make_desk(rows=1)
    short = desk.job([100], 0, logprobs=1, score_prompt=True)
    desk.scheduler.add([short])
    desk.run()
    assert [p.prompt for p in desk.told[short.number] if p.prompt is not None] == [(None,)]
    for tokens in (1, 2, 3, 6):
        job = desk.job([100, 101, 99, 100, 101, 99, 100, 101, 99], tokens, "speculate:lookup")
        desk.scheduler.add([job])
        desk.run()
        assert 0 <= job.timings.accepted <= min(job.timings.drafted, tokens)


def test_candidates_of_every_stage(make_desk: Callable[..., Any]) -> None:
    desk = make_desk(rows=1, chunk=4)
    prompt = [100, 101, 99, 104, 98]
    job = desk.job(prompt, 0, candidates=2)
    desk.scheduler.add([job])
    desk.run()
    (stages,) = [p.candidates for p in desk.told[job.number] if p.candidates is not None]
    assert [len(stage) for stage in stages] == [4] * 4
    for k, stage in enumerate(stages):
        z = next_logits(desk.session.stack, desk.session.plan, prompt[:3], k).log_softmax(-1)
        assert stage[2].logprob == pytest.approx(float(z[prompt[3]]), abs=1e-9)
        assert stage[2].top[0][0] == int(z.argmax())


def test_a_request_of_many_texts_does_not_keep_out_others(make_desk: Callable[..., Any]) -> None:
    desk = make_desk(rows=1)
    many = [desk.job([100 + k], 1) for k in range(6)]
    desk.scheduler.add(many)
    desk.scheduler.step()
    late = desk.job([120], 1)
    desk.scheduler.add([late])
    order: list[Job] = []
    while desk.scheduler.step():
        order += [job for job in [*many, late] if desk.finish(job) == "length" and job not in order]
    place = order.index(late)
    assert place < 4, "it does not wait for all of them"
    assert len(order) == 7, "and they are not starved"


def test_a_long_prompt_stalls_nobody(make_desk: Callable[..., Any]) -> None:
    desk = make_desk(rows=3, chunk=4)
    quick = desk.job([100], 10)
    desk.scheduler.add([quick])
    desk.scheduler.step()
    long, short = desk.job([101] * 14, 1), desk.job([102, 103], 2)
    desk.scheduler.add([long])
    desk.scheduler.add([short])
    before = len(desk.tokens(quick))
    for _ in range(3):
        desk.scheduler.step()
    assert len(desk.tokens(quick)) == before + 3, "a token in every step"
    assert desk.finish(short) == "length", "it did not wait for the long prompt"
    assert long.prompt_pos < 14
    desk.run()
    assert desk.tokens(long) == alone(desk, long)


def test_a_shallow_text_does_not_go_at_the_pace_of_a_deep_one(make_desk: Callable[..., Any]) -> None:
    desk = make_desk(rows=3)
    deep, half, shallow = (desk.job([100], 8, depth) for depth in ("full", "prefix:2", "prefix:1"))
    desk.scheduler.add([deep, half, shallow])
    desk.scheduler.step()
    assert [len(desk.tokens(job)) for job in (deep, half, shallow)] == [1, 2, 4]
    desk.run()
    for job in (deep, half, shallow):
        assert desk.tokens(job) == alone(desk, job)


def test_cancelled_late_and_stopped_texts_leave_their_rows(make_desk: Callable[..., Any]) -> None:
    desk = make_desk(rows=2)
    stays, goes, late = desk.job([100], 6), desk.job([101], 6), desk.job([102], 6)
    waits = desk.job([103], 6)
    desk.scheduler.add([stays, goes])
    desk.scheduler.step()
    goes.cancelled = True
    desk.scheduler.add([late])
    desk.scheduler.step()
    assert desk.finish(goes) == "cancelled"
    late.deadline = time.perf_counter() - 1
    desk.scheduler.step()
    assert desk.finish(late) == "error"
    assert desk.told[late.number][-1].status == 504
    desk.scheduler.add([desk.job([104], 6), waits])
    desk.scheduler.step()
    desk.scheduler.stop()
    assert [desk.finish(job) for job in (stays, waits)] == ["cancelled", "cancelled"]
    assert not desk.scheduler.active
    assert all(not slot.busy for slot in desk.scheduler.base.slots)
    assert desk.scheduler.counters.finishes["cancelled"] == 4, "one that had no row yet counts too"
    again = desk.job([105], 3)
    desk.scheduler.add([again])
    desk.run()
    assert desk.tokens(again) == alone(desk, again)


def test_unknown_depths_and_failures_end_one_text_only(
    make_desk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = make_desk(rows=4)
    wrong, good = desk.job([100], 3, "deep"), desk.job([101], 3)
    desk.scheduler.add([wrong])
    assert desk.told[wrong.number][-1].status == 400
    assert "deep" in desk.told[wrong.number][-1].error
    for depth, why in [("wand", "RUN is not calibrated"), ("speculate:draft", "RUN has no draft stage")]:
        desk.scheduler.add([uncalibrated := desk.job([100], 3, depth)])
        assert why in desk.told[uncalibrated.number][-1].error
        assert str(desk.session.run.folder) not in desk.told[uncalibrated.number][-1].error
    bad = desk.job([102], 3, "prefix:1")
    desk.scheduler.add([good])
    desk.scheduler.add([bad])
    plain = FixedDepth.step

    def step(strategy: FixedDepth, batch: Any) -> Any:
        if strategy.exit == 0:
            raise error
        return plain(strategy, batch)

    monkeypatch.setattr(FixedDepth, "step", step)
    error: Exception = RuntimeError("/secret/path")
    desk.run()
    assert desk.tokens(good) == alone(desk, good)
    assert desk.finish(bad) == "error"
    assert "secret" not in desk.told[bad.number][-1].error
    assert "secret" in capsys.readouterr().err, "the log has it"
    error, bad = DivergenceError("not finite"), desk.job([103], 3, "prefix:1")
    desk.scheduler.add([bad])
    desk.run()
    assert desk.told[bad.number][-1].error == "not finite"


def test_stops_ends_and_text(make_desk: Callable[..., Any]) -> None:
    desk = make_desk(rows=2)
    plain = desk.job([100, 101], 8)
    desk.scheduler.add([plain])
    desk.run()
    tokens = desk.tokens(plain)
    ended = desk.job([100, 101], 8, stop_ids=frozenset([tokens[4]]))
    desk.scheduler.add([ended])
    desk.run()
    assert desk.tokens(ended) == tokens[: tokens.index(tokens[4]) + 1]
    assert desk.finish(ended) == "stop"
    assert [(w.text, w.end) for w in desk.told[ended.number][-1].written] == [("", True)]


def test_memory_of_rows_is_bounded(make_desk: Callable[..., Any]) -> None:
    """Rows of other plans give way, and never are there more rows than allowed."""
    desk = make_desk(rows=3)
    for turn in range(12):
        depth = ("full", "path:1,3", "branches:1-4*2+1-2", f"branches:1-2*{turn + 1}")[turn % 4]
        desk.scheduler.add([desk.job([100 + turn], 2, depth)])
        desk.run()
        pools = list(desk.scheduler._pools.values())
        assert sum(len(pool.slots) for pool in pools) <= 3
        assert len(pools) <= 4


def test_inference_mode_is_left(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    desk.scheduler.add([desk.job([100], 1)])
    desk.run()
    assert not torch.is_inference_mode_enabled()
