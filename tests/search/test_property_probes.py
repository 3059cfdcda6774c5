"""The probes: locality is exact, they leave the model alone, and they see what they should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raising import refused
from topograd.data.windows import Text
from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.search import property_probes
from topograd.search.property_probes import (
    Specialist,
    backwards,
    specialist,
    target_alignment,
    unit_of,
    update_discipline,
)
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.evaluation import evaluate

VOCAB, TIME = 12, 16


def text(rows: int = 8) -> Text:
    """Counting by ones and twos: easy to learn, and another thing backwards."""
    start = torch.arange(rows)[:, None] * 5
    steps = torch.where(torch.arange(TIME + 1) % 3 == 0, 2, 1).cumsum(0)
    tokens = (start + steps) % VOCAB
    targets = tokens[:, 1:].clone()
    targets[-1, 9:] = -100
    return Text(tokens[:, :-1], targets, int((targets != -100).sum()))


def model(topology: Topology) -> tuple[GPT, Plan]:
    torch.manual_seed(0)
    stack = GPT(layers=topology.layers, width=16, heads=2, vocab=VOCAB, context=TIME, head_std=0.1)
    for layer in stack.layers:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return stack, prepare(stack, topology)


@pytest.fixture
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what must be so from the first step on."""
    monkeypatch.setattr(property_probes, "STEPS", 2)


few = pytest.mark.usefixtures("_few_steps")


def test_backwards_has_the_same_targets_in_the_other_order() -> None:
    here = text()
    turned = backwards(here)
    assert turned.nbytes == here.nbytes
    for row in range(8):
        said = here.targets[row][here.targets[row] != -100].tolist()
        assert turned.targets[row][turned.targets[row] != -100].tolist() == said[::-1]
        assert turned.inputs[row, 1 : len(said)].tolist() == said[::-1][:-1]
    assert torch.equal(backwards(turned).targets, here.targets)


@few
@pytest.mark.parametrize(
    "topology",
    [
        Topology.chain("1,1,2"),
        Topology.chain("1,1,2", bus="detached", objective="residual"),
        Topology.chain(Configuration.parse("2,2", heads="per-stage")),
        Topology.chain("1,1,2").with_relays("gate").with_input_bus(),
        Topology.forest(["1,1", "2"]),
    ],
)
def test_where_no_gradient_leaves_a_stage_the_others_do_not_move_at_all(topology: Topology) -> None:
    stack, plan = model(topology)
    update = update_discipline(stack, plan, text(), backwards(text()))
    assert update.stage == len(topology.stages) - 1
    assert update.others == 0
    assert update.own > 1e-3


@few
@pytest.mark.parametrize("grad_scale", [0.1, 1.0])
def test_where_gradient_crosses_the_others_move(grad_scale: float) -> None:
    stack, plan = model(Topology.chain("1,1,2", grad_scale=grad_scale))
    assert update_discipline(stack, plan, text(), backwards(text())).others > 1e-3


@few
def test_backprop_has_no_others() -> None:
    stack, plan = model(Topology.chain("4"))
    update = update_discipline(stack, plan, text(), backwards(text()))
    assert (update.stage, update.others) == (0, 0.0)
    assert update.own > 0


def test_learning_the_opposite_forgets() -> None:
    """After learning the text the model is worse at it once it has learned it backwards, and not before."""
    untaught, plan = model(Topology.chain("2,2"))
    stack = property_probes._taught(untaught, plan.topology, text())
    assert update_discipline(stack, plan, text(), backwards(text())).forgetting > 0.1
    assert update_discipline(stack, plan, text(), text()).forgetting < 0


