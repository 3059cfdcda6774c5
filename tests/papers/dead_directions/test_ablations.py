"""The cells at reduced size: slopes that a closed form predicts, alignment, and who reaches zero."""

import pytest
import torch

from papers.dead_directions import ablations as module
from papers.dead_directions.ablations import NOISE, START, bridge, diagonal, dials, floors, signs
from raising import refused
from topograd.errors import OptimError

STEPS = 2000
SIGN_LR = 0.95 * START / STEPS


@pytest.fixture(scope="module")
def rows() -> dict[float, module.Row]:
    return {row["value"]: row for row in bridge(floors((1e-8, 1.0, 100.0), 0.1), STEPS)}


@pytest.mark.parametrize("eps", [1e-8, 1.0])
def test_the_slope_does_not_depend_on_the_floor(eps: float, rows: dict[float, module.Row]) -> None:
    row = rows[eps]
    assert row["slope"] == pytest.approx(2, abs=0.01)
    assert row["r2"] > 0.9999
    assert row["alignment"] == 1.0
    assert row["asymptotic"]


def test_a_high_floor_has_not_arrived(rows: dict[float, module.Row]) -> None:
    """The slope is that of t² (σ² + t⁴), and t is still large."""
    row = rows[100.0]
    assert not row["asymptotic"]
    low, high = (2 + 4 * t**4 / (NOISE**2 + t**4) for t in (row["t_last"], row["t_late"]))
    assert 2.5 < low < row["slope"] < high


def test_the_dial_keeps_the_slope_and_changes_the_pace() -> None:
    found = bridge(dials((1.0, 0.75, 0.5, 0.0), 0.1, SIGN_LR), STEPS)
    for row in found:
        assert row["slope"] == pytest.approx(2, abs=0.01)
        assert row["alignment"] == 1.0
    for row in found[:3]:  # t ~ step^(-1 / (3h - 1))
        assert row["decay"] == pytest.approx(-1 / (3 * row["value"] - 1), rel=0.05)
    assert [row["lr"] for row in found] == [0.1, 0.1, 0.1, SIGN_LR]


def test_the_sign_of_an_average_goes_the_way_of_the_sign() -> None:
    (plain,) = bridge(dials((0.0,), 0.1, SIGN_LR), STEPS)
    for row in bridge(signs((0.0, 0.9, 0.99), SIGN_LR), STEPS):
        assert row["slope"] == pytest.approx(plain["slope"], abs=1e-9)
        assert row["t_last"] == pytest.approx(0.05 * START, rel=1e-6)


def test_a_direction_that_is_not_the_dead_one_has_no_slope() -> None:
    (row,) = bridge(floors((100.0,), 0.1), 600, tilt=0.3)
    assert 0.5 < row["alignment"] < 0.99
    assert row["slope"] is None
    assert row["r2"] is None
    (slight,) = bridge(floors((100.0,), 0.1), 600, tilt=1e-3)
    assert 0.99 < slight["alignment"] < 1.0
    assert slight["slope"] is not None


def test_all_variants_together_as_each_alone() -> None:
    variants = floors((1e-8, 1.0), 0.1) + signs((0.9,), 1e-4)
    assert bridge(variants, 300) == [bridge([variant], 300)[0] for variant in variants]
    gentle = floors((1e-8, 1.0), 1e-3) + signs((0.9,), 1e-3)
    for row, variant in zip(diagonal(gentle, 50, 2), gentle, strict=True):
        (alone,) = diagonal([variant], 50, 2)  # other shapes, so other rounding
        assert [row[key] for key in ("loss", "smallest")] == pytest.approx(
            [alone[key] for key in ("loss", "smallest")], rel=1e-9
        )


def test_only_a_low_floor_reaches_zero() -> None:
    """2000 steps of 20000: less has arrived, and the order is the same."""
    variants = floors((1e-8, 1e-2), 1e-3) + dials((1.0, 0.5, 0.0), 1e-3, module.SIGN_LR)
    low, high, sgd, half, sign = diagonal(variants, 2000, 2)
    assert low["below"] > 0.1
    assert low["smallest"] < 1e-20
    assert low["below"] == pytest.approx(sum(low["below_by_seed"]) / 2)
    for row in (high, sgd, half, sign):
        assert row["below"] == 0
    for row in (low, high, sgd, half, sign):
        assert row["exact_zeros"] == 0
        assert row["loss"] < 2


def test_the_diagonal_network_follows_its_own_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the whole set as one batch, a step of SGD is autograd's."""
    monkeypatch.setattr(module, "BATCH", module.SAMPLES)
    monkeypatch.setattr(torch, "randint", lambda n, shape, generator: torch.arange(n).expand(shape))
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(module.SAMPLES, module.PAIRS, generator=generator, dtype=torch.float64)
    y = X[:, : module.ACTIVE].sum(-1)
    u, v = (torch.full((module.PAIRS,), module.ALPHA, dtype=torch.float64, requires_grad=True) for _ in "uv")
    for _ in range(3):
        loss = (X @ (u * u - v * v) - y).square().mean() / 2
        by_u, by_v = torch.autograd.grad(loss, (u, v))
        u, v = ((a - 0.01 * b).detach().requires_grad_() for a, b in ((u, by_u), (v, by_v)))
    loss = (X @ (u * u - v * v) - y).square().mean() / 2
    (row,) = diagonal(dials((1.0,), 0.01, 0.01), 3, 1)
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-12)
    smaller = torch.minimum(u.abs(), v.abs())[module.ACTIVE :].min()
    assert row["smallest"] == pytest.approx(smaller.item(), rel=1e-12)


def test_all_four_cells() -> None:
    found = module.cells(steps=300, seeds=1)
    assert {cell: len(found[cell]) for cell in "ABCD"} == {"A": 6, "B": 9, "C": 4, "D": 3}
    assert all(row["alignment"] == 1.0 for cell in "ACD" for row in found[cell])


def test_what_cannot_be_read() -> None:
    with refused(OptimError, setting="steps", given=299):
        bridge(floors((1.0,), 0.1), 299)
    with refused(OptimError, setting="seeds", given=0):
        diagonal(steps=10, seeds=0)
    with refused(OptimError, setting="steps", given=0):
        module.cells(steps=0)
