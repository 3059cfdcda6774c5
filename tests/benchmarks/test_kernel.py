"""The benchmark at a small size: what it says, not how fast it is."""

import json
from typing import Any

import pytest
import torch

import kernel as bench
from calls import shown
from kernel import Settings, bench_kernel, kernel_table, main
from raising import refused
from tests.oracles.ntk import empirical_ntk
from topograd.errors import ConfigError

SMALL = Settings(
    examples=12,
    width=24,
    depth=4,
    growth_examples=8,
    growth_width=8,
    growth_depth=2,
    transport_examples=6,
    transport_width=16,
    rounds=2,
)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(bench_kernel(SMALL), allow_nan=False))
    return found


def test_both_ways_give_one_kernel(results: dict[str, Any]) -> None:
    row = results["kernel"]
    assert row["relative_difference"] < 1e-5  # float32
    assert row["peak_bytes"]["Jacobians"] >= 4 * 12 * 4 * 24 * 24
    assert row["smaller"]["ratio"] == row["peak_bytes"]["Jacobians"] / row["peak_bytes"]["fields"]
    assert row["smaller"]["met"] == (row["smaller"]["ratio"] >= 20)
    assert row["faster"]["met"] == (row["faster"]["median"] >= 50)


def test_growth_doubles_one_size_at_a_time(results: dict[str, Any]) -> None:
    sizes = {row["doubled"]: (row["examples"], row["width"], row["depth"]) for row in results["growth"]}
    assert sizes == {"": (8, 8, 2), "M": (16, 8, 2), "N": (8, 16, 2), "L": (8, 8, 4)}
    assert all("met" not in row["faster"] for row in results["growth"])


def test_transport_beside_its_matrices(results: dict[str, Any]) -> None:
    said = results["transport"]
    assert said["as_matrices_bytes"] == 8 * 3 * (6 * 16) ** 2
    fields = 8 * 6 * 16 * 4  # one field of every layer
    assert fields < said["peak_bytes"] < said["as_matrices_bytes"]
    assert said["met"]
    assert said["matrices_fit"]


def test_the_size_that_matrices_do_not_fit() -> None:
    said = bench._transport(Settings())
    assert (said["examples"], said["width"], said["depth"]) == (64, 256, 6)
    assert said["met"]
    assert not said["matrices_fit"]


def test_ratios_are_of_the_right_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench, "take_turns", lambda *_, **__: {"fields": [0.5, 0.5], "Jacobians": [30.0, 40.0]}
    )
    assert bench._kernel_row(4, 4, 1, 2)["faster"]["median"] == 70
    assert bench._kernel_row(4, 4, 1, 2)["faster"]["met"]


def test_bad_settings() -> None:
    with refused(ConfigError, setting="rounds", given=0):
        Settings(rounds=0)


def test_the_peer_is_the_oracle() -> None:
    weights, inputs = bench._random_network(3, 6, 4, torch.float64)
    expected = torch.stack(empirical_ntk(weights, inputs)).sum(0)
    torch.testing.assert_close(bench._by_jacobians(weights, inputs), expected, rtol=1e-13, atol=0)


def test_as_json_and_as_a_table(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "bench_kernel", lambda settings: results)
    main(SMALL, json=True)
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert list(found) == ["threads", "settings", "kernel", "growth", "transport"]
    assert (found["settings"]["examples"], found["kernel"]["width"]) == (12, 24)
    assert said.err.startswith("topograd: measuring kernels")
    main(SMALL)
    told = capsys.readouterr().out
    assert "K from fields against Jacobians" in told
    assert told.count("│ ") > 5


def test_the_kernel_table_fits_a_terminal() -> None:
    spread = {"median": 123.45, "low": 120.04, "high": 130.06}
    row: dict[str, Any] = {"examples": 512, "width": 512, "depth": 6, "relative_difference": 3e-7}
    row |= {"seconds": {"fields": {"median": 0.0567}}, "peak_bytes": {"fields": 36 * 2**20}}
    row |= {
        "faster": {**spread, "goal": 50.0, "met": True},
        "smaller": {"ratio": 88.8, "goal": 20.0, "met": True},
    }
    change = {"examples": 64, "width": 256, "depth": 6, "peak_bytes": 2**22, "as_matrices_bytes": 2**34}
    results = {"threads": 2, "kernel": row, "growth": [row], "transport": {**change, "met": True}}
    table = shown(kernel_table(results))
    assert "│ 512 │ 512 │ 6 │ 56.7 │  123.5 │ 120.0–130.1 │ 36.0 │    88.8 │  3e-07 │" in table
    words = " ".join(table.split())
    assert "goals 50 and 20; Δb for M = 64, N = 256, L = 6: 4.0 MiB, as matrices 16.0 GiB; goals met" in words
    assert "…" not in table
    missed = {**row, "smaller": {**row["smaller"], "met": False}}
    assert "goals not met" in " ".join(shown(kernel_table({**results, "kernel": missed})).split())