@pytest.mark.parametrize("partition", ["4", "2,2"])
def test_a_specialist_is_measured_whatever_the_number_of_stages(partition: str) -> None:
    """Worked out again by hand: the probe is read on the new text, and at every exit on the old one."""
    untaught, plan = model(Topology.chain(partition))
    stack = property_probes._taught(untaught, plan.topology, text())
    old, (lesson, exam) = text(), property_probes._halves(backwards(text()))
    found = specialist(stack, plan, old, backwards(text()))
    stages = plan.topology.stages
    frozen = tuple(replace(s, frozen=True, weight=0.0) for s in stages[:-1])
    pupil = property_probes._taught(stack, replace(plan.topology, stages=(*frozen, stages[-1])), lesson)
    gain = evaluate(stack, plan, exam).bpb.prediction - evaluate(pupil, plan, exam).bpb.prediction
    assert found.gain == pytest.approx(gain)
    assert found.gain > 0.05
    now, before = evaluate(pupil, plan, old).bpb, evaluate(stack, plan, old).bpb
    assert found.price == pytest.approx(min(now.prefix) - before.prediction)
    if partition == "4":
        assert found.reference == found.gain
        assert found.price > 0.05, "the only exit was trained, and forgot"
    else:
        assert now.prefix[0] == before.prefix[0], "the first exit stands still"
        assert found.reference > found.gain, "every layer learns more than the last two"


def test_the_share_of_a_specialist() -> None:
    assert Specialist(gain=0.5, price=0.1, reference=0.8).share == pytest.approx(0.5)
    assert Specialist(gain=0.5, price=-0.1, reference=0.5).share == 1.0
    assert Specialist(gain=0.5, price=0.9, reference=0.5).share == 0.0
    assert Specialist(gain=-0.1, price=0.0, reference=-0.2).share == 0.0


def test_a_stage_brings_what_serves_it_alone() -> None:
    assert unit_of(Plan.of(Topology.chain("2,2"), 4), 1) == {1}
    assert unit_of(Plan.of(Topology.chain("2,2", grad_scale=1.0), 4), 1) == {1}
    decoded = Topology.chain("2,2").with_decoders(1)
    assert unit_of(Plan.of(decoded, 6), 3) == {2, 3}
    assert unit_of(Plan.of(Topology.regions("1,1,2"), 4), 2) == {0, 1, 2}


@few
@pytest.mark.parametrize(
    "topology",
    [
        Topology.forest(["2", "2"]).with_decoders(1),
        Topology.chain("2,2", objective="residual").with_decoders(1),
        Topology.chain("2,2", objective="distillation"),
        replace(Topology.chain("2,2"), prediction=(0.5, 0.5)),
    ],
    ids=["decoders", "residual", "taught", "pool"],
)
def test_every_kind_can_be_probed(topology: Topology) -> None:
    stack, plan = model(topology)
    found = specialist(stack, plan, text(), backwards(text()))
    assert found.gain > 0
    assert update_discipline(stack, plan, text(), backwards(text())).others == 0
    assert target_alignment(stack, plan, text().inputs, text().targets) is not None


@few
def test_probes_leave_the_model_as_it_was() -> None:
    stack, plan = model(Topology.chain("2,2"))
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    learning = {name: p.requires_grad for name, p in stack.named_parameters()}
    update_discipline(stack, plan, text(), text())
    specialist(stack, plan, text(), text())
    target_alignment(stack, plan, text().inputs, text().targets)
    assert all(torch.equal(before[name], value) for name, value in stack.state_dict().items())
    assert learning == {name: p.requires_grad for name, p in stack.named_parameters()}
    assert all(p.grad is None for p in stack.parameters())


def test_backprop_is_aligned_with_its_own_target_and_stages_less() -> None:
    here = text()
    aligned = target_alignment(*model(Topology.chain("4")), here.inputs, here.targets)
    staged = target_alignment(*model(Topology.chain("1,1,2")), here.inputs, here.targets)
    assert aligned == pytest.approx(1.0, abs=1e-6)
    assert staged is not None
    assert 0 < staged < 0.99


def test_a_frozen_base_has_no_alignment() -> None:
    topology = Topology.chain("1,1").with_specialist(2)
    assert target_alignment(*model(topology), text().inputs, text().targets) is None


@few
def test_a_specialist_can_be_probed_again() -> None:
    stack, plan = model(Topology.chain("1,1").with_specialist(2))
    update = update_discipline(stack, plan, text(), backwards(text()))
    assert (update.stage, update.others) == (2, 0.0)
    assert specialist(stack, plan, text(), backwards(text())).gain > 0


def test_one_row_is_too_little_for_a_probe() -> None:
    stack, plan = model(Topology.chain("2,2"))
    one = replace(text(), inputs=text().inputs[:1], targets=text().targets[:1])
    with refused(ConfigError, setting="new", given=1):
        specialist(stack, plan, text(), one)
