"""Late and thin gradients against a list of one-graph gradients (`tests/oracles/late.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from raising import refused
from tests.oracles.late import LateTraining, lateness
from topograd.errors import ConfigError
from topograd.exec.late import LateQueue, Places, with_weights
from topograd.exec.train_step import train_step
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology
from topograd.topology.plan import Plan

if TYPE_CHECKING:
    from tests.exec.conftest import Tiny

STEPS = 6
FORK = Topology(
    4,
    (
        Stage(0, 1, (Edge(EMBEDDING, grad_scale=1.0),)),
        Stage(1, 2, (Edge(0, grad_scale=0.5),), weight=0.0),
        Stage(2, 3, (Edge(0, grad_scale=1.0, delay=1, grad_bits=4),)),
        Stage(3, 4, (Edge(1, grad_scale=1.0, delay=2), Edge(2, grad_scale=0.7), Edge(0, grad_scale=0.3))),
    ),
)
"""Stage 1 hears of a batch at once, one step and two steps later; one of its listeners has no loss."""
MIXED = Topology(
    4,
    (
        Stage(0, 1, (Edge(EMBEDDING, grad_scale=0.5),)),
        Stage(1, 2, (Edge(0, grad_scale=1.0),)),
        Stage(2, 3, (Edge(1, grad_scale=1.0, delay=1),)),
        Stage(3, 4, (Edge(2, grad_scale=1.0, grad_bits=3),)),
    ),
)
TOPOLOGIES = {
    "late": Topology.chain("1,1,2", grad_scale=1.0).with_gradient(delay=1),
    "two-late": Topology.chain("2,2", grad_scale=0.3).with_gradient(delay=2),
    "thin": Topology.chain("1,1,2", grad_scale=1.0).with_gradient(bits=4),
    "thin-and-late": Topology.chain("1,1,1,1", grad_scale=1.0).with_gradient(delay=1, bits=8),
    "detached": Topology.chain("1,1,2", grad_scale=1.0, bus="detached").with_gradient(delay=1),
    "last-loss": replace(
        Topology.chain("2,2", grad_scale=1.0).with_gradient(delay=1),
        stages=tuple(
            replace(s, weight=float(k))
            for k, s in enumerate(Topology.chain("2,2", grad_scale=1.0).with_gradient(delay=1).stages)
        ),
    ),
    "fork": FORK,
    "fork-detached": replace(FORK, bus="detached"),
    "mixed": MIXED,
}


def test_lateness_adds_up_along_the_longest_path() -> None:
    for topology in TOPOLOGIES.values():
        assert list(Plan.of(topology, topology.layers).lateness) == lateness(topology)
    assert Plan.of(TOPOLOGIES["thin-and-late"], 4).lateness == (3, 2, 1, 0)
    assert Plan.of(FORK, 4).lateness == (2, 2, 0, 0)
    assert Plan.of(MIXED, 4).lateness == (1, 1, 0, 0)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize(("count", "recompute"), [(1, False), (2, False), (1, True)])
def test_equals_the_list_of_one_graph_gradients(
    name: str, count: int, recompute: bool, tiny: type[Tiny]
) -> None:
    topology = TOPOLOGIES[name]
    slow, fast = tiny.gpt(topology), tiny.gpt(topology)
    oracle = LateTraining(slow, topology, torch.optim.AdamW(slow.parameters(), lr=0.01), seed=5)
    optimizer, queue = torch.optim.AdamW(fast.parameters(), lr=0.01), LateQueue()
    for step in range(STEPS):
        batches = [tiny.batch(100 * step + i) for i in range(count)]
        expected = oracle.train(*batches)
        queue.begin(step, count)
        for i, (inputs, targets) in enumerate(batches):
            losses = train_step(
                *(fast, topology, inputs, targets),
                scale=1 / count,
                draw=(5, step, i),
                late=queue,
                recompute=recompute,
            )
            torch.testing.assert_close(losses, expected[i], rtol=1e-10, atol=0, equal_nan=True)
        queue.commit()
        optimizer.step()
        fast.zero_grad(set_to_none=True)
    for (where, a), b in zip(fast.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=where)


def test_no_delay_and_32_bits_are_backprop_bit_for_bit(tiny: type[Tiny]) -> None:
    plain = Topology.chain("1,1,2", grad_scale=1.0)
    found = []
    for topology in (plain, plain.with_gradient(delay=0, bits=32)):
        stack = tiny.gpt(topology)
        train_step(stack, topology, *tiny.batch(), draw=(1, 2, 3), late=LateQueue())
        found.append(tiny.gradients(stack))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert Plan.of(plain.with_gradient(), 4) == Plan.of(plain, 4)


def test_a_step_that_begins_again_finds_the_queue_as_it_was(tiny: type[Tiny]) -> None:
    topology = TOPOLOGIES["late"]
    once, twice = tiny.gpt(topology), tiny.gpt(topology)
    for stack, attempts in ((once, 1), (twice, 3)):
        queue = LateQueue()
        for step in range(4):
            for _ in range(attempts):
                stack.zero_grad(set_to_none=True)
                queue.begin(step)
                train_step(stack, topology, *tiny.batch(step), late=queue)
            queue.commit()
            with torch.no_grad():
                for parameter in stack.parameters():
                    parameter.add_(0.01)
    first, second = tiny.gradients(once), tiny.gradients(twice)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_queue_keeps_no_more_than_the_lateness(tiny: type[Tiny]) -> None:
    topology = TOPOLOGIES["thin-and-late"]
    stack, queue = tiny.gpt(topology), LateQueue()
    for step in range(6):
        queue.begin(step)
        train_step(stack, topology, *tiny.batch(step), late=queue)
        queue.commit()
    assert sorted(queue.batches) == [(3, 0), (4, 0), (5, 0)]
    assert [sorted(queue.batches[step, 0].received) for step in (3, 4, 5)] == [[0], [0, 1], [0, 1, 2]]
    assert queue.batches[5, 0].received[0] == [None], "tokens are enough where x0 is read"
    oldest = queue.batches[3, 0].weights
    assert any(n.startswith("layers.0.") for n in oldest)
    assert not any("layers.1." in n for n in oldest)


def test_a_late_stage_runs_forward_once_or_with_recompute_again(tiny: type[Tiny]) -> None:
    topology, ran = TOPOLOGIES["two-late"], {}
    for recompute in (False, True):
        stack, queue = tiny.gpt(topology), LateQueue()
        calls: list[int] = []
        stack.layers[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        for step in range(4):
            queue.begin(step)
            train_step(stack, topology, *tiny.batch(step), late=queue, recompute=recompute)
            queue.commit()
        ran[recompute] = len(calls)
    assert ran == {False: 4, True: 4 + 2}, "two batches are learned from"


def test_a_graph_outlives_steps_of_an_optimizer_and_is_gone_when_used(tiny: type[Tiny]) -> None:
    topology = TOPOLOGIES["late"]
    stack, queue = tiny.gpt(topology), LateQueue()
    for step in range(3):
        queue.begin(step)
        train_step(stack, topology, *tiny.batch(step), late=queue)
        queue.commit()
        with torch.no_grad():
            for parameter in stack.parameters():
                parameter.mul_(1.01)  # in place, as optimizers do
    held = {key: sorted(live.held) for key, live in queue._live.items()}
    assert held == {(1, 0): [0], (2, 0): [0, 1]}


def test_weights_are_put_back(tiny: type[Tiny]) -> None:
    stack = tiny.gpt()
    before = {name: p.clone() for name, p in stack.named_parameters()}
    own, head = dict(stack.named_parameters()), stack.head
    with with_weights(Places(stack), {n: (p + 1).detach() for n, p in before.items()}):
        assert torch.equal(head.weight, before["head.weight"] + 1)
        head.weight.sum().backward()
    gradient = own["head.weight"].grad
    assert gradient is not None
    assert torch.equal(gradient, torch.ones_like(gradient)), "a copy's gradient is the parameter's"
    assert all(p is own[n] and torch.equal(p, before[n]) for n, p in stack.named_parameters())


@pytest.mark.parametrize(
    ("change", "allowed"),
    [({"objective": "residual"}, "objective residual"), ({"teacher": True}, "a teacher"), ({}, "no queue")],
)
def test_what_cannot_run_again_is_refused(change: dict[str, object], allowed: str, tiny: type[Tiny]) -> None:
    objective = str(change.get("objective", "cross-entropy"))
    topology = Topology.chain("2,2", grad_scale=1.0, objective=objective).with_gradient(delay=1)
    stack, (inputs, targets) = tiny.gpt(topology), tiny.batch()
    teacher = tiny.teacher(inputs) if "teacher" in change else None
    late = LateQueue() if change else None
    with refused(ConfigError, setting="delay", given=1) as caught:
        train_step(stack, topology, inputs, targets, teacher=teacher, late=late)
    assert allowed in str(caught.value)


def test_dropout_in_a_late_stage_is_refused(tiny: type[Tiny]) -> None:
    topology = TOPOLOGIES["two-late"]
    stack = tiny.gpt(topology)
    stack.layers[0].add_module("drop", torch.nn.Dropout(0.1))
    with refused(ConfigError, setting="delay"):
        train_step(stack, topology, *tiny.batch(), late=LateQueue())
    stack.eval()
    train_step(stack, topology, *tiny.batch(), late=LateQueue())


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_queue_that_was_saved_continues_bit_for_bit(name: str, tiny: type[Tiny]) -> None:
    topology, found = TOPOLOGIES[name], []
    for interrupted in ((), range(6), (3,)):
        stack, queue = tiny.gpt(topology), LateQueue()
        optimizer = torch.optim.AdamW(stack.parameters(), lr=0.01)
        for step in range(6):
            if step in interrupted:
                saved = {name: tensor.clone() for name, tensor in queue.tensors(0).items()}
                queue = LateQueue()
                queue.load(saved, range(4), torch.device("cpu"))
            queue.begin(step)
            for i in range(2):
                train_step(stack, topology, *tiny.batch(9 * step + i), draw=(5, step, i), late=queue)
            queue.commit()
            optimizer.step()
            stack.zero_grad(set_to_none=True)
        found.append([p.detach().clone() for p in stack.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))


def test_processes_with_some_of_the_stages_load_theirs(tiny: type[Tiny]) -> None:
    topology = TOPOLOGIES["thin-and-late"]
    stack, queue = tiny.gpt(topology), LateQueue()
    for step in range(3):
        queue.begin(step)
        train_step(stack, topology, *tiny.batch(step), late=queue)
        queue.commit()
    saved = queue.tensors(0)
    first, second = LateQueue(), LateQueue()
    first.load(saved, [0, 1], torch.device("cpu"))
    second.load(saved, [2, 3], torch.device("cpu"))
    assert sorted(first.batches[2, 0].received) == [0, 1]
    assert sorted(second.batches[2, 0].received) == [2]
    assert first.batches[2, 0].x0_gradient is not None
    assert second.batches[2, 0].x0_gradient is None
    assert {o.source for o in first.batches[1, 0].gradients} == {1}
    assert {o.source for o in second.batches[2, 0].gradients} == {2}
