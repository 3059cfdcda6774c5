import math

import pytest
import torch
import torch.nn.functional as F

from topograd.data.windows import Text
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.search.salience import Costs, Measured, measure, merge_pressures, split_pressures, terms
from topograd.search.surgery import neighbours
from topograd.search.utility import Weights
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.evaluation import evaluate

HERE = Composition.parse("1,1,2")
WEIGHTS = Weights(coupling=0.3, head=0.1, capability=0.5, bandwidth=0.2, calibration=0.4)


@pytest.fixture(scope="module")
def stack() -> GPT:
    torch.manual_seed(0)
    made = GPT(layers=4, width=16, heads=2, vocab=20, context=8)
    prepare(made, Topology.chain(Configuration(HERE, "per-stage")))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@pytest.fixture(scope="module")
def text() -> Text:
    inputs, targets = torch.randint(0, 20, (2, 20, 8), generator=torch.Generator().manual_seed(1))
    targets[3, 4:] = -100
    return Text(inputs, targets, nbytes=200)


@pytest.fixture(scope="module")
def found(stack: GPT, text: Text) -> Measured:
    return measure(stack, HERE, neighbours(HERE, 1), text, batch=7)


def costs(weights: Weights = WEIGHTS) -> Costs:
    return Costs(weights=weights, heads="per-stage", vocab=20, width=16, floor=0.9)


@torch.no_grad()
def logits(stack: GPT, text: Text) -> torch.Tensor:
    """(L, tokens, V): every layer by the nearest head, the obvious way. 1,1,2 has heads after 1, 2 and 4."""
    h = stack.embed(text.inputs)
    ctx = stack.layer_context(h, text.inputs)
    rows = []
    for layer, head in zip(stack.layers, [0, 1, 2, 2], strict=True):
        h = layer(h, ctx)
        rows.append(stack.readout(h, head).flatten(0, 1))
    return torch.stack(rows)


def test_the_bits_are_those_of_the_pooled_prediction(stack: GPT, text: Text, found: Measured) -> None:
    z, y = logits(stack, text), text.targets.flatten()
    assert set(found.bpb) == {HERE, *neighbours(HERE, 1)}
    for pi, bpb in found.bpb.items():
        mixed = z[[end - 1 for end in pi.terminals]].mean(0)
        nats = F.cross_entropy(mixed, y, reduction="sum").item()
        assert bpb == pytest.approx(nats / (math.log(2) * 200), rel=1e-5)


def test_the_readings_of_the_stages_are_those_of_the_evaluation(
    stack: GPT, text: Text, found: Measured
) -> None:
    said = evaluate(stack, Plan.of(Topology.chain(Configuration(HERE, "per-stage")), 4), text)  # type: ignore[arg-type]
    ends = [end - 1 for end in HERE.terminals]
    assert [found.layer_ece[i] for i in ends] == pytest.approx(said.ece, rel=1e-5)
    assert [16 * found.layer_rank[i] for i in ends] == pytest.approx(said.effective_rank, rel=1e-5)
    assert found.usefulness[0] is None
    assert found.usefulness[1:] == pytest.approx(said.usefulness[1:], rel=1e-4, abs=1e-5)
    assert found.bpb[HERE] == pytest.approx(said.bpb.mean, rel=1e-5)


def test_the_pressures(found: Measured) -> None:
    merge, split = merge_pressures(found, costs()), split_pressures(found, costs())
    assert set(merge) == {1, 2}
    assert set(split) == {3}
    merged = Composition.parse("2,2")
    assert merge[1] == pytest.approx(found.bpb[merged] - found.bpb[HERE] + 0.3 / 3)
    finest = Composition.top(4)
    change = found.bpb[finest] - found.bpb[HERE]
    assert split[3] == pytest.approx(0.5 * (0 - 1 / 2) - change - 0.1 * 1)


def test_a_cost_of_coupling_speaks_against_merging(found: Measured) -> None:
    """The sign of J (eq. 30), where the paper's eq. 33 has the other one."""
    free, dear = (merge_pressures(found, costs(Weights(coupling=c))) for c in (0.0, 1.0))
    assert all(dear[i] > free[i] for i in free)


def test_the_terms_of_a_neighbour(found: Measured) -> None:
    pi = Composition.parse("2,2")
    said = terms(found, pi, costs())
    assert said.bpb == found.bpb[pi]
    assert (said.coupling, said.head, said.capability) == (pytest.approx(2 / 3), 2.0, 1.0)
    assert said.bandwidth == pytest.approx(max(0.0, 0.9 - found.layer_rank[1]))
    assert said.calibration == pytest.approx((found.layer_ece[1] + found.layer_ece[3]) / 2)


def test_the_stack_stays_as_it_is(stack: GPT, text: Text) -> None:
    stack.train()
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    measure(stack, HERE, [], text)
    assert stack.training
    assert all(torch.equal(before[name], value) for name, value in stack.state_dict().items())
    assert all(p.grad is None for p in stack.parameters())
