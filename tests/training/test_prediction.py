"""What a model predicts: `Predictor`, exits, evaluation and teachers against sums that are written out.

Each case says by itself which stages' logits are added up, and with which weights. The logits come from an
interpreter of the topology that knows nothing of plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from topograd.data.windows import Text
from topograd.exec.forward import Predictor, stage_logits
from topograd.exec.objectives import teacher_logits
from topograd.nn.gpt import GPT
from topograd.topology.configuration import Configuration
from topograd.topology.dag import EMBEDDING, Edge, Topology
from topograd.topology.plan import Plan
from topograd.training.evaluation import evaluate

if TYPE_CHECKING:
    from tests.exec.conftest import Tiny

NBYTES = 77
ROUNDING = 1e-6  # evaluate computes its logits' softmax in float32
Weights = Mapping[int, float]


@dataclass(frozen=True)
class Case:
    """A topology, and by hand: what it predicts by, and what its exits do."""

    topology: Topology
    full: Weights
    exits: Mapping[int, Weights]


def own(partition: str) -> Configuration:
    return Configuration.parse(partition, heads="per-stage")


def alone(*stages: int) -> dict[int, Weights]:
    return {k: {k: 1.0} for k in stages}


CHAIN = Topology.chain(own("1,1,2"))
RESIDUAL = Topology.chain(own("1,1,2"), objective="residual")
SUMS: dict[int, Weights] = {0: {0: 1.0}, 1: {0: 1.0, 1: 1.0}, 2: {0: 1.0, 1: 1.0, 2: 1.0}}
FOREST = replace(Topology.forest(["1,1", "2"]), heads="per-stage")
HALVES: Weights = {1: 0.5, 2: 0.5}
CASES: dict[str, Case] = {
    "chain": Case(CHAIN, {2: 1.0}, alone(0, 1, 2)),
    "residual": Case(RESIDUAL, SUMS[2], SUMS),
    "forest": Case(FOREST, HALVES, alone(0, 1) | {2: HALVES}),
    "cover": Case(
        Topology.cover([(0, 3), (1, 4)], heads="per-stage"),
        {0: 0.5, 1: 0.5},
        {0: {0: 1.0}, 1: {0: 0.5, 1: 0.5}},
    ),
    "soft": Case(Topology.soft([0.3, 1.0, 0.0]), {3: 1.0}, alone(0, 2, 3)),
    "decoders": Case(Topology.chain(own("2,2")).with_decoders(1), {3: 1.0}, alone(1, 3)),
    "decoders-forest": Case(
        Topology.forest(["1", "2"]).with_decoders(1),
        {1: 0.5, 3: 0.5},
        {1: {1: 1.0}, 3: {1: 0.5, 3: 0.5}},
    ),
    "bus": Case(CHAIN.with_input_bus(), {2: 1.0}, alone(0, 1, 2)),
    "relay": Case(
        RESIDUAL.with_relays("gate").with_input_bus(Edge(EMBEDDING, relay="low-rank")), SUMS[2], SUMS
    ),
    "last": Case(replace(FOREST, prediction="last"), {2: 1.0}, alone(0, 1, 2)),
    "sum": Case(replace(CHAIN, prediction="sum"), SUMS[2], SUMS),
    "mean": Case(
        replace(CHAIN, prediction="mean"),
        dict.fromkeys(range(3), 1 / 3),
        {k: dict.fromkeys(range(k + 1), 1 / (k + 1)) for k in range(3)},
    ),
    "weights": Case(
        replace(FOREST, prediction=(0.0, 1.0, 3.0)),
        {1: 1.0, 2: 3.0},
        {0: {0: 4.0}, 1: {1: 4.0}, 2: {1: 1.0, 2: 3.0}},
    ),
}


@torch.no_grad()
def logits_of_stages(stack: GPT, topology: Topology, inputs: Tensor) -> list[Tensor]:
    """Every stage's own logits: each layer in turn, every state kept."""
    x0 = stack.embed(inputs)
    ctx = stack.layer_context(x0, inputs)
    after: list[dict[int, Tensor]] = []
    logits = []
    for k, stage in enumerate(topology.stages):
        h = torch.zeros_like(x0)
        for edge in stage.sources:
            source = None if edge.source == EMBEDDING else topology.stages[edge.source]
            message = x0 if source is None else after[edge.source][edge.layer or source.stop]
            h = h + stack.relay(edge.relay).receive(message, ctx)
        after.append({})
        for layer in range(stage.start, stage.stop):
            h = stack.layers[layer](h, ctx)
            after[k][layer + 1] = h
        logits.append(stack.readout(h, k))
    return logits


def added(logits: list[Tensor], weights: Weights) -> Tensor:
    total = torch.zeros_like(logits[0])
    for stage, weight in weights.items():
        total = total + weight * logits[stage]
    return total


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_the_model_and_its_exits_predict_the_written_out_sums(case: Case, tiny: type[Tiny]) -> None:
    stack, (inputs, _) = tiny.gpt(case.topology), tiny.batch()
    logits = logits_of_stages(stack, case.topology, inputs)
    found = Predictor(stack, case.topology)(inputs).detach()
    close(found, added(logits, case.full))
    for other in logits:
        same = torch.allclose(found, other, rtol=1e-6)
        assert not same or list(case.full.values()) == [1.0], "another stage's logits would do as well"
    plan = Plan.of(case.topology, case.topology.layers)
    assert plan.predicting() == list(case.exits)
    for stage, weights in case.exits.items():
        close(stage_logits(stack, plan, stage, inputs).detach(), added(logits, weights))
    last = stage_logits(stack, plan, plan.last, inputs).detach()
    close(last, found)


