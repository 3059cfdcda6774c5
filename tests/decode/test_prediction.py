"""Every mode predicts as the plan says: sums, pools, decoders and paths, against terms written by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import written
from tests.oracles.decoding import moved, next_logits
from topograd.data.windows import Text
from topograd.decode.calibration.measure import exit_readings
from topograd.decode.drafters import DraftRule
from topograd.decode.engine import Emitted, Engine, check_exits
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import DecodeStrategy, FixedDepth, PathEnsemble, generate_batch
from topograd.decode.wand import FEW, Wand
from topograd.errors import ConfigError, StackError, TopologyError
from topograd.nn.gpt import GPT
from topograd.nn.stack import Stack
from topograd.topology.dag import EMBEDDING, Topology
from topograd.topology.plan import Plan

CONTEXT, VOCAB, TOKENS = 24, 50, 26
CHAIN = Topology.chain("1,1,1,1")
RESIDUAL = Topology.chain("1,1,1,1", objective="residual")
Terms = Mapping[int, float]


@dataclass(frozen=True)
class Case:
    """A topology over four layers, and by which stages each of its exits predicts."""

    topology: Topology
    exits: Sequence[Terms]


CASES = {
    "last": Case(CHAIN, [{k: 1.0} for k in range(4)]),
    "residual": Case(RESIDUAL, [dict.fromkeys(range(k + 1), 1.0) for k in range(4)]),
    "residual by its last": Case(replace(RESIDUAL, prediction="last"), [{k: 1.0} for k in range(4)]),
    "sum": Case(replace(CHAIN, prediction="sum"), [dict.fromkeys(range(k + 1), 1.0) for k in range(4)]),
    "mean": Case(
        replace(CHAIN, prediction="mean"), [dict.fromkeys(range(k + 1), 1 / (k + 1)) for k in range(4)]
    ),
    "weights": Case(
        replace(CHAIN, prediction=(1.0, 0.0, 0.5, 0.5)),
        [{0: 2.0}, {0: 2.0}, {0: 4 / 3, 2: 2 / 3}, {0: 1.0, 2: 0.5, 3: 0.5}],
    ),
    "a weight behind": Case(
        replace(CHAIN, prediction=(0.0, 0.0, 0.0, 1.0)), [{0: 1.0}, {1: 1.0}, {2: 1.0}, {3: 1.0}]
    ),
    "forest": Case(Topology.forest(["1,1", "2"]), [{0: 1.0}, {1: 1.0}, {1: 0.5, 2: 0.5}]),
    "cover": Case(Topology.cover([(0, 3), (2, 4)]), [{0: 1.0}, {0: 0.5, 1: 0.5}]),
    "soft": Case(Topology.soft([0.0, 1.0, 0.0]), [{0: 1.0}, {2: 1.0}, {3: 1.0}]),
    "decoders": Case(Topology.chain("1,1").with_decoders(1), [{1: 1.0}, {3: 1.0}]),
    "residual decoders": Case(
        Topology.chain("1,1", objective="residual").with_decoders(1), [{1: 1.0}, {1: 1.0, 3: 1.0}]
    ),
    "residual with a layer context": Case(
        Topology.chain("2,1,1", objective="residual").with_input_bus(),
        [{0: 1.0}, {0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0}],
    ),
}
TOGETHER = [name for name, case in CASES.items() if any(len(terms) > 1 for terms in case.exits)]


def tokens_of(
    mode: DecodeStrategy, prompts: Sequence[Sequence[int]], tokens: int = TOKENS
) -> list[list[int]]:
    return [[emitted.token for emitted in row] for row in generate_batch(mode, prompts, tokens)]


@torch.no_grad()
def alone(gpt: GPT, plan: Plan, window: Sequence[int]) -> list[Tensor]:
    """Each stage's own logits behind the window, everything computed anew; every relay is the identity."""
    inputs = torch.tensor([list(window)])
    x0 = gpt.embed(inputs)
    ctx = gpt.layer_context(x0, inputs)
    after: dict[tuple[int, int], Tensor] = {(EMBEDDING, 0): x0}
    found = []
    for planned in plan.stages:
        h = torch.stack([after[port.source, port.layer] for port, _ in planned.inputs]).sum(0)
        for layer in planned.layers:
            h = gpt.layers[layer](h, ctx)
            after[planned.index, layer + 1] = h
        found.append(gpt.readout(h[0, -1], planned.index))
    return found


