"""The Jacobians' study looks when it should, and shows what it saw."""

import io
from typing import Any, get_args

import pytest
import torch
from rich.console import Console

from papers.latent_bounded_interfaces import jacobians as study
from topograd.nn.config import Architecture, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.runs.config import OptimizerConfig
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan


def test_it_looks_every_so_many_steps_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    stack = GPT(layers=4, width=8, heads=2, vocab=11, context=16)
    add_interfaces(stack, SegmentInterface.parse(study.INTERFACE), 4, 8, 16)
    plan = Plan.of(Topology.regions("1,1,1,1"), 4)

    def trained(case: Any, steps: int, watch: Any) -> None:
        assert (case.architecture, case.interface) == ("transformer", study.INTERFACE)
        assert case.optimizer == OptimizerConfig(lr_relay=0.5)
        for step in range(steps):
            inputs = torch.randint(11, (3, 16))
            watch(step, stack, plan, inputs, inputs)

    monkeypatch.setattr(study, "trained", trained)
    rows = study.watched("transformer", steps=8, every=3, relays=0.5)
    assert [row["step"] for row in rows] == [0, 3, 6, 7]
    assert all(len(row["local_norm"]) == 2 and len(row["adjoint_norm"]) == 3 for row in rows)
    assert all(parameter.grad is None for parameter in stack.parameters())
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(study.table("transformer", rows))
    text = console.export_text()
    assert "transformer, S=8,r=8,pool=tail" in text
    assert text.count("│") == 4 * 10


def test_what_is_named_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    def watched(architecture: str, steps: int, relays: float) -> list[dict[str, Any]]:
        asked.append((architecture, relays))
        return []

    monkeypatch.setattr(study, "watched", watched)
    study.main(["mamba3", "--relays", "0.25"])
    study.main([])
    usual = OptimizerConfig().lr_relay
    assert asked == [("mamba3", 0.25), *((name, usual) for name in get_args(Architecture))]
    with pytest.raises(SystemExit):
        study.main(["rnn"])
