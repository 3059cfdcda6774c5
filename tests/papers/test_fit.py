"""One training as studies do it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from papers.fit import fit
from raising import refused
from topograd.errors import DivergenceError
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.runs.config import OptimizerConfig
from topograd.topology.plan import Plan


def model() -> tuple[GPT, Plan]:
    torch.manual_seed(0)
    stack = GPT(layers=2, width=16, heads=2, vocab=11, context=8)
    return stack, prepare(stack, "1,1")


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(11, (count, 2, 9), generator=torch.Generator().manual_seed(1))
    return [(rows[:, :-1], rows[:, 1:]) for rows in tokens]


def test_every_stage_learns_and_rates_follow_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, plan = model()
    before = {name: p.detach().clone() for name, p in stack.named_parameters()}
    seen: list[Any] = []

    def watch(step: int, stack: Any, plan: Any, inputs: Tensor, targets: Tensor) -> None:
        seen.append((step, inputs))

    given = batches(6)
    fit(stack, plan, given, 4, OptimizerConfig(), watch)
    assert [step for step, _ in seen] == [0, 1, 2, 3], "as many steps as were asked for"
    assert all(torch.equal(inputs, batch[0]) for (_, inputs), batch in zip(seen, given, strict=False))
    for layer in ("layers.0.", "layers.1."):
        assert any(
            not torch.equal(p, before[name]) for name, p in stack.named_parameters() if name.startswith(layer)
        )
    still, same = model()
    fit(still, same, given, 4, OptimizerConfig(lr_matrix=0.0, lr_embedding=0.0, lr_head=0.0, lr_scalar=0.0))
    assert all(torch.equal(p, before[name]) for name, p in still.named_parameters())


def test_a_stage_that_breaks_ends_it() -> None:
    stack, plan = model()
    with torch.no_grad():
        for parameter in stack.layers[1].parameters():
            parameter.fill_(float("nan"))
    with refused(DivergenceError, setting="sizes"):
        fit(stack, plan, batches(2), 2, OptimizerConfig())