def test_a_path_runs_its_layers_and_no_other(tiny: type[Tiny]) -> None:
    """Stages 1 and 3 of three: layers 0, 2 and 3, read by the head of the third."""
    topology = replace(CHAIN, prediction="path:1,3")
    stack, (inputs, targets) = tiny.gpt(topology), tiny.batch()
    ran: list[int] = []
    for i, layer in enumerate(stack.layers):
        layer.register_forward_pre_hook(lambda module, arguments, i=i: ran.append(i))
    found = Predictor(stack, topology)(inputs).detach()
    assert ran == [0, 2, 3]
    with torch.no_grad():
        h = stack.embed(inputs)
        ctx = stack.layer_context(h, inputs)
        for i in (0, 2, 3):
            h = stack.layers[i](h, ctx)
        expected = stack.readout(h, 2)
    assert torch.equal(found, expected)
    reading = evaluate(stack, topology, Text(inputs, targets, NBYTES))
    assert reading.bpb.prediction == pytest.approx(bits(expected, targets), rel=ROUNDING)
    assert reading.bpb.last == pytest.approx(
        bits(logits_of_stages(stack, CHAIN, inputs)[2], targets), rel=ROUNDING
    )
    assert reading.bpb.prediction != pytest.approx(reading.bpb.last, rel=1e-3)


def test_a_string_is_a_chain(tiny: type[Tiny]) -> None:
    stack, (inputs, _) = tiny.gpt(), tiny.batch()
    assert torch.equal(Predictor(stack, "2,2")(inputs), stack(inputs))


def bits(logits: Tensor, targets: Tensor) -> float:
    """Bits per byte, target by target."""
    counted = targets != -100
    nats = -logits[counted].log_softmax(-1)[torch.arange(int(counted.sum())), targets[counted]].sum().item()
    return nats / math.log(2) / NBYTES


def test_evaluation_measures_what_is_predicted(case: Case, tiny: type[Tiny]) -> None:
    stack, (inputs, targets) = tiny.gpt(case.topology), tiny.batch()
    logits = logits_of_stages(stack, case.topology, inputs)
    bpb = evaluate(stack, case.topology, Text(inputs, targets, NBYTES), batch=1).bpb
    predicted = Predictor(stack, case.topology)(inputs).detach()
    assert bpb.prediction == pytest.approx(bits(predicted, targets), rel=ROUNDING)
    assert bpb.prediction == pytest.approx(bits(added(logits, case.full), targets), rel=ROUNDING)
    assert bpb.prefix == pytest.approx(
        [bits(added(logits, weights), targets) for weights in case.exits.values()], rel=ROUNDING
    )
    assert bpb.stages == pytest.approx([bits(logits[k], targets) for k in case.exits], rel=ROUNDING)
    assert bpb.last == bpb.stages[-1]
    summed = added(logits, dict.fromkeys(case.exits, 1.0))
    assert bpb.sum == pytest.approx(bits(summed, targets), rel=ROUNDING)


def test_the_calibration_of_an_exit_is_that_of_what_it_predicts(tiny: type[Tiny]) -> None:
    """The last exit of a residual chain is the sum; the last stage alone is confident of something else."""
    stack, (inputs, targets) = tiny.gpt(RESIDUAL), tiny.batch()
    counted = targets != -100
    z = added(logits_of_stages(stack, RESIDUAL, inputs), SUMS[2])[counted]
    confidence, guess = z.softmax(-1).max(-1)
    reading = evaluate(stack, RESIDUAL, Text(inputs, targets, NBYTES))
    table = reading.reliability[-1]
    assert sum(count or 0 for count in table["count"]) == len(z)
    hits = sum((a or 0) * (n or 0) for a, n in zip(table["accuracy"], table["count"], strict=True))
    assert hits == pytest.approx((guess == targets[counted]).sum().item())
    mean = sum((c or 0) * (n or 0) for c, n in zip(table["confidence"], table["count"], strict=True))
    assert mean / len(z) == pytest.approx(confidence.mean().item(), rel=ROUNDING)


def test_a_teacher_says_what_it_predicts(case: Case, tiny: type[Tiny]) -> None:
    """And not what its last layer says: forests, buses, relays and residual sums teach too (D9)."""
    stack, (inputs, _) = tiny.gpt(case.topology), tiny.batch()
    expected = added(logits_of_stages(stack, case.topology, inputs), case.full).flatten(0, 1)
    taught = teacher_logits(Predictor(stack, case.topology), inputs)
    rows = [taught(slice(start, start + 7)) for start in range(0, inputs.numel(), 7)]
    close(torch.cat(rows).detach(), expected)


def test_a_path_teaches_too(tiny: type[Tiny]) -> None:
    topology = replace(CHAIN, prediction="path:1,3")
    stack, (inputs, _) = tiny.gpt(topology), tiny.batch()
    predictor = Predictor(stack, topology)
    close(teacher_logits(predictor, inputs)(slice(None)).detach(), predictor(inputs).detach().flatten(0, 1))
