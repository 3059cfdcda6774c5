"""Directions of residual interfaces from data: which they are, and that a run begins with them."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest
import torch
from torch import Tensor

from topograd.exec.gradient import BACKWARDS
from topograd.exec.train_step import train_step
from topograd.interfaces.adjoint_rank import boundary_adjoints
from topograd.nn.gpt import GPT
from topograd.nn.lora import add_lora, corrected_maps
from topograd.nn.preparation import prepare
from topograd.nn.residual_interface import ResidualRelay
from topograd.nn.stack import Stack
from topograd.runs.config import OptimizerConfig, TrainConfig
from topograd.runs.session import open_session
from topograd.runs.tune_config import TuneConfig
from topograd.topology.dag import Topology
from topograd.training.interface_directions import begin_interfaces, boundary_rows, leading_directions
from topograd.training.runs import resume, start

WIDTH, VOCAB = 8, 11


def batch() -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randint(VOCAB, (2, 3, 6), generator=torch.Generator().manual_seed(1))
    return inputs, targets


def model(noise: float = 0.3) -> GPT:
    torch.manual_seed(0)
    stack = GPT(layers=4, width=WIDTH, heads=2, vocab=VOCAB, context=6).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return stack


def bases(stack: Stack) -> list[Tensor]:
    return [relay.basis for relay in stack.learned_relays().values() if isinstance(relay, ResidualRelay)]


def test_rows_are_the_hidden_states_and_adjoints_of_the_chain() -> None:
    stack, (inputs, targets) = model(), batch()
    chain = prepare(stack, Topology.chain("4"))
    found = boundary_rows(stack, chain, inputs, targets)
    expected = boundary_adjoints(stack, chain, inputs, targets)
    h = x0 = stack.embed(inputs)
    ctx = stack.layer_context(x0, inputs)
    for number, layer in enumerate(stack.layers):
        h = layer(h, ctx)
        torch.testing.assert_close(found["hidden"][number], (h - x0).flatten(0, 1).detach())
        torch.testing.assert_close(found["adjoints"][number], expected[number].flatten(0, 1))
    assert all(parameter.grad is None for parameter in stack.parameters())


@pytest.mark.parametrize("basis", ["hidden", "adjoints"])
def test_no_other_directions_hold_more(basis: str) -> None:
    stack = model()
    plan = prepare(stack, Topology.regions("2,1,1", f"residual:r=3,basis={basis}"))
    before = {name: p.clone() for name, p in stack.named_parameters() if "relays" not in name}
    assert begin_interfaces(stack, plan, OptimizerConfig(), repeat(batch()), steps=0)
    dense = model()
    chain = prepare(dense, Topology.chain("4"))
    rows = boundary_rows(dense, chain, *batch())[basis]
    for U, layer in zip(bases(stack), (1, 2), strict=True):
        torch.testing.assert_close(U.T @ U, torch.eye(3, dtype=U.dtype))
        singular = torch.linalg.svdvals(rows[layer])
        held = (rows[layer] @ U).square().sum()
        torch.testing.assert_close(held, singular[:3].square().sum())
        assert not U.requires_grad
    assert all(torch.equal(p, before[name]) for name, p in stack.named_parameters() if name in before)


def test_a_new_model_learns_first_or_there_is_nothing_to_read() -> None:
    """Its layers are the identity but for the canvas: hidden states without a step lie in few directions."""
    torch.manual_seed(0)
    stack = GPT(layers=2, width=WIDTH, heads=2, vocab=VOCAB, context=6, head_std=0.0, x0_blend=False)
    rows = boundary_rows(stack, prepare(stack, Topology.chain("2")), *batch())
    assert not rows["adjoints"][0].any()
    plan = prepare(stack, Topology.regions("1,1", "residual:r=3,basis=adjoints"))
    (random,) = (U.clone() for U in bases(stack))
    begin_interfaces(stack, plan, OptimizerConfig(), repeat(batch()), steps=3)
    assert not torch.allclose(bases(stack)[0], random)


def test_other_interfaces_are_left_alone_and_read_nothing() -> None:
    stack = model()
    plan = prepare(stack, Topology.regions("2,2", "residual:r=3,basis=learned"))
    assert not begin_interfaces(stack, plan, OptimizerConfig(), iter(()))


def test_directions_are_any_where_there_are_too_few_rows() -> None:
    U = leading_directions(torch.tensor([[0.0, 2.0, 0.0]]), 2)
    torch.testing.assert_close(U.T @ U, torch.eye(2))
    torch.testing.assert_close(U[:, 0].abs(), torch.tensor([0.0, 1.0, 0.0]))


def test_a_run_begins_with_them_and_keeps_them(config: TrainConfig, tmp_path: Path) -> None:
    found = []
    for steps in (1, 3):
        folder = tmp_path / str(steps)
        topology = replace(config.topology, interface="residual:r=4,basis=hidden", backward="scan")
        start(replace(config, topology=topology, steps=steps), folder).train()
        found.append(bases(open_session(folder).stack)[0])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0].T @ found[0], torch.eye(4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 2], ids=["whole", "lora"])
def test_a_run_that_is_trained_on_keeps_those_of_its_base(
    config: TrainConfig, tmp_path: Path, rank: int
) -> None:
    topology = replace(config.topology, interface="residual:r=4,basis=hidden", backward="scan")
    config = replace(config, topology=topology, steps=1)
    start(config, tmp_path / "base").train()
    tuned = replace(config, init=str(tmp_path / "base"), seed=1, tune=TuneConfig(lora_rank=rank))
    start(tuned, tmp_path / "tuned").train()
    before, after = (open_session(tmp_path / name).stack for name in ("base", "tuned"))
    torch.testing.assert_close(bases(before), bases(after), rtol=0, atol=0)


def test_a_run_that_was_killed_before_its_first_checkpoint_keeps_those_of_its_base(
    config: TrainConfig, tmp_path: Path
) -> None:
    topology = replace(config.topology, interface="residual:r=4,basis=hidden")
    config = replace(config, topology=topology, steps=1)
    start(config, tmp_path / "base").train()
    start(replace(config, init=str(tmp_path / "base"), seed=1), tmp_path / "tuned")
    resumed = resume(tmp_path / "tuned").task.stack
    before = open_session(tmp_path / "base").stack
    torch.testing.assert_close(bases(before), bases(resumed), rtol=0, atol=0)


def test_gradients_of_a_lora_are_those_of_autograd() -> None:
    taken = []
    for engine in ("autograd", "scan", "hybrid"):
        stack = model()
        plan = prepare(stack, Topology.regions("1,1,1,1", "residual:r=3,basis=learned"))
        add_lora(stack.layers, 2)
        for module in corrected_maps(stack).values():
            torch.nn.init.normal_(module.get_parameter("lora_b"), std=0.1)
        train_step(stack, plan, *batch(), gradient=BACKWARDS[engine]())
        taken.append([p.grad for p in stack.parameters() if p.grad is not None])
    assert any(bool(grad.any()) for grad in taken[0])
    for other in taken[1:]:
        torch.testing.assert_close(other, taken[0], rtol=1e-9, atol=1e-12)
