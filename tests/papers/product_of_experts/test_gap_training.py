"""One arm's training: topologies that change, teachers that follow, batches in parts."""

from dataclasses import replace
from itertools import repeat

import pytest
import torch
from torch import Tensor

from papers.product_of_experts.gap_arms import ARMS, SAVING, Arm, cooling
from papers.product_of_experts.gap_training import DECAY, Training
from papers.staged_runs import Sizes
from topograd.topology.dag import Topology

CHAIN = Topology.chain("2,2,2")
NAMED = {arm.name: arm for arm in (*ARMS, *SAVING)}
CONFIG = Sizes(width=8, context=8, batch=4, steps=4, soft_steps=0, eval_bytes=100, seeds=1).config(3)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(257, (4, 9), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(arm: Arm, batch: tuple[Tensor, Tensor], share: float = 0.0) -> dict[str, Tensor]:
    training = Training(arm, CONFIG)
    training.stack.double()
    generator = torch.Generator().manual_seed(1)
    for p in training.stack.parameters():
        torch.nn.init.normal_(p, std=0.2, generator=generator)
    training.gradients(share, *batch)
    return {name: p.grad for name, p in training.stack.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [arm.name for arm in SAVING])
def test_backprop_in_less_memory_has_backprops_gradients(name: str, batch: tuple[Tensor, Tensor]) -> None:
    plain, lean = gradients(NAMED["backprop"], batch), gradients(NAMED[name], batch)
    assert plain.keys() == lean.keys()
    for key, gradient in plain.items():
        torch.testing.assert_close(lean[key], gradient, rtol=1e-11, atol=1e-14)


def test_a_topology_that_changes_is_the_other_one_afterwards(batch: tuple[Tensor, Tensor]) -> None:
    changing, fixed = Arm("a", CHAIN, at=cooling), Arm("b", CHAIN)
    for key, gradient in gradients(fixed, batch).items():
        assert torch.equal(gradients(changing, batch, 0.6)[key], gradient)
    early = "layers.0.mlp.up.weight"
    assert not torch.equal(gradients(changing, batch, 0.1)[early], gradients(fixed, batch)[early])


def test_arms_start_alike() -> None:
    first = Training(NAMED["backprop"], CONFIG).stack.state_dict()
    for name in ("staged", "staged, decoders", "staged, own heads"):
        other = Training(NAMED[name], CONFIG).stack.state_dict()
        assert all(torch.equal(tensor, other[key]) for key, tensor in first.items())


def test_the_average_follows_the_weights(batch: tuple[Tensor, Tensor]) -> None:
    training = Training(NAMED["staged, taught by an average"], CONFIG)
    before = training.stack.head.weight.detach().clone()
    training.loop.optimizers.set_rates(0, 10)
    losses = training.learn(0.0, *batch)
    after = training.stack.head.weight.detach()
    teacher = training.loop.teacher
    assert teacher is not None
    torch.testing.assert_close(teacher.stack.get_parameter("head.weight"), before.lerp(after, 1 - DECAY))
    assert not torch.equal(before, after)
    assert losses.isfinite().all()


def test_a_run_gives_every_loss(batch: tuple[Tensor, Tensor]) -> None:
    training = Training(replace(NAMED["staged, late"], name="x"), CONFIG)
    losses = training.run(repeat(batch), 4)
    assert losses.shape == (4, 3)
    assert losses[:2, :2].isnan().all(), "no early losses in the first half"
    assert losses[2:].isfinite().all()
    assert losses[3, 2] < losses[0, 2]
