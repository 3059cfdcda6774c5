"""Leaving early against a slow loop that reads the window again at every stage; the memory stays exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from raising import refused
from tests.oracles.decoding import moved, next_logits
from topograd.decode.engine import Emitted, Engine
from topograd.decode.sampling import Sampling, draw, probabilities
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.decode.wand import FEW, Wand
from topograd.errors import ConfigError, DivergenceError
from topograd.exec.forward import stage_outputs
from topograd.nn.gpt import GPT
from topograd.nn.stack import Stack
from topograd.topology.dag import Topology

CONTEXT, LAST, TOKENS = 24, 3, 30
NEVER = (math.inf,) * LAST
PROMPT = [3, 1, 4]


def slow(
    model: GPT, engine: Engine, thresholds: Sequence[float], sampling: Sampling | None = None
) -> list[Emitted]:
    """Tokens and the stages that wrote them, everything recomputed for each."""
    sampling = sampling or Sampling()
    generator = torch.Generator().manual_seed(sampling.seed)
    window, emitted = list(PROMPT), []
    for _ in range(TOKENS):
        for stage, tau in enumerate([*thresholds, -math.inf]):
            z = next_logits(model, engine.plan, window, stage)
            first, second = z.sort(descending=True).values[:2].tolist()
            if first - second > tau:
                break
        token = int(z.argmax()) if sampling.greedy else draw(probabilities(z, sampling), generator)
        emitted.append(Emitted(token, stage))
        window = moved(window, token, CONTEXT)
    return emitted


def run(wand: Wand, prompt: Sequence[int] = PROMPT, sampling: Sampling | None = None) -> list[Emitted]:
    return generate_batch(wand, [prompt], TOKENS, sampling)[0]


def test_infinite_thresholds_are_full_depth(engine: Engine, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        assert run(Wand(engine, NEVER), prompt) == generate_batch(FixedDepth(engine), [prompt], TOKENS)[0]


@pytest.mark.parametrize("tau", [-1.0, -math.inf])
def test_thresholds_below_every_margin_are_the_first_stage(
    engine: Engine, visits_of: Callable[[Stack], Any], tau: float
) -> None:
    visits = visits_of(engine.stack)
    assert (
        run(Wand(engine, (tau, math.inf, math.inf)))
        == generate_batch(FixedDepth(engine, 0), [PROMPT], TOKENS)[0]
    )
    assert visits.calls[1:] == [[], [], []], "nothing deeper runs"
    assert (
        run(Wand(engine, (math.inf, tau, 0.0))) == generate_batch(FixedDepth(engine, 1), [PROMPT], TOKENS)[0]
    )


@pytest.mark.parametrize(
    "thresholds", [(1.0, 0.8, 0.5), (0.7, math.inf, 0.4), (math.inf, 0.6, math.inf), (0.4, 0.2, 0.1)], ids=str
)
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.9, seed=4)], ids=["greedy", "sampled"])
def test_tokens_and_stages_are_those_of_the_slow_loop(
    mild: GPT, mild_engine: Engine, thresholds: tuple[float, ...], sampling: Sampling | None
) -> None:
    expected = slow(mild, mild_engine, thresholds, sampling)
    assert len({emitted.exit for emitted in expected}) > 1, "one stage alone would show little"
    assert run(Wand(mild_engine, thresholds), sampling=sampling) == expected


def test_leaving_early_is_approximate(mild_engine: Engine) -> None:
    """What it is not: the text of full depth."""
    early = [emitted.token for emitted in run(Wand(mild_engine, (0.2, 0.2, 0.2)))]
    assert early != [emitted.token for emitted in run(Wand(mild_engine, NEVER))]


@torch.inference_mode()
def test_the_memory_is_that_of_the_full_model(mild: GPT, mild_engine: Engine) -> None:
    """Also behind tokens that left early, and after the context was full."""
    wand, batch = Wand(mild_engine, (0.5, 0.5, 1.0)), mild_engine.start([PROMPT])
    (sequence,), cache = batch, batch[0].cache
    for steps in (11, 13):
        pending, exits = [], set()
        for _ in range(steps):
            exits.add(wand.step(batch)[0][0].exit)
            pending.append(cache.pending(sequence, LAST))
        assert len(exits) > 1
        assert max(pending) > 1
        cache.run(batch, LAST)
        n = len(sequence)
        full = mild_engine.start([sequence.tokens])
        mild_engine.run(full, LAST)
        whole = stage_outputs(mild, mild_engine.plan, torch.tensor([sequence.tokens]), range(4))
        for stage in range(4):
            close(cache.hidden(batch, stage, [n]), whole[stage][0])
            for own, other in zip(cache.stages[stage].slots, full[0].cache.stages[stage].slots, strict=True):
                assert own is not None
                assert other is not None
                for mine, theirs in ((own.keys, other.keys), (own.values, other.values)):
                    a, b = (
                        s.rooms[p.place.room][p.place.slot] for s, p in ((mine, sequence), (theirs, full[0]))
                    )
                    close(a[:, :n], b[:, :n])
    assert n < len(PROMPT) + 24, "the older half was forgotten once"


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * b.abs().max().item())


@torch.inference_mode()
def test_a_queue_runs_as_one_batch_when_a_token_goes_deeper(
    mild_engine: Engine, visits_of: Callable[[Stack], Any]
) -> None:
    visits, wand = visits_of(mild_engine.stack), Wand(mild_engine, (1.0, math.inf, math.inf))
    batch = mild_engine.start([PROMPT])
    stages: list[int] = []
    deep: list[list[int]] = []
    for step in range(20):
        visits.clear()
        waiting = len(PROMPT) + step - sum(map(len, deep))
        stages.append(wand.step(batch)[0][0].exit)
        assert visits.calls[0] == [[list(range(len(PROMPT)) if not step else [len(PROMPT) + step - 1])]]
        assert visits.calls[1] == visits.calls[2] == visits.calls[3]
        deep += [call[0] for call in visits.calls[3]]
        assert len(visits.calls[3]) == (stages[-1] == LAST)
        assert stages[-1] == 0 or len(deep[-1]) == waiting
    assert set(stages) == {0, LAST}
    assert max(map(len, deep[1:])) > 1
    assert [p for call in deep for p in call] == list(range(sum(map(len, deep)))), "no position twice"


class Spy:
    """Counts how often the head is read for a few candidates only."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        readout = engine.stack.readout

        def spied(h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
            if rows is not None:
                self.sizes.append(len(rows))
            return readout(h, stage, rows)

        monkeypatch.setattr(engine.runtime, "readout", spied)


THRESHOLDS = (1.5, 1.5, math.inf)


def largest_gain(model: GPT, engine: Engine, emitted: Sequence[Emitted]) -> tuple[float, ...]:
    """For each exit stage the most that a rival gained on its leader until the last stage, on this text."""
    window, gains = list(PROMPT), [0.0] * LAST
    for token in emitted:
        z = [next_logits(model, engine.plan, window, stage) for stage in range(4)]
        for stage in range(LAST):
            gain = z[LAST] - z[stage]
            gains[stage] = max(gains[stage], float(gain.max() - gain[z[stage].argmax()]))
        window = moved(window, token.token, CONTEXT)
    return tuple(gains)


def test_pruning_with_a_bound_that_holds_changes_no_token(
    make_gpt: Callable[..., GPT], make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_gpt(later=0.05)
    engine = make_engine(model)
    expected = run(Wand(engine, THRESHOLDS))
    assert expected == slow(model, engine, THRESHOLDS)
    gains = largest_gain(model, engine, expected)
    spy = Spy(engine, monkeypatch)
    assert run(Wand(engine, THRESHOLDS, bounds=(1e9,) * LAST)) == expected
    assert spy.sizes == [], "nothing can be dropped, so the whole head is read"
    assert run(Wand(engine, THRESHOLDS, bounds=tuple(1.001 * gain for gain in gains))) == expected
    assert spy.sizes, "some tokens were chosen among few"
    assert max(spy.sizes) * FEW <= 50
    assert max(spy.sizes) > 1


def test_pruning_with_a_bound_of_nothing_keeps_the_leader(mild: GPT, mild_engine: Engine) -> None:
    """It shows that pruning decides: with a bound that does not hold, the text differs."""
    pruned = run(Wand(mild_engine, (math.inf, 1e9, math.inf), bounds=(1e9, 0.0, 1e9)))
    assert [e.token for e in pruned] == [
        e.token for e in generate_batch(FixedDepth(mild_engine, 1), [PROMPT], TOKENS)[0]
    ]
    assert {e.exit for e in pruned} == {LAST}
    assert pruned != run(Wand(mild_engine, NEVER))


def test_nothing_is_pruned_where_tokens_are_drawn(
    mild: GPT, mild_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, spy = Sampling(temperature=0.9, seed=4), Spy(mild_engine, monkeypatch)
    found = run(Wand(mild_engine, THRESHOLDS, bounds=(0.0,) * LAST), sampling=sampling)
    assert found == slow(mild, mild_engine, THRESHOLDS, sampling)
    assert spy.sizes == []


def test_a_stack_without_memory_writes_the_same(engine: Engine, forgetful: Engine) -> None:
    assert run(Wand(forgetful, THRESHOLDS)) == run(Wand(engine, THRESHOLDS))


@pytest.mark.parametrize("thresholds", [(), (1.0, 1.0), (1.0,) * 4], ids=len)
def test_thresholds_of_the_wrong_number_are_refused(engine: Engine, thresholds: tuple[float, ...]) -> None:
    with refused(ConfigError, setting="thresholds", given=list(thresholds)):
        Wand(engine, thresholds)


@pytest.mark.parametrize("bounds", [(), (1.0,), (1.0,) * 4], ids=len)
def test_bounds_of_the_wrong_number_are_refused(engine: Engine, bounds: tuple[float, ...]) -> None:
    with refused(ConfigError, setting="bounds", given=list(bounds)):
        Wand(engine, NEVER, bounds=bounds)


def test_stages_that_do_not_predict_are_no_exits(gpt: GPT, make_engine: Callable[..., Engine]) -> None:
    """Of four stages three predict; a token that leaves after the second exit has run the third stage."""
    silent = make_engine(gpt, Topology.soft([0.0, 1.0, 0.0]))
    with refused(ConfigError, setting="thresholds"):
        Wand(silent, (1.0, 1.0, 1.0))
    found = run(Wand(silent, (math.inf, -math.inf)))
    window = list(PROMPT)
    for emitted in found:
        assert emitted == Emitted(int(next_logits(gpt, silent.plan, window, 2).argmax()), 1)
        window = moved(window, emitted.token, CONTEXT)
    assert found != run(Wand(silent, (-math.inf, math.inf)))


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.9, seed=4)], ids=["greedy", "sampled"])
def test_sequences_together_write_what_each_writes_alone(
    mild_engine: Engine, prompts: list[list[int]], sampling: Sampling | None
) -> None:
    wand = Wand(mild_engine, (0.7, 0.5, 0.4))
    together = generate_batch(wand, prompts, TOKENS, sampling)
    for row, prompt in enumerate(prompts):
        own = None if sampling is None else sampling.shifted(row)
        assert together[row] == run(wand, prompt, own)
    assert len({tuple(e.exit for e in row) for row in together}) > 1, "their exits differ"


