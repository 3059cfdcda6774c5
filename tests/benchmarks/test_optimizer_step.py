"""The bench measures what it says, on a GPT's shapes."""

import json
from typing import Any

import pytest
import torch

from calls import shown
from optimizer_step import MEMORY_GOAL, Settings, bench_optim, gpt_parameters, main, optim_table, state_bytes
from topograd.errors import ConfigError

TINY = Settings(layers=2, width=8, vocab=16, repeats=3)


def test_readings() -> None:
    results = bench_optim(TINY)
    assert results["parameters"] == 3 * 16 * 8 + 2 * 12 * 8 * 8
    assert results["covered"] == 16 * 8 + 2 * 8 * 8 * 8
    spread = results["step_spread"]
    assert 0 < spread["low"] <= results["step_ratio_vs_adamw"] <= spread["high"]
    assert results["step_ratio_vs_fused"] > 0
    assert 1.0 < results["memory_ratio_vs_adamw"] <= MEMORY_GOAL  # two numbers for each pair


def test_the_default_has_ten_million_parameters_and_its_gauges_cover_them() -> None:
    parameters, gauges = gpt_parameters(Settings())
    assert 9.5e6 < sum(tensor.numel() for tensor in parameters.values()) < 10.5e6
    for gauge in gauges:
        gauge.check(parameters)
    assert len(gauges) == Settings().layers + 1


def test_state_is_counted_in_bytes() -> None:
    parameter = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert state_bytes(optimizer) == 40


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"repeats": 0}, {"vocab": 1}])
def test_settings_outside_their_range(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        Settings(**wrong)  # type: ignore[arg-type]


def test_as_json_and_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(TINY, json=True)
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found.keys() >= {"step_ratio_vs_adamw", "memory_ratio_vs_adamw", "goals", "met"}
    assert found["settings"]["width"] == 8
    assert "measuring optimizer steps" in said.err
    main(TINY)
    assert "DDCAdam over AdamW" in capsys.readouterr().out


def test_the_bench_table() -> None:
    results: dict[str, Any] = {
        "parameters": 10_316_800,
        "covered": 5_900_000,
        "threads": 2,
        "memory_ratio_vs_adamw": 1.000004,
    }
    results |= {"step_ratio_vs_fused": 4.44, "step_ratio_vs_adamw": 1.62}
    results |= {"step_spread": {"low": 1.5, "median": 1.62, "high": 1.7}}
    results |= {
        "step_seconds": {"ddc_adam": {"median": 0.0324}, "adamw": {"median": 0.02}},
        "goals": {"step": 1.5, "memory": 1.1},
    }
    table = shown(optim_table(results))
    assert "DDCAdam over AdamW, 2 threads" in table
    assert "│ step  │  1.62 │ 1.50–1.70 │ ≤ 1.5 │  no │" in table
    assert "│ state │  1.00 │ 1.00–1.00 │ ≤ 1.1 │ yes │" in table
    assert "32.4 ms and 20.0 ms; gauges cover 5.9M of 10.3M parameters" in " ".join(table.split())
    assert "both fused, by processor time: 4.44" in " ".join(table.split())
