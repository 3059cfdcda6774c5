"""Backprop over a pipeline gives the gradients of one process."""

from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shared_cores import pipeline_order
from topograd.exec.train_step import train_step


@pytest.mark.parametrize(("schedule", "world"), [("gpipe", 2), ("1f1b", 2), ("1f1b", 4)])
def test_gradients_are_those_of_one_process(
    schedule: str, world: int, launch: Any, server: ModuleType
) -> None:
    job = launch("backprop", world, parallel=f"stages={world}", schedule=schedule)
    stack, plan = server.model({"partition": "4"})
    rows = server.batches(0, 4)
    losses = [train_step(stack, plan, *row, scale=1 / 4)[0] for row in rows]
    results = job.results()
    assert results[-1]["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-12)
    seen: set[str] = set()
    for rank in range(world):
        for name, gradient in load_file(job.folder / f"{rank}.safetensors").items():
            expected = stack.get_parameter(name).grad
            assert expected is not None
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
            seen.add(name)
    assert seen == {name for name, p in stack.named_parameters() if p.grad is not None}


def test_1f1b_holds_as_many_batches_as_ranks_behind_it() -> None:
    for rank in range(4):
        open_, most = 0, 0
        order = pipeline_order("1f1b", rank, 4, 9)
        for kind, _ in order:
            open_ += 1 if kind == "F" else -1
            most = max(most, open_)
        assert most == 4 - rank
        assert sorted(order) == sorted(pipeline_order("gpipe", rank, 4, 9))
