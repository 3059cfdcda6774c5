"""Every engine, way and scan against the one graph of `reference/`: loss, adjoints, all gradients."""

from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.oracles.interfaces import interface_forward, interface_loss
from topograd.errors import ConfigError, TopologyError
from topograd.interfaces.engines import Backward, backward, region_step
from topograd.interfaces.settings import BackwardEngine
from topograd.nn.config import ARCHITECTURES, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.executor import train_step
from topograd.training.loop import TrainingLoop
from topograd.training.objectives import CrossEntropy, Distillation
from topograd.training.optimizers import OptimizerSet

VOCAB, CONTEXT = 11, 12
TAIL = SegmentInterface(segments=4, rank=4)
INTERFACES = {
    "tail": TAIL,
    "mean": SegmentInterface(segments=4, rank=4, pool="mean", maps="gated"),
    "cumulative": SegmentInterface(segments=3, rank=5, pool="cumulative", maps="linear"),
    "published": SegmentInterface(segments=1, rank=4, pool="mean", causal=False),
}
ENGINES: dict[str, dict[str, Any]] = {
    "autograd": {"engine": "autograd"},
    "loop": {"engine": "scan"},
    "loop-untrimmed": {"engine": "scan", "trimmed": False},
    "batched": {"engine": "scan", "jacobian": "batched"},
    "batched-untrimmed-chunks": {"engine": "scan", "jacobian": "batched", "trimmed": False, "chunk": 1},
    "forward": {"engine": "scan", "jacobian": "forward"},
    "forward-chunks": {"engine": "scan", "jacobian": "forward", "chunk": 3},
    "pullback": {"engine": "scan", "jacobian": "pullback"},
    "pullback-chunks": {"engine": "scan", "jacobian": "pullback", "chunk": 1},
    "tree": {"engine": "scan", "scan": "tree"},
    "chunked": {"engine": "scan", "scan": "chunked"},
    "hybrid": {"engine": "hybrid"},
    "hybrid-0": {"engine": "hybrid", "carried": 0},
    "hybrid-all": {"engine": "hybrid", "carried": 2},
    "hybrid-tree-batched": {"engine": "hybrid", "carried": 1, "scan": "tree", "jacobian": "batched"},
}


def model(
    settings: SegmentInterface, partition: str, dtype: torch.dtype = torch.float64, **config: Any
) -> tuple[GPT, Topology]:
    """A GPT of regions with noise on every parameter."""
    topology = Topology.regions(partition)
    torch.manual_seed(0)
    sizes = {"layers": topology.layers, "width": 8, "heads": 2, "vocab": VOCAB, "context": CONTEXT}
    stack = GPT(**{**sizes, "ssm_state": 4, **config}).to(dtype)
    add_interfaces(stack, settings, len(topology.stages), 8, CONTEXT)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stack, topology


def batch(time: int = CONTEXT) -> tuple[Tensor, Tensor]:
    """Inputs and targets (2, time); two targets do not count."""
    inputs, targets = torch.randint(VOCAB, (2, 2, time), generator=torch.Generator().manual_seed(1))
    targets[0, 3] = targets[1, time - 1] = -100
    return inputs, targets


def taken(stack: GPT) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in stack.named_parameters() if p.grad is not None}
    stack.zero_grad(set_to_none=True)
    return grads


