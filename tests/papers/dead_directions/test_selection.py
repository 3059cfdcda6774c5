"""The selection rule on spectra with known exponents, and where it must refuse."""

import math

import pytest
import torch
from torch import Tensor

from papers.dead_directions.families.mixture import Merge
from papers.dead_directions.selection import EXCEEDED, local_rlct, match_ranks, select_rank
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.rates import fit_rate, log_grid


def orthogonal(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q


def fibre_fisher(t: Tensor, k: int, a: int) -> Tensor:
    """(n, 2, 2): the Fisher in (u, s), at s = 0 and u = t, of unit Gaussians with mean (u^k (1+s), u^a s)."""
    zero = torch.zeros_like(t)
    jacobian = torch.stack((k * t ** (k - 1), t**k, zero, t**a), dim=-1).unflatten(-1, (2, 2))
    return jacobian.mT @ jacobian


def gelu_slope(z: Tensor) -> Tensor:
    return torch.special.ndtr(z) + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def rotated_chain(t: float, rotation: Tensor, inputs: Tensor | None) -> list[Tensor]:
    """G_1 ... G_4 (unit label noise) of 4 layers Q diag(1, .., 1, t) Qᵀ: GELU, or linear without inputs."""
    diagonal = torch.ones(len(rotation), dtype=torch.float64)
    diagonal[-1] = t
    W = rotation * diagonal @ rotation.mT
    h, slopes = inputs, []
    for _ in range(3):
        if h is not None:
            slopes.append(gelu_slope(h @ W.mT))
            h = torch.nn.functional.gelu(h @ W.mT)
    back = torch.eye(len(W), dtype=torch.float64)[None]
    factors = [back[0]]
    for layer in (2, 1, 0):
        back = back @ W * (slopes[layer][:, None] if slopes else 1.0)
        factors.append((back.mT @ back).mean(0))
    return factors[::-1]


@pytest.mark.parametrize(("k", "a", "transversal", "tangential"), [(2, 2, 2, 4), (2, 3, 2, 6), (3, 1, 4, 2)])
def test_a_fibre_with_known_exponents(k: int, a: int, transversal: int, tangential: int) -> None:
    t = log_grid(1e-2, 0.1)
    values, vectors = torch.linalg.eigh(fibre_fisher(t, k, a))
    said = select_rank(t, values, 2 * k - 2, eigenvectors=vectors)
    assert said.verdict == "transversal"
    slopes = {rank.kind: rank.rate.slope for rank in said.ranks if rank.rate is not None}
    assert slopes["transversal"] == pytest.approx(transversal, abs=0.01)
    assert slopes["tangential"] == pytest.approx(tangential, abs=0.01)
    chosen = said.chosen
    assert chosen is not None
    assert chosen.rate is not None
    assert chosen.rate.order == pytest.approx(k, abs=0.01)
    axis = vectors[:, 0, chosen.index].abs()
    assert axis.min() > 0.99, "the transversal eigenvector tends to the axis u"


@pytest.mark.parametrize("a", [2, 3])
def test_the_transversal_eigenvector_turns_as_the_first_power(a: int) -> None:
    t = log_grid(1e-3, 1e-2)
    vectors = torch.linalg.eigh(fibre_fisher(t, 2, a)).eigenvectors
    assert fit_rate(t, vectors[:, 1, -1].abs()).slope == pytest.approx(1, abs=0.01)


def test_one_output_hides_its_tangential_rate() -> None:
    t = log_grid(1e-3, 1e-1)
    score = torch.stack((2 * t, t**2), dim=-1)  # of N(u²(1+s), 1)
    fisher = score[:, :, None] * score[:, None]
    said = select_rank(t, torch.linalg.eigvalsh(fisher), 2.0)
    assert [rank.kind for rank in said.ranks] == ["floor", "transversal"]
    assert fit_rate(t, fisher[:, 1, 1]).slope == pytest.approx(4), "only the diagonal entry shows it"


@pytest.mark.parametrize(("layer", "exponent"), [(1, 6), (2, 4), (3, 2)])
def test_a_rotated_chain_with_a_gauge_zero(layer: int, exponent: int) -> None:
    t, turn, frame = log_grid(1e-2, 0.1), orthogonal(8, 1), orthogonal(9, 2)
    factors = []
    for value in t.tolist():
        wide = torch.zeros(9, 9, dtype=torch.float64)  # the ninth coordinate is a direction that nothing sees
        wide[:8, :8] = rotated_chain(value, turn, None)[layer - 1]
        factors.append(frame @ wide @ frame.mT)
    values, vectors = torch.linalg.eigh(torch.stack(factors))
    said = select_rank(t, values, exponent, eigenvectors=vectors, estimator="expected Fisher", noise="noisy")
    assert (said.count("floor"), said.count("transversal"), said.count("constant")) == (1, 1, 7)
    assert said.chosen is not None
    assert said.chosen.rate is not None
    assert said.chosen.rate.slope == pytest.approx(exponent, abs=1e-3)
    assert (said.chosen.rate.estimator, said.chosen.rate.noise) == ("expected Fisher", "noisy")
    refused = select_rank(t, values, 9.0, eigenvectors=vectors)
    assert refused.chosen is None
    assert refused.verdict == EXCEEDED == "theorem-reach exceeded"


def test_a_rotated_gelu_chain_exceeds_the_theorem() -> None:
    generator = torch.Generator().manual_seed(0)
    skew = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    inputs = torch.randn(500, 6, generator=generator, dtype=torch.float64)
    turn = torch.linalg.matrix_exp(0.1 * (skew - skew.mT))
    straight = torch.eye(6, dtype=torch.float64)
    t = log_grid(8e-3, 8e-2)
    for layer, exponent in ((1, 4), (2, 2)):  # t⁶ over a decade ends below what eigenvalues hold
        verdicts = []
        for rotation in (turn, straight):
            factors = torch.stack([rotated_chain(v, rotation, inputs)[layer] for v in t.tolist()])
            verdicts.append(select_rank(t, torch.linalg.eigvalsh(factors), exponent).verdict)
        assert verdicts == [EXCEEDED, "transversal"]


def test_ranks_that_cross_are_followed_by_their_vectors() -> None:
    t, turn = log_grid(1e-3, 0.1, 9), orthogonal(3, 3)
    spectra = torch.stack((1e-3 * t**2, 10 * t**4, 5 + t), dim=-1)  # the first two cross at t = 0.01
    values, vectors = torch.linalg.eigh(turn * spectra[:, None] @ turn.mT)
    followed = select_rank(t, values, 2.0, eigenvectors=vectors)
    assert [rank.kind for rank in followed.ranks] == ["tangential", "transversal", "constant"]
    assert [rank.rate.points for rank in followed.ranks[:2] if rank.rate is not None] == [9, 9]
    by_place = select_rank(t, values, 2.0)
    assert all(rank.rate is not None and rank.rate.points < 9 for rank in by_place.ranks[:2])


def test_matching_undoes_any_order_and_sign() -> None:
    generator = torch.Generator().manual_seed(4)
    base = orthogonal(6, 5)[:, :4]
    orders = [torch.arange(4)] + [torch.randperm(4, generator=generator) for _ in range(5)]
    signs = torch.randn(6, 1, 4, generator=generator, dtype=torch.float64).sign()
    places = match_ranks(torch.stack([base[:, order] for order in orders]) * signs)
    for order, place in zip(orders, places, strict=True):
        assert order[place].tolist() == [0, 1, 2, 3]


def test_points_may_come_in_any_order() -> None:
    t = log_grid(1e-3, 1e-1)
    values = torch.stack((t**2, 1 + t), dim=1)
    assert select_rank(t.flip(0), values.flip(0), 2.0) == select_rank(t, values, 2.0)


def test_mixture_with_its_weight_has_one_rank_of_order_2() -> None:
    t = log_grid(5e-3, 5e-2)
    spectrum = Merge((0.7, 0.3)).spectrum(t, weight=True)
    said = select_rank(t, spectrum, 2.0, tau=1e-24)
    assert [rank.kind for rank in said.ranks] == ["tangential", "transversal", "constant"]
    assert select_rank(t, spectrum, 2.0).ranks[0].kind == "unread", "t⁶ is too small for a matrix of doubles"


def test_a_rank_without_a_window_is_unread() -> None:
    t = log_grid(1e-3, 1e-1, 9)
    kinked = torch.where(t < 3e-3, t, t**3)
    growing = t**-0.7
    said = select_rank(t, torch.stack((kinked, growing), dim=1), 2.0)
    assert [rank.kind for rank in said.ranks] == ["unread", "unread"]
    assert said.verdict == EXCEEDED


@pytest.mark.parametrize(
    ("normal", "k", "expected"), [(3, 2, 1.25), (2, 3, 2 / 3), (1, 2, 0.25), (4, 1, 2.0)]
)
def test_the_local_rlct_is_the_exponent_of_the_volume(normal: int, k: int, expected: float) -> None:
    assert local_rlct(normal, k) == pytest.approx(expected)
    # Vol{s^{2k} + |x|² < ε}, x in d_⊥ - 1 dimensions: balls of radius √(ε - s^{2k}) over s.
    s = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    levels = log_grid(1e-4, 1e-1)
    rest = (levels[:, None] - s ** (2 * k)).clamp(min=0)
    volumes = (rest ** ((normal - 1) / 2) * (rest > 0)).mean(-1)
    assert fit_rate(levels, volumes).slope == pytest.approx(expected, abs=2e-3)


def test_bad_spectra_are_named() -> None:
    t = log_grid(1e-3, 1e-1)
    values = torch.stack((t**2, 1 + t), dim=1)
    with refused(GeometryError, setting="eigenvalues"):
        select_rank(t, values[:5], 2.0)
    with refused(GeometryError, setting="eigenvalues"):
        select_rank(t, values / 0, 2.0)
    with refused(GeometryError, setting="eigenvalues"):
        select_rank(t, 0 * values, 2.0)
    with refused(GeometryError, setting="eigenvectors"):
        select_rank(t, values, 2.0, eigenvectors=torch.eye(3, dtype=torch.float64).expand(7, 3, 3))
    with refused(GeometryError, setting="normal_directions", given=0):
        local_rlct(0, 2)
