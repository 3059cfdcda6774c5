"""Stages on several ranks train as they do in one process."""

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from topograd.runs.checkpoint import load
from topograd.runs.config import OptimizerConfig
from topograd.training.optimizers import make_optimizers
from topograd.training.step_runner import StepRunner

FREE: dict[str, Any] = {"bus": "detached", "heads": "own"}
NO_X0 = {"x0_blend": False}
LAST: dict[str, Any] = {"partition": "1,1,2", "grad_scale": 1.0, "weights": [0.0, 0.0, 1.0]}
"""Backprop in stages: one loss, at the end."""


def alone(
    server: ModuleType, topology: dict[str, Any], accumulate: int = 3, count: int = 3, **options: Any
) -> tuple[nn.Module, list[dict[str, Any]], Any]:
    """The same steps in this process."""
    stack, plan = server.model(topology, **options.pop("shape", {}))
    made = make_optimizers(stack, OptimizerConfig(name=options.pop("optimizer", "adamw")), plan)
    loop = StepRunner(stack, made, **options)
    found = []
    for step in range(count):
        done = loop.step(plan, server.batches(step, accumulate), step + 1)
        found.append({"loss": done.losses.tolist(), "norm": done.norm, "halted": list(done.halted)})
    return stack, found, made.optimizers


def saved(
    server: ModuleType, folder: Path, topology: dict[str, Any], **options: Any
) -> tuple[nn.Module, Any]:
    """The set that the ranks wrote, read in this process."""
    stack, plan = server.model(topology, **options.pop("shape", {}))
    made = make_optimizers(stack, OptimizerConfig(name=options.pop("optimizer", "adamw")), plan)
    load(folder / "set" / f"step-{options.pop('count', 3):08d}", stack, made.optimizers)
    return stack, made.optimizers


def worst(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


CASES: dict[str, Any] = {
    "chain": ({"partition": "2,2"}, 2, {}),
    "uneven": ({"partition": "1,3"}, 2, {"clip": 0.5}),
    "more stages than ranks": ({"partition": "1,1,1,1"}, 3, {"optimizer": "muon+adamw"}),
    "per-stage heads": ({"partition": "2,2", "heads": "per-stage"}, 2, {}),
    "residual": ({"partition": "1,1,2", "objective": "residual", "heads": "low-rank"}, 3, {}),
    "forest": ({"graph": "forest", "branches": ["2", "1,1"]}, 3, {}),
    "relay": ({"partition": "2,2", "relay": "gate"}, 2, {}),
    "gradient": ({"partition": "2,2", "grad_scale": 1.0}, 2, {"clip": 0.5}),
    "gradient over three ranks": (
        {"partition": "1,1,1,1", "grad_scale": 0.5},
        3,
        {"accumulate": 5, "optimizer": "muon+adamw"},
    ),
    "gradient across some": ({"partition": "1,1,2", "grad_scales": [0.0, 1.0]}, 3, {"clip": 0.5}),
    "gradient through a gate": ({"partition": "2,2", "grad_scale": 1.0, "relay": "gate"}, 2, {}),
    "thin": ({"partition": "1,1,2", "grad_scale": 1.0, "grad_bits": 4}, 3, {"seed": 3}),
    "late": ({"partition": "1,1,2", "grad_scale": 1.0, "grad_delay": 1}, 3, {"clip": 0.5}),
    "late, more stages than ranks": ({"partition": "1,1,1,1", "grad_scale": 1.0, "grad_delay": 1}, 2, {}),
    "thin and late": (
        {"partition": "2,2", "grad_scale": 1.0, "grad_delay": 2, "grad_bits": 3, "bus": "detached"},
        2,
        {"accumulate": 12, "count": 4},
    ),
    "one loss": (LAST, 3, {"clip": 0.5}),
    "one loss, no x0": (LAST, 3, {"clip": 0.5, "shape": NO_X0, "optimizer": "muon+adamw"}),
    "one late loss, no x0": (LAST | {"grad_delay": 1}, 3, {"clip": 0.5, "shape": NO_X0, "count": 4}),
    "tied ends": (LAST, 3, {"clip": 0.5, "shape": NO_X0 | {"tied": True}}),
    "late tied ends": (
        LAST | {"grad_delay": 1},
        3,
        {"clip": 0.5, "shape": NO_X0 | {"tied": True}, "count": 4},
    ),
    "mixed": ({"graph": "stages", "stages": "mixed"}, 4, {"count": 4}),
    "mixed on two": ({"graph": "stages", "stages": "mixed"}, 2, {"count": 4}),
}


@pytest.mark.covers("gpt", "parallel")
@pytest.mark.covers("gpt", "parallel", feature="topologies")
@pytest.mark.covers("gpt", "parallel", feature="objectives")
@pytest.mark.covers("gpt", "parallel", feature="relays")
@pytest.mark.parametrize("name", CASES)
def test_ranks_give_the_losses_and_weights_of_one_process(name: str, launch: Any, server: ModuleType) -> None:
    topology, world, options = CASES[name]
    job = launch("steps", world, parallel=f"stages={world}", topology=topology, **options)
    stack, expected, optimizers = alone(server, topology, **options)
    for result in job.results():  # every rank knows every loss
        for ours, theirs in zip(result["steps"], expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-12, rel=0, nan_ok=True)
            assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-12)
    ours, loaded = saved(server, job.folder, topology, **options)
    assert worst(ours, stack) < 1e-12  # sums of shared gradients are taken in another order
    for title, optimizer in optimizers.items():
        mine, its = loaded[title].state_dict(), optimizer.state_dict()
        assert mine["param_groups"] == its["param_groups"]
        assert mine["state"].keys() == its["state"].keys()
        for index, entries in its["state"].items():
            assert mine["state"][index].keys() == entries.keys()