def weighed(each: Sequence[Tensor], terms: Terms) -> Tensor:
    return torch.stack([weight * each[stage] for stage, weight in terms.items()]).sum(0)


def slow_logits(gpt: GPT, plan: Plan, window: Sequence[int], terms: Terms) -> Tensor:
    """Σ w z behind the window."""
    return weighed(alone(gpt, plan, window), terms)


def slow_text(gpt: GPT, plan: Plan, prompt: Sequence[int], terms: Terms, tokens: int = TOKENS) -> list[int]:
    window, written = list(prompt[-CONTEXT:]), []
    for _ in range(tokens):
        written.append(int(slow_logits(gpt, plan, window, terms).argmax()))
        window = moved(window, written[-1], CONTEXT)
    return written


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_prefix_predicts_by_the_terms_of_its_exit(
    gpt: GPT, make_engine: Callable[..., Engine], case: Case
) -> None:
    engine = make_engine(gpt, case.topology)
    assert engine.last == len(case.exits) - 1
    for place, terms in enumerate(case.exits):
        expected = [slow_text(gpt, engine.plan, prompt, terms, 6) for prompt in ([1, 2], [3])]
        assert tokens_of(FixedDepth(engine, place), [[1, 2], [3]], 6) == expected
    assert tokens_of(FixedDepth(engine), [[1, 2], [3]], 6) == expected, "the last exit is the model"


@pytest.mark.parametrize("name", TOGETHER)
def test_what_a_model_predicts_is_not_its_last_stage(
    gpt: GPT, make_engine: Callable[..., Engine], name: str
) -> None:
    """D1, and that the comparisons of this file can fail."""
    engine = make_engine(gpt, CASES[name].topology)
    alone = slow_text(gpt, engine.plan, [1, 2], {engine.exits[-1]: 1.0})
    assert tokens_of(FixedDepth(engine), [[1, 2]]) != [alone]


@torch.inference_mode()
@pytest.mark.parametrize("name", ["residual", "forest", "weights", "residual decoders"])
def test_logits_of_ragged_rows_at_several_positions_and_of_few_tokens(
    gpt: GPT, make_engine: Callable[..., Engine], name: str
) -> None:
    engine = make_engine(gpt, CASES[name].topology)
    rows, last, chosen = [[1, 2, 3, 4], [5, 6]], engine.exits[-1], torch.tensor([7, 3, 40])
    cache = engine.start(rows)
    engine.run(cache, last)
    z = engine.logits(cache, last, [3, 2])
    assert z.shape == (5, VOCAB)
    for row, window in enumerate(rows):
        count = (3, 2)[row]
        for place in range(count):
            some = window[: len(window) - count + place + 1]
            expected = slow_logits(gpt, engine.plan, some, CASES[name].exits[-1])
            torch.testing.assert_close(z[3 * row + place], expected, rtol=0, atol=1e-10)
    few = engine.logits(cache, last, [3, 2], chosen)
    torch.testing.assert_close(few, z[:, chosen], rtol=0, atol=1e-12)


# Leaving early.


