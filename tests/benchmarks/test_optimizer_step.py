"""The bench measures what it says, on a GPT's shapes."""

import pytest
import torch

from optimizer_step import MEMORY_GOAL, OptimizerSettings, bench_optim, gpt_parameters, state_bytes
from topograd.errors import ConfigError

TINY = OptimizerSettings(layers=2, width=8, vocab=16, repeats=3)


def test_readings() -> None:
    results = bench_optim(TINY)
    assert results["parameters"] == 3 * 16 * 8 + 2 * 12 * 8 * 8
    assert results["covered"] == 16 * 8 + 2 * 8 * 8 * 8
    spread = results["step_spread"]
    assert 0 < spread["low"] <= results["step_ratio_vs_adamw"] <= spread["high"]
    assert results["step_ratio_vs_fused"] > 0
    assert 1.0 < results["memory_ratio_vs_adamw"] <= MEMORY_GOAL  # two numbers for each pair


def test_the_default_has_ten_million_parameters_and_its_gauges_cover_them() -> None:
    parameters, gauges = gpt_parameters(OptimizerSettings())
    assert 9.5e6 < sum(tensor.numel() for tensor in parameters.values()) < 10.5e6
    for gauge in gauges:
        gauge.check(parameters)
    assert len(gauges) == OptimizerSettings().layers + 1


def test_state_is_counted_in_bytes() -> None:
    parameter = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert state_bytes(optimizer) == 40


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"repeats": 0}, {"vocab": 1}])
def test_settings_outside_their_range(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        OptimizerSettings(**wrong)  # type: ignore[arg-type]
