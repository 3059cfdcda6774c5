"""The comparisons that the command line prints, and that a wrong kernel would be seen in them."""

import json
from typing import Any

import pytest
import torch

from papers.gram_metrics import checks
from papers.gram_metrics.checks import compare_with_ntk, compare_with_weights, measure_order, random_problem
from papers.gram_metrics.kernel import Kernel, kernel
from papers.gram_metrics.network import FieldError


def test_the_kernel_against_jacobians() -> None:
    said = json.loads(json.dumps(compare_with_ntk(depth=3, width=16, examples=8, seed=1), allow_nan=False))
    assert said["relative_error_vs_ntk"] < 1e-12
    assert [layer["layer"] for layer in said["layers"]] == [1, 2, 3]
    assert max(layer["relative_error"] for layer in said["layers"]) < 1e-12
    assert sum(layer["share_of_trace"] for layer in said["layers"]) == pytest.approx(1)
    assert min(said["seconds"], said["seconds_reference"]) > 0


def test_a_wrong_kernel_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> Kernel:
        right = kernel(*given)
        return Kernel(1.001 * right.total, right.layers)

    monkeypatch.setattr(checks, "kernel", wrong)
    assert compare_with_ntk(2, 8, 4)["relative_error_vs_ntk"] == pytest.approx(1e-3, rel=1e-6)


@pytest.mark.parametrize(("depth", "steps"), [(1, 60), (3, 20)])
def test_a_run_against_weights(depth: int, steps: int) -> None:
    said = json.loads(json.dumps(compare_with_weights(depth, 16, 12, steps), allow_nan=False))
    assert said["max_abs_error_vs_weights"] < 1e-12
    assert said["mask_crossings"] == said["mask_crossings_in_weights"] > 0
    assert said["last_loss"] < said["first_loss"]
    assert said["frozen_max_abs_error"] > said["relinearised_max_abs_error"] > 1e-6


def test_the_order_of_the_first_order_changes() -> None:
    said = json.loads(json.dumps(measure_order(4, 8, 4), allow_nan=False))
    assert said["crossings"] == [0, 0]
    assert [said[name]["ratio"] for name in ("u", "b", "Y")] == pytest.approx([4] * 3, rel=0.05)
    crossed = measure_order(4, 8, 4, eta=1.0)
    assert crossed["crossings"][0] > 0
    assert crossed["b"]["ratio"] < 3 or crossed["b"]["ratio"] > 5
    one = measure_order(1, 8, 4)
    assert max(one[name]["error"] for name in ("u", "b", "Y")) < 1e-14


def test_a_step_of_ones_own() -> None:
    assert compare_with_weights(1, 8, 4, steps=2, eta=0.125)["eta"] == 0.125


def test_problems_differ_by_seed_only() -> None:
    one, again, other = (random_problem(2, 8, 4, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.targets, again.targets)
    assert not torch.equal(one.targets, other.targets)
    assert one.targets.min() > 0
    assert random_problem(2, 8, 4, dtype=torch.float32).targets.dtype == torch.float32


@pytest.mark.parametrize("given", [(0, 8, 4), (1, 0, 4), (1, 8, 0)])
def test_sizes(given: tuple[int, int, int]) -> None:
    with pytest.raises(FieldError, match="is 0; it must be at least 1"):
        random_problem(*given)
