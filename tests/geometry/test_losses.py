"""The vectors at the outputs: their sum of squares is the covariance of the loss's gradient."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raising import refused
from tests.oracles.fisher import output_covariance
from topograd.errors import GeometryError
from topograd.geometry.losses import (
    CrossEntropy,
    Fisher,
    Loss,
    Own,
    SquaredError,
    check_fisher,
    loss_named,
)

SHAPES = [(3, 4), (3, 2, 4), (3, 2, 2, 4)]


def outputs_of(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def vectors(loss: Loss, outputs: Tensor, targets: Tensor | None, fisher: Fisher) -> tuple[int, list[Tensor]]:
    terms, found = loss.output_gradients(outputs, targets, fisher, torch.Generator().manual_seed(1))
    return terms, list(found)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", [SquaredError(0.3), CrossEntropy()])
def test_expected_vectors_square_to_the_covariance(loss: Loss, shape: tuple[int, ...]) -> None:
    f = outputs_of(shape)
    terms, found = vectors(loss, f, None, "expected")
    assert terms == f[..., 0].numel()
    assert len(found) == f[0].numel()
    positions = f.shape[1:-1].numel()
    flat = torch.stack(found).view(-1, 3, positions * 4)  # all that is known of one sample
    for n in range(3):
        blocks = [output_covariance(row, loss.name, 0.3) for row in f[n].reshape(positions, 4)]
        torch.testing.assert_close(flat[:, n].T @ flat[:, n], torch.block_diag(*blocks))


@pytest.mark.parametrize("shape", SHAPES)
def test_empirical_vectors_are_the_gradients(shape: tuple[int, ...]) -> None:
    f, y = outputs_of(shape).requires_grad_(), outputs_of(shape, 1)
    labels = y.argmax(-1)
    labels[0] = -100
    cases: list[tuple[Loss, Tensor, Tensor]] = [
        (SquaredError(7.0), y, F.mse_loss(f, y, reduction="sum") / 2),
        (CrossEntropy(), labels, F.cross_entropy(f.movedim(-1, 1), labels, reduction="sum")),
    ]
    for loss, targets, total in cases:
        terms, (vector,) = vectors(loss, f.detach(), targets, "empirical")
        torch.testing.assert_close(vector, torch.autograd.grad(total, f)[0])
        assert terms == (y[..., 0].numel() if targets is y else int((labels >= 0).sum()))


@pytest.mark.parametrize("loss", [SquaredError(0.3), CrossEntropy()])
def test_monte_carlo_is_the_covariance_in_expectation(loss: Loss) -> None:
    f = outputs_of((1, 4))
    terms, (found,) = vectors(loss, f.expand(20_000, 4).clone(), None, "monte-carlo")
    assert terms == 20_000
    measured = found.T @ found / terms
    expected = output_covariance(f[0], loss.name, 0.3)
    # The entries are means of 20 000 numbers of size below 1: six standard errors are 0.04.
    torch.testing.assert_close(measured, expected, rtol=0, atol=0.02)
    torch.testing.assert_close(found.mean(0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=0.02)


def test_monte_carlo_follows_its_generator() -> None:
    f = outputs_of((5, 4))
    for loss in (SquaredError(), CrossEntropy()):
        first, again = (vectors(loss, f, None, "monte-carlo")[1][0] for _ in range(2))
        assert torch.equal(first, again)
        other = next(iter(loss.output_gradients(f, None, "monte-carlo", torch.Generator().manual_seed(2))[1]))
        assert not torch.equal(first, other)


def test_ignored_labels_are_no_terms() -> None:
    f = outputs_of((3, 2, 4))
    labels = torch.tensor([[0, -100], [-100, 3], [1, 2]])
    for fisher in ("empirical", "monte-carlo", "expected"):
        terms, found = vectors(CrossEntropy(), f, labels, fisher)
        assert terms == 4
        together = sum(vector.abs() for vector in found)
        assert isinstance(together, Tensor)
        assert ((together == 0).all(-1) == (labels == -100)).all()


def test_half_precision_keeps_the_dtype() -> None:
    f = outputs_of((3, 4)).bfloat16()
    for fisher in ("empirical", "monte-carlo", "expected"):
        for vector in vectors(CrossEntropy(), f, torch.tensor([0, 1, 2]), fisher)[1]:
            assert vector.dtype == torch.bfloat16


def test_a_loss_of_ones_own() -> None:
    f, y = outputs_of((3, 4)), outputs_of((3, 4), 1)
    own = loss_named(lambda a, b: (a - b).abs().sum(-1))
    terms, (vector,) = vectors(own, f, y, "empirical")
    assert terms == 3
    assert torch.equal(vector, (f - y).sign())
    with refused(GeometryError, setting="fisher", given="expected"):
        vectors(own, f, y, "expected")
    with refused(GeometryError, setting="loss"):
        vectors(loss_named(F.mse_loss), f, y, "empirical")


def test_names() -> None:
    assert isinstance(loss_named("cross-entropy"), CrossEntropy)
    assert loss_named(SquaredError(2.0)) == SquaredError(2.0)
    assert isinstance(loss_named(F.mse_loss), Own)
    not_a_loss: Any = 3
    with refused(GeometryError, setting="loss", given="hinge"):
        loss_named("hinge")
    with refused(GeometryError, setting="loss", given=3):
        loss_named(not_a_loss)
    with refused(GeometryError, setting="fisher", given="exact"):
        check_fisher("exact")
    for variance in (0.0, -1.0, float("nan"), float("inf")):
        with refused(GeometryError, setting="variance"):
            SquaredError(variance)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "fisher", "setting"),
    [
        (
            SquaredError(),
            torch.zeros(3),
            None,
            "expected",
            "outputs",
        ),
        (SquaredError(), torch.zeros(3, 2), None, "empirical", "targets"),
        (SquaredError(), torch.zeros(3, 2), torch.zeros(3), "empirical", "targets"),
        (CrossEntropy(), torch.zeros(3, 2), torch.zeros(3), "empirical", "targets"),
        (CrossEntropy(), torch.zeros(3, 2), torch.zeros(2).long(), "expected", "targets"),
        (CrossEntropy(), torch.zeros(3, 2), torch.tensor([0, 1, 2]), "empirical", "targets"),
        (CrossEntropy(), torch.zeros(3, 2), torch.tensor([0, 1, -1]), "empirical", "targets"),
        (CrossEntropy(), torch.zeros(1, 6, 2000), None, "expected", "fisher"),
    ],
)
def test_what_does_not_fit_is_refused(
    loss: Loss, outputs: Tensor, targets: Tensor | None, fisher: Fisher, setting: str
) -> None:
    with refused(GeometryError, setting=setting):
        vectors(loss, outputs, targets, fisher)


def test_labels_are_drawn_by_their_probabilities() -> None:
    p = torch.tensor([[0.0, 0.2, 0.0, 0.5, 0.3, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    count = 20_000
    outputs = p.repeat(count, 1)
    _, (gradient,) = CrossEntropy().output_gradients(
        outputs.log(), None, "monte-carlo", torch.Generator().manual_seed(0)
    )
    labels = (outputs - gradient).argmax(-1).view(count, 2)  # the gradient is p - e_label
    shares = torch.stack([F.one_hot(labels[:, k], 6).double().mean(0) for k in range(2)])
    assert (shares[p == 0] == 0).all(), "nothing impossible is drawn"
    torch.testing.assert_close(shares, p, rtol=0, atol=5 * 0.5 / count**0.5)