def slow(stack: GPT, topology: Topology, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = interface_loss(stack, topology, inputs, targets)
    loss.backward()
    return loss.detach(), taken(stack)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Each tensor by itself, relative to its own length."""
    assert actual.keys() == expected.keys()
    off = {name: float((actual[name] - g).norm() / g.norm()) for name, g in expected.items()}
    wrong = {name: error for name, error in off.items() if not error <= tolerance}
    assert not wrong, f"these gradients differ, relatively by: {wrong}"


@cache
def known(interface: str) -> tuple[GPT, Topology, Tensor, dict[str, Tensor]]:
    stack, topology = model(INTERFACES[interface], "2,1,2,1")
    return stack, topology, *slow(stack, topology, *batch())


MAIN = ("autograd", "loop", "loop-untrimmed", "batched", "forward-chunks", "pullback", "hybrid")


@pytest.mark.parametrize(
    ("interface", "way"),
    [*(("tail", way) for way in ENGINES), *((i, way) for i in INTERFACES if i != "tail" for way in MAIN)],
)
def test_every_gradient_is_the_reference_s(interface: str, way: str) -> None:
    stack, topology, loss, expected = known(interface)
    assert expected.keys() == dict(stack.named_parameters()).keys(), "every parameter reaches the loss"
    step = backward(stack, topology, *batch(), **ENGINES[way])
    assert_same(taken(stack), expected)
    torch.testing.assert_close(step.loss, loss, rtol=1e-14, atol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("way", ["autograd", "loop", "batched", "forward-chunks", "hybrid"])
def test_every_architecture(architecture: str, way: str) -> None:
    stack, topology = model(TAIL, "1,1,1,1", architecture=architecture)
    _, expected = slow(stack, topology, *batch())
    assert len(expected) == len(list(stack.parameters()))
    backward(stack, topology, *batch(), **ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("interface", ["tail", "cumulative", "published"])
def test_adjoints_are_the_gradients_of_the_messages(interface: str) -> None:
    stack, topology, _, _ = known(interface)
    inputs, targets = batch()
    logits, messages = interface_forward(stack, topology, inputs)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected = torch.stack([g.flatten(1) for g in torch.autograd.grad(loss, messages)])
    for name in ("loop", "hybrid", "hybrid-all"):
        adjoints = backward(stack, topology, inputs, targets, **ENGINES[name]).adjoints
        stack.zero_grad(set_to_none=True)
        assert adjoints is not None
        torch.testing.assert_close(adjoints, expected, rtol=1e-11, atol=1e-15)


def test_what_a_step_reports() -> None:
    stack, topology, _, _ = known("tail")

    def report(name: str) -> Backward:
        step = backward(stack, topology, *batch(), **ENGINES[name])
        stack.zero_grad(set_to_none=True)
        return step

    assert report("autograd").adjoints is None
    scan, hybrid, carried = report("loop"), report("hybrid"), report("hybrid-all")
    assert scan.jacobians is not None
    assert scan.jacobians.shape == (2, 2, 12, 12), "regions 1 and 2 of four"
    assert hybrid.jacobians is not None
    torch.testing.assert_close(hybrid.jacobians, scan.jacobians[:1], rtol=0, atol=0)
    assert carried.jacobians is None


@pytest.mark.parametrize("way", ["loop", "hybrid", "pullback"])
@pytest.mark.parametrize("partition", ["1,2", "2,1,1"])
def test_few_regions(partition: str, way: str) -> None:
    stack, topology = model(TAIL, partition)
    _, expected = slow(stack, topology, *batch())
    backward(stack, topology, *batch(), **ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("way", ["autograd", "loop", "batched", "pullback", "hybrid"])
def test_tied_head_and_shared_layer(way: str) -> None:
    stack, topology = model(TAIL, "1,1,1,1", tied=True, softcap=4.0)
    stack.layers[2] = stack.layers[1]  # two regions share their parameters
    _, expected = slow(stack, topology, *batch())
    assert len(expected) == len(list(stack.parameters()))
    backward(stack, topology, *batch(), **ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("way", ["autograd", "loop", "hybrid"])
def test_gradients_are_scaled_and_added(way: str) -> None:
    stack, topology, loss, expected = known("tail")
    backward(stack, topology, *batch(), **ENGINES[way], scale=0.25)
    step = backward(stack, topology, *batch(), **ENGINES[way], scale=0.5)
    assert_same(taken(stack), {name: 0.75 * g for name, g in expected.items()})
    torch.testing.assert_close(step.loss, loss, rtol=1e-14, atol=0)


@pytest.mark.parametrize("way", ["autograd", "loop", "batched", "pullback", "hybrid"])
@pytest.mark.parametrize("time", [10, 9])
def test_inputs_shorter_than_the_context(way: str, time: int) -> None:
    stack, topology, _, _ = known("mean")
    _, expected = slow(stack, topology, *batch(time))
    backward(stack, topology, *batch(time), **ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("way", ["autograd", "loop", "forward-chunks", "pullback", "hybrid-all"])
def test_frozen_parameters_get_none(way: str) -> None:
    stack, topology = model(TAIL, "1,1,1,1")
    frozen = ("embedding", "previous", "layers.0", "relays.interface-1.encode", "layers.2")
    for name, parameter in stack.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    _, expected = slow(stack, topology, *batch())
    assert not any(name.startswith(frozen) for name in expected)
    backward(stack, topology, *batch(), **ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float32_to_one_part_in_a_million_of_them_all(architecture: str) -> None:
    stack, topology = model(TAIL, "1,1,1,1", torch.float32, architecture=architecture)
    grads = []
    for way in ("autograd", "loop"):
        backward(stack, topology, *batch(), **ENGINES[way])
        grads.append(torch.cat([g.double().flatten() for g in taken(stack).values()]))
    assert (grads[1] - grads[0]).norm() <= 1e-6 * grads[0].norm()


@pytest.mark.parametrize("way", ["loop", "pullback", "hybrid"])
@pytest.mark.parametrize("change", ["detached bus", "half the weight"])
def test_what_a_topology_says_of_gradients_holds_for_every_engine(change: str, way: str) -> None:
    stack, topology = model(TAIL, "1,1,1,1")
    if change == "detached bus":
        topology = replace(topology, bus="detached")
    else:
        last = replace(topology.stages[-1], weight=0.5)
        topology = replace(topology, stages=(*topology.stages[:-1], last), reduction="sum")
    train_step(stack, topology, *batch())
    expected = taken(stack)
    backward(stack, topology, *batch(), **ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("engine", ["autograd", "scan", "hybrid"])
def test_a_region_step_is_a_train_step(engine: Any) -> None:
    stack, topology = model(TAIL, "2,1,2,1")
    plan = Plan.of(topology, len(stack.layers))
    losses = train_step(stack, plan, *batch(), scale=0.5)
    expected = taken(stack)
    found = region_step(stack, plan, *batch(), engine=engine, scale=0.5)
    assert_same(taken(stack), expected)
    assert found.shape == (4,)
    assert found[:3].isnan().all()
    torch.testing.assert_close(found[3], losses[3], rtol=1e-14, atol=0)
    assert not found.requires_grad


@pytest.mark.parametrize("engine", ["scan", "hybrid"])
def test_a_region_step_takes_other_objectives_and_a_teacher(engine: Any) -> None:
    stack, topology = model(TAIL, "1,1,1,1")
    last = replace(topology.stages[-1], objective="distillation")
    plan = Plan.of(replace(topology, stages=(*topology.stages[:-1], last)), len(stack.layers))
    logits = torch.randn(2 * CONTEXT, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    shown: dict[str, Any] = {"teacher": lambda rows: logits[rows]}
    for objectives in (None, {"distillation": Distillation(mix=0.9)}, {"distillation": CrossEntropy(0.1)}):
        losses = train_step(stack, plan, *batch(), **shown, objectives=objectives)
        expected = taken(stack)
        found = region_step(stack, plan, *batch(), engine=engine, **shown, objectives=objectives)
        assert_same(taken(stack), expected)
        torch.testing.assert_close(found, losses, rtol=1e-13, atol=0, equal_nan=True)


def test_a_training_loop_may_choose_its_backward() -> None:
    """By the names that a run's settings have."""
    trained = {}
    for engine in get_args(BackwardEngine):
        stack, topology = model(TAIL, "1,1,1,1")
        plan = Plan.of(topology, len(stack.layers))
        loop = TrainingLoop(
            stack, OptimizerSet.of(torch.optim.SGD(stack.parameters(), lr=0.1)), backward=engine
        )
        steps = [loop.step(plan, [batch(), batch(9)]) for _ in range(3)]
        trained[engine] = {name: p.detach() for name, p in stack.named_parameters()}
        assert [step.losses.isnan().tolist() for step in steps] == [[True, True, True, False]] * 3
        assert steps[2].losses[3] < steps[0].losses[3]
    for engine in ("scan", "hybrid"):
        assert_same(trained[engine], trained["autograd"])


def test_a_region_step_of_anything_else_needs_autograd() -> None:
    stack, _ = model(TAIL, "1,1,1,1")
    plan = Plan.of("2,2", len(stack.layers))
    assert region_step(stack, plan, *batch()).isfinite().all()
    taken(stack)
    with pytest.raises(TopologyError, match="region 2 reads through 'identity', which is no interface"):
        region_step(stack, plan, *batch(), engine="scan")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "magic"}, "engine 'magic' is unknown; choose one of autograd, scan, hybrid"),
        ({"engine": "scan", "jacobian": "magic"}, "jacobian 'magic' is unknown; choose one of loop"),
        ({"engine": "scan", "scan": "magic"}, "method='magic'; choose 'matvec', 'chunked' or 'tree'"),
        ({"engine": "scan", "chunk": 0}, "chunk is 0; it must be at least 1"),
        ({"engine": "hybrid", "carried": 3}, "carried is 3; of 4 regions, 0 to 2"),
        ({"engine": "hybrid", "carried": -1}, "carried is -1; of 4 regions, 0 to 2"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    stack, topology, _, _ = known("tail")
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        backward(stack, topology, *batch(), **settings)
    stack.zero_grad(set_to_none=True)
