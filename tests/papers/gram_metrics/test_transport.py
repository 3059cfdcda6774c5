"""Transport without operators, against operators as matrices, at every depth that the paper writes out."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from papers.gram_metrics.checks import Problem
from papers.gram_metrics.field_state import State, state_of
from papers.gram_metrics.network import FieldError
from papers.gram_metrics.transport import conjugate_change, materialised_numbers, metric, pullback
from raising import refused
from tests.oracles.fields import projectors, pulled_back, transports
from topograd.memory import peak_bytes

Make = Callable[..., Problem]
NETWORKS = [(4, 6, 5), (4, 5, 6, 4), (4, 5, 3, 6, 5), (3, 4, 5, 4, 6, 5), (4, 5, 4, 6, 3, 5, 4)]


def fields(problem: Problem) -> State:
    return state_of(problem.weights, problem.inputs)


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def blocks(operator: Tensor) -> Tensor:
    """(M, M, N, N) as one matrix (M N, M N)."""
    return operator.transpose(1, 2).flatten(2, 3).flatten(0, 1)


@pytest.mark.parametrize("widths", NETWORKS)
def test_pairs_are_the_dense_operators(make: Make, widths: tuple[int, ...]) -> None:
    problem = make(*widths, examples=4)
    state = fields(problem)
    for layer in range(1, len(widths) - 1):
        N, D = widths[layer], projectors(problem.weights, problem.inputs, layer)
        G = pulled_back(problem.weights, problem.inputs, layer, eye(widths[layer + 1]).expand_as(D))
        for pair in ((0, 0), (1, 3), (3, 1)):
            assert torch.allclose(metric(problem.weights, state, layer, pair)(eye(N)), G[pair])


@pytest.mark.parametrize("widths", [(4, 6), *NETWORKS])
def test_the_change_of_all_conjugate_fields(make: Make, widths: tuple[int, ...]) -> None:
    problem = make(*widths, examples=4)
    state, eta = fields(problem), 0.3
    r = state.Y - problem.targets
    changes = conjugate_change(problem.weights, state, r, eta)
    assert sorted(changes) == list(range(1, len(widths)))
    assert not changes[len(widths) - 1].any()
    for layer in range(1, len(widths) - 1):
        M = transports(problem.weights, problem.inputs, layer)
        dense = -(2 * eta / 4) * torch.einsum("abij,bj,b->ai", M, state.u[layer], r)
        assert torch.allclose(changes[layer], dense)


def test_unseen_rows_are_moved_by_the_training_rows(make: Make) -> None:
    problem = make(4, 5, 3, 6, 5, examples=4, unseen=2)
    both = state_of(problem.weights, torch.cat([problem.inputs, problem.unseen]))
    r = torch.randn(4, dtype=torch.float64)
    changes = conjugate_change(problem.weights, both, r, 0.1)
    whole = conjugate_change(problem.weights, both, torch.cat([r, r.new_zeros(2)]), 0.1)
    for layer in (1, 2, 3):
        assert torch.allclose(changes[layer], whole[layer] * 6 / 4), "the mean is over the M training rows"


@pytest.mark.parametrize("widths", NETWORKS)
def test_symmetric_positive_idempotent(make: Make, widths: tuple[int, ...]) -> None:
    problem = make(*widths, examples=4)
    for layer in range(1, len(widths) - 1):
        D = projectors(problem.weights, problem.inputs, layer)
        G = pulled_back(problem.weights, problem.inputs, layer, eye(widths[layer + 1]).expand_as(D))
        assert torch.equal(D @ D, D)
        assert torch.equal(D.mT, D)
        assert torch.allclose(G.mT, G)
        assert torch.linalg.eigvalsh(G).min() > -1e-12
        M = transports(problem.weights, problem.inputs, layer)
        assert torch.allclose(M.mT, M.transpose(0, 1)), "one pair's transpose is the other pair's"
        assert torch.linalg.eigvalsh(blocks(M)).min() > -1e-12 * blocks(M).trace()


def test_one_pair_need_be_neither_symmetric_nor_positive(make: Make) -> None:
    three, four = make(4, 6, 6, 6, examples=6), make(4, 6, 6, 6, 6, examples=6)
    M = transports(three.weights, three.inputs, 1)
    assert torch.allclose(M, M.mT), "I and G are symmetric"
    assert torch.linalg.eigvalsh(M).min() < -1e-3, "and S may be negative"
    M = transports(four.weights, four.inputs, 1)
    assert (M - M.mT).abs().max() > 1e-2
    on_the_diagonal = M[range(6), range(6)]
    assert torch.allclose(on_the_diagonal, on_the_diagonal.mT)


def test_three_layers_in_closed_form(make: Make) -> None:
    """Equation 129: M_1 = S^(2) I + S^(3) G_1, with G_1 from equation 128."""
    problem = make(4, 6, 6, 6, examples=4)
    state, W = fields(problem), problem.weights
    r, eta = state.Y - problem.targets, 0.2
    S2, S3 = state.S(2), state.A(3)
    expected = torch.zeros(4, 6, dtype=torch.float64)
    for i in range(4):
        for j in range(4):
            G = W[1].T @ torch.diag((state.a[2][i] & state.a[2][j]).double()) @ W[1]
            expected[i] -= (2 * eta / 4) * (S2[i, j] * eye(6) + S3[i, j] * G) @ state.u[1][j] * r[j]
    found = conjugate_change(W, state, r, eta)
    assert torch.allclose(found[1], expected)
    assert torch.allclose(found[2], -(2 * eta / 4) * S3 @ (r[:, None] * state.u[2])), "equation 118"


def test_four_layers_in_closed_form(make: Make) -> None:
    """Equations 140 and 143: M_2 = S^(3) I + S^(4) G_2, M_1 = S^(2) I + S^(3) G_1 + S^(4) P_1[G_2]."""
    problem = make(4, 6, 6, 6, 6, examples=4)
    state, W = fields(problem), problem.weights
    r, eta = state.Y - problem.targets, 0.2
    S = {layer: state.S(layer) for layer in (2, 3, 4)}
    first, second = (torch.zeros(4, 6, dtype=torch.float64) for _ in range(2))
    for i in range(4):
        for j in range(4):
            a2, a3 = ([state.a[layer][k].double() for k in (i, j)] for layer in (2, 3))
            G1 = W[1].T @ torch.diag(a2[0] * a2[1]) @ W[1]
            G2 = W[2].T @ torch.diag(a3[0] * a3[1]) @ W[2]
            P1 = W[1].T @ torch.diag(a2[0]) @ G2 @ torch.diag(a2[1]) @ W[1]
            M2 = S[3][i, j] * eye(6) + S[4][i, j] * G2
            M1 = S[2][i, j] * eye(6) + S[3][i, j] * G1 + S[4][i, j] * P1
            second[i] -= (2 * eta / 4) * M2 @ state.u[2][j] * r[j]
            first[i] -= (2 * eta / 4) * M1 @ state.u[1][j] * r[j]
    found = conjugate_change(W, state, r, eta)
    assert torch.allclose(found[1], first)
    assert torch.allclose(found[2], second)


def test_a_pullback_of_any_operator(make: Make) -> None:
    problem = make(4, 6, 5)
    X = torch.randn(5, 5, dtype=torch.float64)
    found = pullback(problem.weights, fields(problem), 1, (0, 2), lambda x: x @ X.T)
    dense = pulled_back(problem.weights, problem.inputs, 1, X.expand(5, 5, 5, 5))[0, 2]
    assert torch.allclose(found(eye(6)).T, dense)


def test_memory_of_both_ways(make: Make) -> None:
    problem = make(*[24] * 5, examples=8)
    state = fields(problem)
    r = state.Y - problem.targets
    matrices = peak_bytes(lambda: [transports(problem.weights, problem.inputs, layer) for layer in (1, 2, 3)])
    assert materialised_numbers(state) == 3 * (8 * 24) ** 2
    assert matrices >= 8 * materialised_numbers(state)
    assert peak_bytes(lambda: conjugate_change(problem.weights, state, r, 0.1)) < matrices / 30


def test_everything_stays_on_its_device(make: Make) -> None:
    """The meta device has shapes and no numbers: a hidden copy to another device would fail."""
    problem = make(4, 6, 5, 6)
    weights, inputs = [W.to("meta") for W in problem.weights], problem.inputs.to("meta")
    state, r = state_of(weights, inputs), problem.targets.to("meta")
    found = [
        *conjugate_change(weights, state, r, 0.1).values(),
        metric(weights, state, 1, (0, 1))(state.u[1]),
    ]
    assert {x.device.type for x in found} == {"meta"}


@pytest.mark.parametrize("layer", [0, 3])
def test_layers_without_transport(make: Make, layer: int) -> None:
    problem = make(4, 6, 6, 6)
    with refused(FieldError, setting="layer"):
        metric(problem.weights, fields(problem), layer, (0, 0))


def test_one_hidden_layer_has_none(make: Make) -> None:
    problem = make(4, 6)
    with refused(FieldError, setting="layer", given=1):
        metric(problem.weights, fields(problem), 1, (0, 0))


def test_a_residual_that_does_not_fit(make: Make) -> None:
    problem = make(4, 6, 6)
    with refused(FieldError, setting="residual"):
        conjugate_change(problem.weights, fields(problem), torch.zeros(6, dtype=torch.float64), 0.1)
