"""The loops themselves, against what can be written down by hand."""

import torch
from torch import nn

from tests.oracles.fisher import exact_fisher, explicit_factors, output_covariance


def test_logistic_regression() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0, 1])
    p = model(x).detach().softmax(-1)
    expected = sum(
        torch.kron(torch.diag(q) - torch.outer(q, q), torch.outer(h, h)) for q, h in zip(p, x, strict=True)
    )
    torch.testing.assert_close(exact_fisher(model, [model.weight], x, "cross-entropy"), expected / 5)
    ((A, G),) = explicit_factors(model, x, y, "cross-entropy", "empirical").values()
    delta = p - nn.functional.one_hot(y, 2)
    torch.testing.assert_close(A, x.T @ x / 5)
    torch.testing.assert_close(G, delta.T @ delta / 5)


def test_the_covariance_of_outputs_is_a_hessian() -> None:
    f = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hessian = torch.func.hessian(lambda z: z.logsumexp(0))(f)
    torch.testing.assert_close(output_covariance(f, "cross-entropy"), hessian)
    torch.testing.assert_close(
        output_covariance(f, "squared-error", 0.25), torch.eye(4, dtype=torch.float64) / 4
    )


def test_a_convolution_by_hand() -> None:
    model = nn.Sequential(nn.Conv1d(1, 1, 2, padding=1, bias=False), nn.Flatten()).double()
    x = torch.tensor([[[1.0, 2.0]]], dtype=torch.float64)
    ((A, G),) = explicit_factors(model, x, torch.zeros(1, 3), "squared-error", "expected").values()
    rows = torch.tensor([[0.0, 1.0], [1.0, 2.0], [2.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(A, rows.T @ rows / 3)
    assert G.item() == 3, "one prediction of three numbers, each with variance 1"