@torch.inference_mode()
def test_those_that_have_not_left_share_each_later_stage(
    mild_engine: Engine, prompts: list[list[int]], visits_of: Callable[[Stack], Any]
) -> None:
    visits, wand = visits_of(mild_engine.stack), Wand(mild_engine, (0.7, 0.5, 0.4))
    batch = mild_engine.start(prompts)
    deep = 0
    for _ in range(12):
        visits.clear()
        exits = [row[0].exit for row in wand.step(batch)]
        assert all(len(calls) == (max(exits) >= layer) for layer, calls in enumerate(visits.calls))
        deep += sum(exit_ == LAST for exit_ in exits) > 1
    assert deep, "several went to the end in one pass"


@pytest.mark.parametrize("thresholds", [NEVER, (0.0, 0.0, 0.0)], ids=["full", "early"])
def test_logits_that_are_not_finite_are_refused(
    make_gpt: Callable[..., GPT], make_engine: Callable[..., Engine], thresholds: tuple[float, ...]
) -> None:
    model = make_gpt()
    with torch.no_grad():
        model.head.weight[3] = math.nan
    with refused(DivergenceError, setting="logits"):
        generate_batch(Wand(make_engine(model), thresholds), [[1, 2]], 1)


def test_a_pruned_last_head_that_is_not_finite_is_refused(
    make_gpt: Callable[..., GPT], make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exits are finite, so nothing shows before the few candidates are read."""
    model = make_gpt(heads_of_their_own=4)
    with torch.no_grad():
        for parameter in model.head_parameters(LAST):
            parameter.fill_(math.nan)
    engine = make_engine(model)
    spy = Spy(engine, monkeypatch)
    with refused(DivergenceError, setting="logits"):
        generate_batch(Wand(engine, (1e9, math.inf, math.inf), bounds=(0.0,) * LAST), [[1, 2]], 1)
    assert spy.sizes == [1]
