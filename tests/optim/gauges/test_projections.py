"""Action, projections and invariants of every gauge: what a group and its orbits must satisfy."""

import math

import pytest
import torch
from torch import Tensor, nn

from papers.dead_directions.equivariance import Case, cases, tensors
from raising import refused
from topograd.errors import OptimError
from topograd.optim.gauges import CEShiftRowShift, ChainedReLURescale, HeadShift, LNScale, ReLURescale
from topograd.optim.gauges.rescaling import Rescaling, basis
from topograd.optim.gauges.translation import Translation

CASES = pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)


def point(case: Case, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = case.build().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return tensors(model)


@CASES
def test_invariants_are_constant_on_orbits_and_tell_them_apart(case: Case) -> None:
    theta = point(case, 0)
    moved = theta | case.gauge.act(theta, case.gauge.element(theta))
    assert not torch.allclose(moved[case.gauge.names[0]], theta[case.gauge.names[0]])
    one, same, other = (case.gauge.invariants(at) for at in (theta, moved, point(case, 1)))
    for name in one:
        torch.testing.assert_close(same[name], one[name], rtol=1e-12, atol=1e-12)
    assert any(not torch.allclose(other[name], one[name]) for name in one)


@CASES
def test_the_vertical_part_is_a_projection_that_leaves_no_trace(case: Case) -> None:
    theta, vectors = point(case, 0), point(case, 1)
    vertical = case.gauge.vertical(theta, vectors)
    again = case.gauge.vertical(theta, vertical)
    rest = case.gauge.vertical(theta, case.gauge.horizontal(theta, vectors))
    for name in case.gauge.names:
        torch.testing.assert_close(again[name], vertical[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rest[name], torch.zeros_like(rest[name]), rtol=0, atol=1e-12)
    ahead = theta | {name: theta[name] + 1e-6 * vertical[name] for name in case.gauge.names}
    before, after = case.gauge.invariants(theta), case.gauge.invariants(ahead)
    for name in before:  # second order: 1e-12
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-10)


@CASES
def test_the_derivative_of_the_action_is_vertical(case: Case) -> None:
    theta = point(case, 0)
    element = case.gauge.element(theta)
    ahead, behind = (case.gauge.act(theta, sign * 1e-5 * element) for sign in (1, -1))
    tangent = {name: (ahead[name] - behind[name]) / 2e-5 for name in case.gauge.names}
    rest = case.gauge.horizontal(theta, tangent)
    assert max(tensor.abs().max().item() for tensor in rest.values()) < 1e-8
    assert max(tensor.abs().max().item() for tensor in tangent.values()) > 0.1


@CASES
def test_drift_is_the_length_along_the_orbit(case: Case) -> None:
    theta = point(case, 0)
    element = case.gauge.element(theta)
    moved = theta | case.gauge.act(theta, element)
    if isinstance(case.gauge, Translation):
        length = math.sqrt(
            sum((moved[name] - theta[name]).square().sum().item() for name in case.gauge.names)
        )
    else:
        length = element.norm().item()
    assert case.gauge.drift(theta, moved) == pytest.approx(length, rel=1e-12)
    assert case.gauge.drift(theta, theta) == 0.0


@pytest.mark.parametrize("covector", [(1.0, 1.0), (2.0, 1.0), (1.0,) * 5, (6.0, 3.0, 1.0)])
def test_the_basis_is_orthonormal(covector: tuple[float, ...]) -> None:
    w, U = basis(covector)
    whole = torch.cat([w[:, None], U], 1)
    torch.testing.assert_close(whole.T @ whole, torch.eye(len(covector)).double(), rtol=0, atol=1e-14)
    torch.testing.assert_close(w * torch.tensor(covector).norm(), torch.tensor(covector).double())


def test_the_basis_of_a_pair_with_degree_is_the_orbit_of_its_logs() -> None:
    _, U = basis((2.0, 1.0))
    direction = torch.tensor([1.0, -2.0]).double() / math.sqrt(5)
    assert abs(U[:, 0] @ direction).item() == pytest.approx(1.0, abs=1e-14)


def test_degrees_along_a_chain_multiply() -> None:
    gauge = ChainedReLURescale("abcd", biases=["x", "y", None], degrees=[2, 3, 1])
    assert gauge.covector == (6.0, 3.0, 1.0, 1.0)
    assert [follower.powers for follower in gauge.followers] == [(2.0, 1.0, 0.0, 0.0)]
    assert gauge.names == ("a", "x", "b", "c", "d", "y")


def test_a_chain_with_degrees_holds_on_a_network() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x).relu().square()
            return self.layers[2](self.layers[1](x).relu() ** 3)

    torch.manual_seed(0)
    weights, biases = [f"layers.{i}.weight" for i in range(3)], [f"layers.{i}.bias" for i in range(2)]
    assert ChainedReLURescale(weights, biases, degrees=[2, 3]).residual(Net()) < 1e-13
    assert ChainedReLURescale(weights, biases, degrees=[3, 2]).residual(Net()) > 1e-3


def test_a_pair_is_the_chain_of_two() -> None:
    pair, chain = ReLURescale("a", "b", bias="c", degree=2), ChainedReLURescale(["a", "b"], ["c"], [2])
    assert (pair.blocks, pair.covector) == (chain.blocks, chain.covector)


def test_norms_of_zero_are_refused_with_their_channel() -> None:
    gauge = LNScale("gain", "reader", dim=0)
    reader = torch.ones(3, 2)
    gauge.check_norms({"gain": torch.ones(3), "reader": reader})
    reader[1] = 0
    with refused(OptimError, setting="gauges", given="reader"):
        gauge.check_norms({"gain": torch.ones(3), "reader": reader})


def test_rows_and_heads_commute() -> None:
    torch.manual_seed(0)
    names = ("a", "b", "c")
    vectors = {name: torch.randn(4, 2, dtype=torch.float64) for name in names}
    joint = HeadShift("a", ["b", "c"], rows=True).horizontal(vectors, vectors)
    apart = HeadShift("a", ["b", "c"]).horizontal(vectors, vectors)
    for name in names:
        expected = CEShiftRowShift(name).horizontal(apart, apart)[name]
        torch.testing.assert_close(joint[name], expected, rtol=0, atol=1e-14)


def test_every_rescaling_case_keeps_the_product_that_its_network_sees() -> None:
    for case in cases():
        if isinstance(case.gauge, Rescaling):
            element = case.gauge.element(point(case, 0))
            seen = element @ torch.tensor(case.gauge.covector, dtype=element.dtype)
            assert seen.abs().max() < 1e-12
