"""Regions on ranks give autograd's gradients in one process, and send what the formulas say."""

from types import ModuleType
from typing import Any

import pytest
import torch

from topograd.runs.checkpoint import load
from topograd.runs.config import OptimizerConfig
from topograd.training.loop import TrainingLoop
from topograd.training.optimizers import make_optimizers

REGIONS = {"partition": "1,1,1,1,1", "interface": "S=4,r=4"}


@pytest.mark.parametrize(("world", "recompute"), [(2, False), (3, True), (4, False)])
def test_losses_and_weights_are_those_of_autograd(
    world: int, recompute: bool, launch: Any, server: ModuleType
) -> None:
    job = launch(
        "steps",
        world,
        parallel=f"stages={world}",
        topology=REGIONS,
        accumulate=2,
        shape={"layers": 5},
        recompute=recompute,
        clip=0.3,
    )
    stack, plan = server.model(REGIONS, layers=5)
    made = make_optimizers(stack, OptimizerConfig(name="adamw"), plan)
    loop = TrainingLoop(stack, made, clip=0.3)
    expected = [loop.step(plan, server.batches(step, 2), step + 1) for step in range(3)]
    results = job.results()
    for result in results:
        for ours, theirs in zip(result["steps"], expected, strict=True):
            assert ours["loss"][-1] == pytest.approx(float(theirs.losses[-1]), abs=1e-12, rel=0)
            assert ours["norm"] == pytest.approx(theirs.norm, rel=1e-10)
    mine, _ = server.model(REGIONS, layers=5)
    load(job.folder / "set" / "step-00000003", mine)
    for (name, a), b in zip(mine.state_dict().items(), stack.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=name)
    n, batch = 3 * 4, 2
    messages = (world - 1) * batch * n * 8  # bytes of a batch in float64, of all ranks
    products = world * (world - 1) * batch * n * (n + 1) * 8
    steps = 3 * 2
    assert sum(result["gathered"] for result in results) == steps * products
    assert sum(result["sent"] for result in results) == steps * messages + (world - 1) * 80
