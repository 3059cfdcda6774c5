"""The probes: locality is exact, they leave the model alone, and they see what they should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.nn.learned_relays import add_relays
from topograd.search import property_probes
from topograd.search.property_probes import (
    backwards,
    prediction,
    specialist_capacity,
    target_alignment,
    update_discipline,
)
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.evaluation import Text
from topograd.training.executor import prepare

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
    add_relays(stack, topology, 16)
    return stack, prepare(stack, topology)


def test_backwards_has_the_same_targets_in_the_other_order() -> None:
    here = text()
    turned = backwards(here)
    assert turned.nbytes == here.nbytes
    for row in range(8):
        said = here.targets[row][here.targets[row] != -100].tolist()
        assert turned.targets[row][turned.targets[row] != -100].tolist() == said[::-1]
        assert turned.inputs[row, 1 : len(said)].tolist() == said[::-1][:-1]
    assert torch.equal(backwards(turned).targets, here.targets)


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


@pytest.mark.parametrize("transmissivity", [0.1, 1.0])
def test_where_gradient_crosses_the_others_move(transmissivity: float) -> None:
    stack, plan = model(Topology.chain("1,1,2", transmissivity=transmissivity))
    assert update_discipline(stack, plan, text(), backwards(text())).others > 1e-3


def test_backprop_has_no_others() -> None:
    stack, plan = model(Topology.chain("4"))
    update = update_discipline(stack, plan, text(), backwards(text()))
    assert (update.stage, update.others) == (0, 0.0)
    assert update.own > 0


def test_learning_the_opposite_forgets() -> None:
    """After learning the text the model is worse at it once it has learned it backwards, and not before."""
    stack, plan = model(Topology.chain("2,2"))
    property_probes._train(stack, plan.topology, text())
    assert update_discipline(stack, plan, text(), backwards(text())).forgetting > 0.1
    assert update_discipline(stack, plan, text(), text()).forgetting < 0


def test_a_stage_can_specialise_and_one_stage_alone_cannot() -> None:
    new = backwards(text())
    assert specialist_capacity(*model(Topology.chain("2,2")), new) > 0.1
    assert specialist_capacity(*model(Topology.chain("4")), new) == 0


def test_probes_leave_the_model_as_it_was() -> None:
    stack, plan = model(Topology.chain("2,2"))
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    learning = {name: p.requires_grad for name, p in stack.named_parameters()}
    update_discipline(stack, plan, text(), text())
    specialist_capacity(stack, plan, text())
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


def test_a_specialist_can_be_probed_again() -> None:
    stack, plan = model(Topology.chain("1,1").with_specialist(2))
    update = update_discipline(stack, plan, text(), backwards(text()))
    assert (update.stage, update.others) == (2, 0.0)
    assert specialist_capacity(stack, plan, backwards(text())) > 0


def test_stages_that_correct_each_other_predict_by_their_sum() -> None:
    assert prediction(model(Topology.chain("2,2", objective="residual"))[1]) == "sum"
    assert prediction(model(Topology.chain("2,2"))[1]) == "last"


def test_one_row_is_too_little_for_a_probe() -> None:
    stack, plan = model(Topology.chain("2,2"))
    one = replace(text(), inputs=text().inputs[:1], targets=text().targets[:1])
    with pytest.raises(ConfigError, match="new text has 1 rows; a probe needs 2"):
        specialist_capacity(stack, plan, one)