def test_what_shares_nothing_is_the_same_bit_for_bit(launch: Any, server: ModuleType) -> None:
    topology = {"partition": "1,1,2"} | FREE
    job = launch("steps", 3, parallel="stages=3", topology=topology, shape=NO_X0, optimizer="muon+adamw")
    stack, expected, _ = alone(server, topology, shape=NO_X0, optimizer="muon+adamw")
    for result in job.results():
        assert [step["loss"] for step in result["steps"]] == [step["loss"] for step in expected]
    ours, _ = saved(server, job.folder, topology, shape=NO_X0, optimizer="muon+adamw")
    for (name, a), b in zip(ours.state_dict().items(), stack.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.covers("gpt", "parallel", feature="shards")
@pytest.mark.covers("gpt", "parallel", feature="recompute")
@pytest.mark.parametrize(("shard", "recompute"), [("", False), (",shard", False), (",shard", True)])
def test_replicas_share_the_batches_of_a_step(
    shard: str, recompute: bool, launch: Any, server: ModuleType
) -> None:
    """As copies of their stage, and with a shard of its layers each."""
    topology = {"partition": "1,1,2"}
    options: dict[str, Any] = {"accumulate": 4, "clip": 0.5}
    job = launch(
        "steps", 4, parallel=f"stages=2,replicas=2{shard}", topology=topology, recompute=recompute, **options
    )
    stack, expected, optimizers = alone(server, topology, **options)
    for result in job.results():
        for ours, theirs in zip(result["steps"], expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-12, rel=0)
            assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-12)
    ours, loaded = saved(server, job.folder, topology)
    assert worst(ours, stack) < 1e-12
    mine, its = (made["adamw"].state_dict()["state"] for made in (loaded, optimizers))
    for index, entries in its.items():
        assert float((mine[index]["exp_avg"] - entries["exp_avg"]).abs().max()) < 1e-12


@pytest.mark.parametrize("delay", [0, 1])
def test_replicas_exchange_gradient_each_for_itself(delay: int, launch: Any, server: ModuleType) -> None:
    edge = {"grad_scale": 1.0, "grad_bits": 8, "grad_delay": delay}
    topology: dict[str, Any] = {"partition": "1,1,2"} | edge
    options: dict[str, Any] = {"accumulate": 4, "clip": 0.5}
    job = launch("steps", 4, parallel="stages=2,replicas=2", topology=topology, **options)
    stack, expected, _ = alone(server, topology, **options)
    for result in job.results():
        for ours, theirs in zip(result["steps"], expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-12, rel=0)
    ours, _ = saved(server, job.folder, topology)
    assert worst(ours, stack) < 1e-12


def test_four_bits_send_an_eighth_of_float32_back(launch: Any) -> None:
    """Per position of width 16 in float32: 64 bytes forward; back 64, or 8 and a scale of 4."""
    sent = {}
    for bits in (32, 4):
        topology = {"partition": "2,2", "grad_scale": 1.0, "grad_bits": bits}
        job = launch("steps", 2, parallel="stages=2", topology=topology, shape={"double": False})
        sent[bits] = [result["sent"] for result in job.results()]
    positions = 3 * 3 * 2 * 8  # steps, batches, sequences, tokens
    assert [sent[32][1], sent[4][1]] == [positions * 64, positions * (8 + 4)]
    assert sent[32][0] == sent[4][0], "forward all is as it was"


def test_what_one_rank_uses_is_not_added_up(launch: Any) -> None:
    """In bytes of a rank and step: three losses, one norm of a group, one of the rest, who stops, to two
    others; and, where the first and the last rank share a table of 23 x 16, its sum with a flag."""
    numbers, table = 2 * 8 * (3 + 1 + 2), 8 * (23 * 16 + 1)
    for shape, expected in (
        (NO_X0, [numbers, numbers, numbers]),
        (NO_X0 | {"tied": True}, [numbers + table, numbers, numbers + table]),
    ):
        job = launch("steps", 3, parallel="stages=3", topology=LAST, shape=shape)
        assert [result["added"] / 3 for result in job.results()] == expected


@pytest.mark.parametrize(
    ("edge", "halted"), [({}, [1, 2]), ({"grad_bits": 4}, [1, 2]), ({"grad_delay": 1}, [2])]
)
def test_what_exchanges_gradient_without_delay_breaks_together(
    edge: dict[str, Any], halted: list[int], launch: Any
) -> None:
    topology = {"partition": "1,1,2", "grad_scales": [0.0, 1.0]} | edge
    job = launch("steps", 3, parallel="stages=3", topology=topology, broken=2)
    for result in job.results():
        assert result["steps"][0]["halted"] == halted
        assert all(not step["halted"] for step in result["steps"][1:])
        assert all(math.isfinite(step["loss"][0]) for step in result["steps"])


def test_a_stage_that_breaks_is_halted_on_all_ranks(launch: Any) -> None:
    job = launch("steps", 2, parallel="stages=2", topology={"partition": "2,2"}, broken=2)
    for result in job.results():
        assert result["steps"][0]["halted"] == [1]
        assert all(math.isfinite(step["loss"][0]) for step in result["steps"])


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_slows_the_others_and_breaks_nothing(slow: int, launch: Any, server: ModuleType) -> None:
    """Late at every step; what is waited, and for how long at most, is in test_ranks.py."""
    topology = {"partition": "2,2"}
    job = launch("steps", 2, parallel="stages=2", topology=topology, slow={str(slow): 0.1})
    _, expected, _ = alone(server, topology)
    for result in job.results():
        for ours, theirs in zip(result["steps"], expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-12, rel=0)
