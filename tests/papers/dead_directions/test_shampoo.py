"""Shampoo and SOAP against their formulas, in float64, and on a problem that they are made for."""

import pytest
import torch
from torch import Tensor, nn

from papers.dead_directions.shampoo import SOAP, WIDEST, Shampoo, inverse_root
from raising import refused
from topograd.errors import OptimError


def gradients(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(count)]


def test_shampoo_is_its_formula() -> None:
    W = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    optimizer = Shampoo([W], lr=0.1, betas=(0.5, 0.9), every=1)
    L, R, M, V, expected = (torch.zeros(n, m, dtype=torch.float64) for n, m in
                            ((4, 4), (3, 3), (4, 3), (4, 3), (4, 3)))  # fmt: skip
    for t, g in enumerate(gradients(), 1):
        W.grad = g
        optimizer.step()
        L, R, M, V = (
            0.9 * L + 0.1 * g @ g.T,
            0.9 * R + 0.1 * g.T @ g,
            0.5 * M + 0.5 * g,
            0.9 * V + 0.1 * g * g,
        )
        mean, seen = M / (1 - 0.5**t), 1 - 0.9**t
        S = inverse_root(L / seen, 4) @ mean @ inverse_root(R / seen, 4)
        D = mean / ((V / seen).sqrt() + 1e-8)
        expected = expected - 0.1 * S * D.norm() / S.norm()
        torch.testing.assert_close(W.detach(), expected, rtol=1e-10, atol=1e-12)


def test_soap_is_adam_in_the_eigenbasis() -> None:
    """With a basis that is never made again, SOAP is Adam on the turned gradients, turned back."""
    W, turned = (nn.Parameter(torch.zeros(4, 3, dtype=torch.float64)) for _ in range(2))
    soap, adam = SOAP([W], lr=0.1, every=10**6), torch.optim.AdamW([turned], lr=0.1, weight_decay=0.0)
    first = gradients()[0]
    left, right = (torch.linalg.eigh(X).eigenvectors.flip(1) for X in (first @ first.T, first.T @ first))
    for g in gradients():
        W.grad, turned.grad = g, left.T @ g @ right
        soap.step()
        adam.step()
    back = left @ turned.detach() @ right.T
    torch.testing.assert_close(
        W.detach(), back, rtol=1e-8, atol=1e-8
    )  # eigenvectors have a sign of their own


def test_soap_follows_the_basis_through_a_kernel() -> None:
    """A kernel of L must not spoil the other axes when the basis is made again: steps stay of Adam's size."""
    W = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    optimizer = SOAP([W], lr=0.1, every=1)
    for g in gradients(20):
        W.grad = g - g.mean(0)
        before = W.detach().clone()
        optimizer.step()
        assert (W.detach() - before).abs().max() < 1
        assert (W.detach() - before).sum(0).abs().max() < 1e-7, "it stays beside the kernel"


@pytest.mark.parametrize("kind", [Shampoo, SOAP])
def test_vectors_and_wide_matrices_get_adam(kind: type[Shampoo | SOAP]) -> None:
    for shape in ((5,), (2, WIDEST + 1)):
        ours, torchs = (nn.Parameter(torch.ones(shape, dtype=torch.float64)) for _ in range(2))
        peers = kind([ours], lr=0.1, weight_decay=0.2), torch.optim.AdamW([torchs], lr=0.1, weight_decay=0.2)
        for step in range(3):
            ours.grad = torchs.grad = torch.full(shape, 0.3 * (step - 1.5), dtype=torch.float64)
            for optimizer in peers:
                optimizer.step()
        torch.testing.assert_close(ours, torchs, rtol=1e-10, atol=1e-12)


def test_bad_input_is_one_line() -> None:
    W = nn.Parameter(torch.zeros(2, 2))
    with refused(OptimError, setting="every", given=0):
        SOAP([W], every=0)
    with refused(OptimError, setting="betas"):
        Shampoo([W], betas=(0.9, 1.0))
    with refused(OptimError, setting="closure"):
        Shampoo([W]).step(lambda: 0.0)
