"""Every engine, way and scan against the one graph of `reference/`: loss, adjoints, all gradients."""

from dataclasses import replace
from functools import cache
from typing import Any, get_args
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from raising import refused
from tests.oracles.interfaces import interface_forward, interface_loss
from topograd.errors import ConfigError, StackError, TopologyError
from topograd.exec.gradient import Autograd, GradientEngine
from topograd.exec.objectives import CrossEntropy, Distillation
from topograd.exec.train_step import train_step
from topograd.interfaces.engines import Hybrid, Scan
from topograd.nn.config import ARCHITECTURES, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.layer_dropout import dropped_layers
from topograd.runs.topology_config import Backward, TopologyConfig
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.optimizers import OptimizerSet
from topograd.training.step_runner import StepRunner, engine_of

VOCAB, CONTEXT = 11, 12
TAIL = SegmentInterface(segments=4, rank=4)
INTERFACES = {
    "tail": TAIL,
    "mean": SegmentInterface(segments=4, rank=4, pool="mean", maps="gated"),
    "cumulative": SegmentInterface(segments=3, rank=5, pool="cumulative", maps="linear"),
    "published": SegmentInterface(segments=1, rank=4, pool="mean", causal=False),
}
ENGINES: dict[str, GradientEngine] = {
    "autograd": Autograd(),
    "loop": Scan(),
    "loop-untrimmed": Scan(trimmed=False),
    "batched": Scan("batched"),
    "batched-untrimmed-chunks": Scan("batched", 1, trimmed=False),
    "forward": Scan("forward"),
    "forward-chunks": Scan("forward", 3),
    "pullback": Scan("pullback"),
    "pullback-chunks": Scan("pullback", 1),
    "tree": Scan(scan="tree"),
    "chunked": Scan(scan="chunked"),
    "hybrid": Hybrid(),
    "hybrid-0": Hybrid(carried=0),
    "hybrid-all": Hybrid(carried=2),
    "hybrid-tree-batched": Hybrid("batched", scan="tree", carried=1),
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
    losses = train_step(stack, topology, *batch(), gradient=ENGINES[way])
    assert_same(taken(stack), expected)
    torch.testing.assert_close(losses[-1], loss, rtol=1e-14, atol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("way", ["autograd", "loop", "batched", "forward-chunks", "hybrid"])
def test_every_architecture(architecture: str, way: str) -> None:
    stack, topology = model(TAIL, "1,1,1,1", architecture=architecture)
    _, expected = slow(stack, topology, *batch())
    assert len(expected) == len(list(stack.parameters()))
    train_step(stack, topology, *batch(), gradient=ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("interface", ["tail", "cumulative", "published"])
def test_adjoints_are_the_gradients_of_the_messages(interface: str) -> None:
    stack, topology, _, _ = known(interface)
    inputs, targets = batch()
    logits, messages = interface_forward(stack, topology, inputs)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected = torch.stack([g.flatten(1) for g in torch.autograd.grad(loss, messages)])
    for engine in (Scan(), Hybrid(), Hybrid(carried=2)):
        train_step(stack, topology, inputs, targets, gradient=engine)
        stack.zero_grad(set_to_none=True)
        assert engine.adjoints is not None
        torch.testing.assert_close(engine.adjoints, expected, rtol=1e-11, atol=1e-15)


def test_what_a_step_reports() -> None:
    stack, topology, _, _ = known("tail")

    scan, hybrid, carried = Scan(), Hybrid(), Hybrid(carried=2)
    for engine in (scan, hybrid, carried):
        train_step(stack, topology, *batch(), gradient=engine)
        stack.zero_grad(set_to_none=True)
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
    train_step(stack, topology, *batch(), gradient=ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("way", ["autograd", "loop", "batched", "pullback", "hybrid"])
def test_tied_head_and_shared_layer(way: str) -> None:
    stack, topology = model(TAIL, "1,1,1,1", tied=True, softcap=4.0)
    stack.layers[2] = stack.layers[1]  # two regions share their parameters
    _, expected = slow(stack, topology, *batch())
    assert len(expected) == len(list(stack.parameters()))
    train_step(stack, topology, *batch(), gradient=ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("way", ["autograd", "loop", "hybrid"])
def test_gradients_are_scaled_and_added(way: str) -> None:
    stack, topology, loss, expected = known("tail")
    train_step(stack, topology, *batch(), gradient=ENGINES[way], scale=0.25)
    losses = train_step(stack, topology, *batch(), gradient=ENGINES[way], scale=0.5)
    assert_same(taken(stack), {name: 0.75 * g for name, g in expected.items()})
    torch.testing.assert_close(losses[-1], loss, rtol=1e-14, atol=0)


@pytest.mark.parametrize("way", ["autograd", "loop", "batched", "pullback", "hybrid"])
@pytest.mark.parametrize("time", [10, 9])
def test_inputs_shorter_than_the_context(way: str, time: int) -> None:
    stack, topology, _, _ = known("mean")
    _, expected = slow(stack, topology, *batch(time))
    train_step(stack, topology, *batch(time), gradient=ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("way", ["autograd", "loop", "forward-chunks", "pullback", "hybrid-all"])
def test_frozen_parameters_get_none(way: str) -> None:
    stack, topology = model(TAIL, "1,1,1,1")
    frozen = ("embedding", "previous", "layers.0", "relays.interface-1.encode", "layers.2")
    for name, parameter in stack.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    _, expected = slow(stack, topology, *batch())
    assert not any(name.startswith(frozen) for name in expected)
    train_step(stack, topology, *batch(), gradient=ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float32_to_one_part_in_a_million_of_them_all(architecture: str) -> None:
    stack, topology = model(TAIL, "1,1,1,1", torch.float32, architecture=architecture)
    grads = []
    for way in ("autograd", "loop"):
        train_step(stack, topology, *batch(), gradient=ENGINES[way])
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
    train_step(stack, topology, *batch(), gradient=ENGINES[way])
    assert_same(taken(stack), expected)


@pytest.mark.parametrize("engine", ["autograd", "loop", "hybrid"])
def test_a_step_returns_the_losses_of_all_regions(engine: str) -> None:
    stack, topology = model(TAIL, "2,1,2,1")
    plan = Plan.of(topology, len(stack.layers))
    losses = train_step(stack, plan, *batch(), scale=0.5)
    expected = taken(stack)
    found = train_step(stack, plan, *batch(), gradient=ENGINES[engine], scale=0.5)
    assert_same(taken(stack), expected)
    assert found.shape == (4,)
    assert found[:3].isnan().all()
    torch.testing.assert_close(found[3], losses[3], rtol=1e-14, atol=0)
    assert not found.requires_grad


EVERY = [name for name in ENGINES if name != "autograd"]
"""What must take whatever autograd takes."""


@pytest.mark.parametrize("way", EVERY)
def test_objectives_and_a_teacher(way: str) -> None:
    stack, topology = model(TAIL, "1,1,1,1")
    last = replace(topology.stages[-1], objective="distillation")
    plan = Plan.of(replace(topology, stages=(*topology.stages[:-1], last)), len(stack.layers))
    logits = torch.randn(2 * CONTEXT, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    shown: dict[str, Any] = {"teacher": lambda rows: logits[rows]}
    for objectives in (None, {"distillation": Distillation(mix=0.9)}, {"distillation": CrossEntropy(0.1)}):
        losses = train_step(stack, plan, *batch(), **shown, objectives=objectives)
        expected = taken(stack)
        found = train_step(stack, plan, *batch(), **shown, objectives=objectives, gradient=ENGINES[way])
        assert_same(taken(stack), expected)
        torch.testing.assert_close(found, losses, rtol=1e-13, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", EVERY)
def test_a_loss_of_every_third_token(way: str) -> None:
    stack, topology = model(TAIL, "1,1,1,1")
    last = replace(topology.stages[-1], every=3)
    plan = Plan.of(replace(topology, stages=(*topology.stages[:-1], last)), len(stack.layers))
    losses = train_step(stack, plan, *batch())
    expected = taken(stack)
    found = train_step(stack, plan, *batch(), gradient=ENGINES[way])
    assert_same(taken(stack), expected)
    torch.testing.assert_close(found, losses, rtol=1e-13, atol=0, equal_nan=True)
    assert not torch.equal(losses[-1], train_step(stack, topology, *batch())[-1])


@pytest.mark.parametrize("interface", ["tail", "mean"])
@pytest.mark.parametrize("way", [name for name in EVERY if not name.startswith("pullback")])
def test_layers_that_are_left_out_are_left_out_wherever_they_run_again(way: str, interface: str) -> None:
    stack, topology, _, whole = known(interface)

    def gradients(engine: GradientEngine) -> dict[str, Tensor]:
        torch.manual_seed(3)
        with dropped_layers(stack.layers, [0.5] * len(stack.layers)):
            train_step(stack, topology, *batch(), gradient=engine)
        return taken(stack)

    expected = gradients(Autograd())
    assert any(not torch.equal(g, whole[name]) for name, g in expected.items()), "something was left out"
    shown = {name: g for name, g in gradients(ENGINES[way]).items() if expected[name].any()}
    assert_same(shown, {name: g for name, g in expected.items() if g.any()})


@pytest.mark.parametrize("way", ["loop", "hybrid"])
def test_what_is_refused_in_one_line_and_changes_nothing(way: str) -> None:
    stack, topology = model(TAIL, "1,1,1,1")
    frozen = Plan.of(topology, len(stack.layers)).halted([0])
    cases: list[tuple[Topology | Plan, dict[str, Any], str]] = [
        (frozen, {}, "weight"),
        (topology, {"states": {1: torch.zeros(2, CONTEXT, 8)}}, "states"),
        (topology, {"transport": object()}, "transport"),
    ]
    for given, settings, setting in cases:
        with refused(ValueError, setting=setting):
            train_step(stack, given, *batch(), **settings, gradient=ENGINES[way])
        assert all(p.grad is None for p in stack.parameters())


def test_a_pullback_refuses_what_its_formulas_do_not_know() -> None:
    stack, topology = model(TAIL, "1,1,1,1")
    two, few = model(TAIL, "2,2", architecture="mamba2")
    with dropped_layers(stack.layers, [0.1] * 4), refused(ConfigError, setting="jacobian", given="pullback"):
        train_step(stack, topology, *batch(), gradient=Scan("pullback"))
    with torch.autocast("cpu", torch.bfloat16), refused(StackError, setting="jacobian", given="pullback"):
        train_step(stack, topology, *batch(), gradient=Scan("pullback"))
    with refused(StackError, setting="jacobian", given="pullback"):
        train_step(*model(TAIL, "1,1,1", architecture="mamba2"), *batch(), gradient=Scan("pullback"))
    assert all(p.grad is None for p in stack.parameters())
    assert train_step(two, few, *batch(), gradient=Scan("pullback"))[-1] > 0, "two regions have no Jacobian"


@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize("interface", ["tail", "mean"])
def test_layers_that_run_again_give_the_same_gradients(way: str, interface: str) -> None:
    """By autograd bit for bit; a scan takes Jacobians of a second forward, which rounds as the first does."""
    stack, topology, _, expected = known(interface)
    losses = train_step(stack, topology, *batch(), gradient=ENGINES[way])
    kept = taken(stack)
    again = train_step(stack, topology, *batch(), gradient=ENGINES[way], recompute=True)
    torch.testing.assert_close(again, losses, rtol=0 if way == "autograd" else 1e-14, atol=0, equal_nan=True)
    found = taken(stack)
    assert_same(found, kept, 0 if way == "autograd" else 1e-13)
    assert_same(found, expected)


@pytest.mark.parametrize("way", ["autograd", "loop", "pullback", "hybrid"])
def test_less_is_saved_where_layers_run_again(way: str) -> None:
    stack, topology = model(TAIL, "3,3,3")

    def most_saved(recompute: bool) -> int:
        saved: WeakSet[Tensor] = WeakSet()
        peak = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal peak
            kept = tensor.detach()
            saved.add(kept)
            peak = max(peak, sum(one.numel() for one in saved))
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            train_step(stack, topology, *batch(), gradient=ENGINES[way], recompute=recompute)
        taken(stack)
        return peak

    assert most_saved(True) < 0.75 * most_saved(False)


def test_products_of_jacobians_are_not_rounded_to_bfloat16() -> None:
    """Q (Qᵀ J) has columns of mean zero, to float32's rounding and not to bfloat16's."""
    stack, topology = model(TAIL, "1,1,1,1", torch.float32)
    engine = Scan()
    with torch.autocast("cpu", torch.bfloat16):
        train_step(stack, topology, *batch(), gradient=engine)
    assert engine.jacobians is not None
    assert engine.adjoints is not None
    assert engine.jacobians.dtype == engine.adjoints.dtype == torch.float32
    means = engine.jacobians.unflatten(2, (3, 4)).mean(3)
    assert means.abs().max() < 1e-6 * engine.jacobians.abs().max()


def test_a_step_runner_may_choose_its_backward() -> None:
    """By the names that a run's settings have."""
    trained = {}
    for engine in get_args(Backward):
        stack, topology = model(TAIL, "1,1,1,1")
        plan = Plan.of(topology, len(stack.layers))
        optimizers = OptimizerSet.of(torch.optim.SGD(stack.parameters(), lr=0.1))
        settings = TopologyConfig(partition="1,1,1,1", interface="S=4,r=4", backward=engine)
        loop = StepRunner(stack, optimizers, gradient=engine_of(settings))
        steps = [loop.step(plan, [batch(), batch(9)]) for _ in range(3)]
        trained[engine] = {name: p.detach() for name, p in stack.named_parameters()}
        assert [step.losses.isnan().tolist() for step in steps] == [[True, True, True, False]] * 3
        assert steps[2].losses[3] < steps[0].losses[3]
    for engine in ("scan", "hybrid"):
        assert_same(trained[engine], trained["autograd"])


def test_a_step_of_anything_else_needs_autograd() -> None:
    stack, _ = model(TAIL, "1,1,1,1")
    plan = Plan.of("2,2", len(stack.layers))
    assert train_step(stack, plan, *batch()).isfinite().all()
    taken(stack)
    with refused(TopologyError, setting="relay", given="identity"):
        train_step(stack, plan, *batch(), gradient=Scan())


@pytest.mark.parametrize(
    ("engine", "setting", "given"),
    [
        (Scan("magic"), "jacobian", "magic"),  # type: ignore[arg-type]
        (Scan(scan="magic"), "method", "magic"),  # type: ignore[arg-type]
        (Scan(chunk=0), "chunk", 0),
        (Scan(chunk=2), "chunk", 2),
        (Hybrid(carried=3), "carried", 3),
        (Hybrid(carried=-1), "carried", -1),
    ],
)
def test_bad_settings(engine: Scan, setting: str, given: object) -> None:
    stack, topology, _, _ = known("tail")
    with refused(ConfigError, setting=setting, given=given):
        train_step(stack, topology, *batch(), gradient=engine)
    stack.zero_grad(set_to_none=True)
