"""The freeze-probe against dense Jacobians, and the conditions under which it reports nothing."""

import math

import pytest
import torch
from torch import Tensor

from papers.dead_directions.catalogue import Measurement, ladder, probe
from papers.dead_directions.catalogue.networks import ACTIVATE, _frames, _weight, normal, trace_chain
from papers.dead_directions.catalogue.probing import _cotangents, asymptotic_window, dead_distance
from raising import refused
from tests.oracles.factors_of_chain import factors_of_chain
from topograd.errors import GeometryError
from topograd.geometry.rates import fit_rate, log_grid
from topograd.geometry.rules import Attention, Block, Chain, Composition, GatedStack, Mixer, predict
from topograd.geometry.rules.architectures import Architecture


def by_node(architecture: Architecture, samples: int | None = 200, seed: int = 0) -> dict[str, Measurement]:
    return {m.node: m for m in probe(architecture, samples=samples, seed=seed)}


def slope(measurement: Measurement) -> float:
    assert measurement.rate.slope is not None, measurement.rate.refused
    return measurement.rate.slope


@pytest.mark.parametrize("activation", ["linear", "relu"])
def test_entries_are_those_of_dense_factors(activation: str) -> None:
    t, chain = 1e-2, Chain(3, 4, activation)
    found = by_node(chain, samples=20, seed=5)
    here = torch.tensor([t], dtype=torch.float64)
    weights = [_weight(chain, layer, _frames(chain, here, 5), here, 5)[0] for layer in (1, 2, 3)]
    inputs = normal(20, 4, seed=5, like=here)
    A, G = factors_of_chain(weights, inputs, ACTIVATE[activation])
    for layer in (1, 2, 3):
        for name, matrix in ((f"G_{layer}", G[layer - 1]), (f"A_{layer - 1}", A[layer - 1])):
            rate = found[name].rate
            assert rate.coefficient is not None
            assert rate.coefficient * t ** slope(found[name]) == pytest.approx(
                float(matrix[-1, -1]), rel=1e-9
            )


@pytest.mark.parametrize("head", ["square", "simplex"])
def test_softmax_cotangents_have_the_covariance_of_the_labels(head: str) -> None:
    chain = Chain(2, 4, loss="cross-entropy", head=head)
    logits = trace_chain(chain, log_grid(1e-2, 1e-1, 2), 3, 0).outputs
    p = logits.detach().softmax(-1)
    found = sum(c[..., :, None] * c[..., None, :] for c in _cotangents(chain, logits, 0))
    assert isinstance(found, Tensor)
    assert torch.allclose(found, torch.diag_embed(p) - p[..., :, None] * p[..., None, :])


@pytest.mark.parametrize(
    "network",
    [
        Chain(6, activation="gelu"),
        Chain(4, widths=(10, 7, 5, 9, 6)),
        Chain(4, activation="relu", exponents=((1, 2, 1, 2), (2, 1, 3, 1))),
        Chain(4, activation="tanh", bias=2),
        Chain(5, activation="relu", skips=((0, 2), (1, 4))),
        Chain(4, loss="cross-entropy"),
        Chain(3, activation="tanh", exponents=((1, 2, 1), (2, 1, 3)), bias=2, skips=((1, 2),)),
        Chain(3, widths=(6, 4, 5, 7), loss="cross-entropy", exponents=((2, 1, 1),)),
        Chain(3, noise=0.0),
        Chain(6, rotation=0.5),
        Chain(6, norm="layernorm", norm_at=(2, 4)),
        Chain(6, activation="tanh", norm="rmsnorm", norm_at=(1, 2, 3, 4, 5)),
        Attention(5, causal=True),
        Attention(3, heads=2, powers=(1, 2)),
        Attention(2, wiring="pre-norm"),
        Attention(3, heads=4, kv_heads=2),
        Attention(2, positions="rope-single"),
        Attention(2, memory=True),
        Chain(6, norm="batchnorm", norm_at=(2, 4)),
        Chain(5, activation="gelu", norm="groupnorm", norm_at=(2,)),
        Composition((Block("experts"), Block("scan"))),
        GatedStack(3),
        Composition((Block("mlp", 1), Block("attention"), Block("residual"), Block("attention"))),
        Mixer(2, "swiglu"),
    ],
    ids=str,
)
def test_what_is_predicted_is_measured(network: Architecture) -> None:
    found = by_node(network, samples=None if isinstance(network, Attention | Composition | Mixer) else 200)
    for prediction in predict(network):
        assert slope(found[prediction.node]) == pytest.approx(prediction.slope, abs=0.05), prediction.node


def test_a_measurement_carries_its_labels() -> None:
    noisy, free = by_node(Chain(3)), by_node(Chain(3, noise=0.0))
    assert (noisy["G_1"].rate.estimator, noisy["G_1"].rate.noise) == ("expected Fisher", "noisy")
    assert (free["G_1"].rate.estimator, free["G_1"].rate.noise) == ("loss-gradient covariance", "noise-free")
    assert (free["A_1"].rate.noise, free["K"].rate.noise) == ("none", "none")
    assert noisy["G_1"].rate.window == pytest.approx((1e-3, 3e-2))
    assert by_node(Attention(1), None)["Q_1"].rate.estimator == "Fisher, one draw of the labels"


