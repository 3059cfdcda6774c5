"""The benchmark at a small size: what it says, not how fast it is."""

import json
from typing import Any

import pytest

import kernel as bench
from kernel import KernelSettings, bench_kernel
from topograd.errors import ConfigError

SMALL = KernelSettings(
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
    said = bench._transport(KernelSettings())
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
    with pytest.raises(ConfigError, match="rounds is 0; it must be at least 1"):
        KernelSettings(rounds=0)