def slow_wand(gpt: GPT, plan: Plan, exits: Sequence[Terms], thresholds: Sequence[float]) -> list[Emitted]:
    window, emitted = [3, 1, 4], []
    for _ in range(TOKENS):
        each = alone(gpt, plan, window)
        logits = [weighed(each, terms) for terms in exits]
        margins = [float(best[0] - best[1]) for best in (z.topk(2).values for z in logits)]
        limits = [*thresholds, -math.inf]
        place = next(k for k, margin in enumerate(margins) if margin > limits[k])
        emitted.append(Emitted(int(logits[place].argmax()), place))
        window = moved(window, emitted[-1].token, CONTEXT)
    return emitted


LIMITS = {
    "residual": (2.0, 2.5, 3.0),
    "mean": (1.4, 0.6, 0.6),
    "weights": (2.4, math.inf, 1.5),
    "forest": (1.0, 0.8),
    "cover": (0.9,),
    "decoders": (0.9,),
    "residual decoders": (1.2,),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_token_that_leaves_is_the_likeliest_of_the_sum_so_far(
    mild: GPT, make_engine: Callable[..., Engine], name: str
) -> None:
    case = CASES[name]
    engine = make_engine(mild, case.topology)
    expected = slow_wand(mild, engine.plan, case.exits, LIMITS[name])
    assert len({emitted.exit for emitted in expected}) > 1, "one exit alone would show little"
    assert generate_batch(Wand(engine, LIMITS[name]), [[3, 1, 4]], TOKENS)[0] == expected


def test_pruning_reads_every_term_of_the_sum_for_the_survivors_only(
    make_gpt: Callable[..., GPT], make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_gpt(later=0.05)
    engine, exits = make_engine(model, RESIDUAL), CASES["residual"].exits
    limits = (6.0, 6.0, math.inf)
    expected = slow_wand(model, engine.plan, exits, limits)
    gains, window = [0.0] * 3, [3, 1, 4]
    for token in expected:
        each = alone(model, engine.plan, window)
        z = [weighed(each, terms) for terms in exits]
        for place in range(3):
            gain = z[-1] - z[place]
            gains[place] = max(gains[place], float(gain.max() - gain[z[place].argmax()]))
        window = moved(window, token.token, CONTEXT)
    read: list[tuple[int, int]] = []
    readout = engine.stack.readout

    def spied(h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        if rows is not None:
            read.append((stage, len(rows)))
        return readout(h, stage, rows)

    monkeypatch.setattr(engine.runtime, "readout", spied)
    bounds = [1.001 * gain for gain in gains]
    assert generate_batch(Wand(engine, limits, bounds=bounds), [[3, 1, 4]], TOKENS)[0] == expected
    assert read, "some tokens were chosen among few"
    assert [stage for stage, _ in read] == [0, 1, 2, 3] * (len(read) // 4)
    assert max(rows for _, rows in read) * FEW <= VOCAB


# Drafts.


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_verified_by_what_the_model_predicts(
    mild: GPT, make_engine: Callable[..., Engine], prompts: list[list[int]], name: str
) -> None:
    """Greedy text in float64 is full depth's, from every exit that can draft, and beyond the context."""
    engine, rows = make_engine(mild, CASES[name].topology), prompts[2:4]
    expected = [slow_text(mild, engine.plan, prompt, CASES[name].exits[-1], 10) for prompt in rows]
    accepted = 0
    for place in range(engine.last):
        for rule in (DraftRule(0.0, 3), DraftRule(0.5, 6)):
            texts, tally = written(Speculate(engine, rule, place), rows, 10)
            assert [[e.token for e in row] for row in texts] == expected
            assert tally.drafted > 0
            accepted += tally.accepted
    assert accepted > 0


@torch.inference_mode()
def test_what_a_draft_computed_is_not_computed_again_for_the_sum(
    mild: GPT, make_engine: Callable[..., Engine], visits_of: Callable[[Stack], Any]
) -> None:
    engine = make_engine(mild, RESIDUAL)
    visits, mode = visits_of(engine.stack), Speculate(engine, DraftRule(0.0, 4), 1)
    (sequence,) = engine.start([[3, 1, 4]])
    emitted = mode.step([sequence])[0]
    pending = list(range(3 + sequence.tally.drafted))
    for layer in range(4):
        assert [p for call in visits.calls[layer] for p in call[0]] == pending
    assert len(visits.calls[3]) == 1
    assert len(emitted) == sequence.tally.accepted + 1


# Which layers run.


@pytest.mark.parametrize(
    ("name", "place", "layers"),
    [
        ("decoders", 0, {0, 2}),
        ("decoders", 1, {0, 1, 3}),
        ("residual decoders", 0, {0, 2}),
        ("residual decoders", 1, {0, 1, 2, 3}),
        ("forest", 0, {0}),
        ("forest", 1, {0, 1}),
        ("forest", 2, {0, 1, 2, 3}),
        ("residual", 1, {0, 1}),
        ("weights", 1, {0}),
        ("weights", 2, {0, 1, 2}),
    ],
)
def test_only_the_layers_run_that_an_exit_predicts_by(
    gpt: GPT,
    make_engine: Callable[..., Engine],
    visits_of: Callable[[Stack], Any],
    name: str,
    place: int,
    layers: set[int],
) -> None:
    """A decoder runs for its own exit alone, and at full depth only if the prediction reads it."""
    engine = make_engine(gpt, CASES[name].topology)
    visits = visits_of(engine.stack)
    tokens_of(FixedDepth(engine, place), [[1, 2]], 3)
    assert {layer for layer, calls in enumerate(visits.calls) if calls} == layers


def test_a_decoder_catches_up_when_a_later_token_needs_it(
    mild: GPT, make_engine: Callable[..., Engine]
) -> None:
    """Exit 1 is behind while tokens leave elsewhere; going back to it gives what it would have given."""
    engine = make_engine(mild, Topology.chain("1,1").with_decoders(1))
    with torch.inference_mode():
        batch = engine.start([[1, 2, 3]])
        engine.run(batch, 3)
        batch[0].cache.push(batch, [[4, 5]])
        engine.run(batch, 3)
        engine.run(batch, 1)
        z = engine.logits(batch, 1, [5])
    for place in range(5):
        expected = next_logits(mild, engine.plan, [1, 2, 3, 4, 5][: place + 1], 1)
        torch.testing.assert_close(z[place], expected, rtol=0, atol=1e-10)


# Paths.


def by_hand(gpt: GPT, window: Sequence[int], path: Sequence[int], summed: bool = False) -> Tensor:
    """Logits behind the layers of a path, a layer a stage: of its last stage, or of all of them."""
    inputs = torch.tensor([list(window)])
    with torch.no_grad():
        h = gpt.embed(inputs)
        ctx = gpt.layer_context(h, inputs)
        each = []
        for layer in path:
            h = gpt.layers[layer](h, ctx)
            each.append(gpt.readout(h, layer)[0, -1])
    return torch.stack(each).sum(0) if summed else each[-1]


@pytest.mark.parametrize("objective", ["cross-entropy", "residual"])
def test_a_model_that_predicts_by_a_path_writes_with_it(
    gpt: GPT, make_engine: Callable[..., Engine], visits_of: Callable[[Stack], Any], objective: str
) -> None:
    chain = Topology.chain("1,1,1,1", objective=objective)
    engine = make_engine(gpt, replace(chain, prediction="path:1,3"))
    visits = visits_of(engine.stack)
    found = tokens_of(FixedDepth(engine), [[1, 2], [3]])
    assert [bool(calls) for calls in visits.calls] == [True, False, True, False]
    for prompt, row in zip(([1, 2], [3]), found, strict=True):
        window = list(prompt)
        for token in row:
            assert token == int(by_hand(gpt, window, (0, 2), objective == "residual").argmax())
            window = moved(window, token, CONTEXT)
    assert found == tokens_of(FixedDepth(engine, 3), [[1, 2], [3]]), (
        "the last exit predicts as the model does"
    )
    assert found == tokens_of(PathEnsemble(engine, {(0, 2): 1.0}), [[1, 2], [3]])
    assert tokens_of(FixedDepth(engine, 1), [[1, 2]]) != found[:1]
    assert {emitted.exit for emitted in generate_batch(FixedDepth(engine), [[1]], 2)[0]} == {3}


def test_what_predicts_by_a_path_neither_leaves_early_nor_drafts(
    gpt: GPT, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(gpt, replace(CHAIN, prediction="path:1,3"))
    makers: list[Callable[[], object]] = [
        lambda: Wand(engine, (1.0,) * 3),
        lambda: Speculate(engine, DraftRule(0.0, 2)),
        lambda: check_exits(engine.plan),
    ]
    for make in makers:
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value) == (
            "the model predicts by the path 1,3, of which its exits are no part; use depth full"
        )


@pytest.mark.parametrize("weights", [{(0, 2): 1.0}, {(0, 1): 1.0, (0, 2, 3): 2.0}], ids=["one", "two"])
def test_a_path_of_residual_stages_predicts_by_their_sum(
    gpt: GPT, make_engine: Callable[..., Engine], weights: dict[tuple[int, ...], float]
) -> None:
    engine = make_engine(gpt, RESIDUAL)
    window = [1, 2]
    total = sum(weights.values())
    for token in tokens_of(PathEnsemble(engine, weights), [window])[0]:
        each = [w / total * by_hand(gpt, window, p, True).log_softmax(-1) for p, w in weights.items()]
        assert token == int(torch.stack(each).sum(0).argmax())
        window = moved(window, token, CONTEXT)


# Calibration.


def test_readings_are_those_of_what_the_exits_predict(gpt: GPT) -> None:
    plan = Plan.of(RESIDUAL, 4)
    torch.manual_seed(3)
    inputs = torch.randint(VOCAB, (2, 7))
    readings = exit_readings(gpt, plan, Text(inputs, inputs, 1), batch=1)
    assert readings.margin.shape == (4, 14)
    for n, (row, t) in enumerate(itertools.product(range(2), range(7))):
        window = inputs[row, : t + 1].tolist()
        each = alone(gpt, plan, window)
        z = [weighed(each, terms) for terms in CASES["residual"].exits]
        for k in range(4):
            best = z[k].topk(2)
            assert readings.top[k, n] == best.indices[0]
            assert readings.margin[k, n].item() == pytest.approx((best.values[0] - best.values[1]).item())
        for k in range(3):
            shift = (z[k + 1] - z[k]).abs().max().item()
            assert readings.shift[k, n].item() == pytest.approx(shift), "what stage k + 2 adds"


# What an engine is made of.


def test_a_string_a_topology_and_a_plan_make_the_same_engine(gpt: GPT) -> None:
    """D17."""
    made = [Engine(gpt, given, CONTEXT) for given in ("2,2", Topology.chain("2,2"), Plan.of("2,2", 4))]
    assert {engine.plan.topology for engine in made} == {Topology.chain("2,2")}
    assert len({str(tokens_of(FixedDepth(engine), [[1, 2]], 5)) for engine in made}) == 1
    assert Engine(gpt, "2,2").context == gpt.context == CONTEXT
    assert Engine(gpt, "L").exits == [0]


def test_what_is_no_topology_of_the_stack_is_refused_at_once(make_gpt: Callable[..., GPT]) -> None:
    stack = make_gpt()
    with pytest.raises(TopologyError, match=r"^the topology has 3 layers and the stack has 4; use a"):
        Engine(stack, "1,2")
    with pytest.raises(TopologyError, match=r"^3 is no topology; give a partition such as "):
        Engine(stack, 3)  # type: ignore[arg-type]
    own = replace(Topology.chain("2,2"), heads="per-stage")
    with pytest.raises(StackError, match=r"^stage 1 has no head of its own .* call tg\.prepare\("):
        Engine(stack, own)