def test_the_noise_scales_coefficients_and_not_slopes() -> None:
    one, tenth = by_node(Chain(3)), by_node(Chain(3, noise=0.1))
    assert one["G_1"].rate.coefficient == pytest.approx(100 * tenth["G_1"].rate.coefficient)  # type: ignore[operator]
    assert tenth["K"].rate.coefficient == pytest.approx(100 * one["K"].rate.coefficient)  # type: ignore[operator]
    assert slope(one["G_1"]) == pytest.approx(slope(tenth["G_1"]))


@pytest.mark.parametrize(
    ("activation", "per_layer", "at_all"),
    [("linear", 1, 1), ("gelu", 1 / 4, 1), ("tanh", 1, 1), ("relu", 1, 1 / 2)],
)
def test_dead_moments_have_the_constants_of_the_theory(
    activation: str, per_layer: float, at_all: float
) -> None:
    found = by_node(Chain(4, activation=activation), samples=4000)
    for layer in (1, 2, 3):  # 4000 samples know a second moment to about 3%
        expected = at_all * per_layer**layer
        assert found[f"A_{layer}"].rate.coefficient == pytest.approx(expected, rel=0.08)


def test_a_rotated_nonlinear_chain_reports_no_slope_and_has_none() -> None:
    chain = Chain(4, activation="relu", rotation=0.1)
    found = by_node(chain)
    assert all(m.rate.slope is None and "alignment" in str(m.rate.refused) for m in found.values())
    t = log_grid(1e-3, 3e-2)
    trace = trace_chain(chain, t, 200, 0)
    (delta,) = torch.autograd.grad(trace.outputs, [trace.backward["G_1"].at], torch.ones_like(trace.outputs))
    bare = fit_rate(t, trace.backward["G_1"].of(delta))
    assert bare.slope == pytest.approx(0, abs=0.2), "6 without the rotation"


def test_a_probe_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        probe(Chain(2), samples=20)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_zeros_are_told_from_rates() -> None:
    square = by_node(Chain(3, loss="cross-entropy", head="square"))
    assert all(square[f"lambda_min(G_{layer})"].vanishes for layer in (1, 2, 3))
    assert not any(square[f"G_{layer}"].vanishes for layer in (1, 2, 3))
    dead = by_node(Chain(5, 32, "relu", norm="layernorm", norm_at=(2,)))
    assert [dead[f"G_{layer}"].vanishes for layer in range(1, 6)] == [False, False, True, True, False]


def test_rounding_in_a_turned_frame_is_not_read_as_a_rate() -> None:
    found = by_node(Chain(14, rotation=0.3))
    assert "above the floor" in str(found["G_1"].rate.refused)
    assert slope(found["G_10"]) == pytest.approx(8, abs=0.01)


def test_a_window_that_is_not_asymptotic_is_refused() -> None:
    found = probe(
        Chain(4, norm="layernorm", norm_at=(1, 2, 3), live="identity"), samples=200, window=(1e-2, 0.1)
    )
    assert "not asymptotic" in str(found[0].rate.refused)
    with refused(GeometryError, setting="low", given=0.01):
        probe(Chain(2), window=(1e-2, 1e-3))
    with refused(GeometryError, setting="samples", given=3):
        probe(Chain(2), samples=3)


def test_the_distance_of_the_dead_column_is_the_schur_complement() -> None:
    rows = normal(1, 50, 4, seed=0, like=torch.zeros(1, dtype=torch.float64))
    A = rows[0].T @ rows[0]
    schur = A[3, 3] - A[3, :3] @ torch.linalg.solve(A[:3, :3], A[:3, 3])
    assert dead_distance(rows).square().item() == pytest.approx(schur.item())
    small = rows * torch.tensor([1, 1, 1, 1e-40], dtype=torch.float64)
    assert dead_distance(small).item() == pytest.approx(1e-40 * dead_distance(rows).item(), rel=1e-12)
    dependent = torch.cat((rows[..., :3], rows[..., :3].sum(-1, keepdim=True)), -1)
    assert dead_distance(dependent).item() == 0


def test_a_ladder_of_32_layers() -> None:
    found = ladder(32, 3, "relu")
    assert found["G"] == pytest.approx([2.0 * (32 - layer) for layer in range(1, 33)], abs=1e-6)
    assert found["A"] == pytest.approx([2.0 * layer for layer in range(32)], abs=1e-6)
    assert found["product"] == pytest.approx([62.0] * 32, abs=1e-6)


def test_a_ladder_refuses_what_a_chain_refuses_and_what_float64_cannot_hold() -> None:
    for bad in ((0, 8, "relu"), (3, 1, "relu"), (3, 8, "sine")):
        with pytest.raises(GeometryError):
            ladder(*bad)
    with refused(GeometryError, setting="architecture", given="chain L=100 d=8 linear"):
        ladder(100)
    low, high = asymptotic_window(Chain(60))
    assert low > 1e-3
    assert low**120 > 1e-291
    assert math.isclose(high / low, 10)
