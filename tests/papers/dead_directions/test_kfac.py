"""K-FAC against its formula, in float64; what has no factors gets Adam."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from papers.dead_directions.kfac import KFAC, REST
from raising import refused
from topograd.errors import OptimError


def test_a_step_is_the_formula() -> None:
    torch.manual_seed(0)
    inner, outer = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
    model = nn.Sequential(inner, nn.Tanh(), outer)
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    optimizer = KFAC(model, lr=0.1, damping=0.5, weight_decay=0.2)
    before = [p.detach().clone() for p in model.parameters()]
    hidden = torch.tanh(inner(x))
    terms = (outer(hidden) - y).square().sum(1) / 2
    out = (outer(hidden) - y).detach()
    back = (out @ outer.weight.detach()) * (1 - hidden.detach().square())
    (F.mse_loss(model(x), y, reduction="sum") / 12).backward()
    assert terms.mean().item() == pytest.approx(F.mse_loss(model(x), y).item())
    directions, gradients = [], []
    for rows, signals, layer in ((x, back, inner), (hidden.detach(), out, outer)):
        A, G = rows.T @ rows / 6, signals.T @ signals / 6
        A, G = (X + 0.5 * X.trace() / len(X) * torch.eye(len(X)).double() for X in (A, G))
        assert layer.weight.grad is not None
        assert layer.bias.grad is not None
        directions += [G.inverse() @ layer.weight.grad @ A.inverse(), G.inverse() @ layer.bias.grad]
        gradients += [layer.weight.grad, layer.bias.grad]
    length = sum((d * g).sum() for d, g in zip(directions, gradients, strict=True))
    scale = torch.as_tensor(length).clamp_min(1.0).rsqrt()
    optimizer.step()
    for parameter, first, d in zip(model.parameters(), before, directions, strict=True):
        torch.testing.assert_close(parameter.detach(), 0.98 * first - 0.1 * scale * d, rtol=1e-9, atol=1e-11)


def test_what_has_no_factors_gets_adam() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)).double()
    optimizer = KFAC(model, lr=0.1)
    twin = nn.Parameter(model[0].get_parameter("weight").detach().clone())
    adam = torch.optim.AdamW([twin], lr=REST * 0.1, weight_decay=0.0)
    for _ in range(3):
        model.zero_grad()
        model(torch.arange(5)).square().mean().backward()
        twin.grad = model[0].get_parameter("weight").grad
        optimizer.step()
        adam.step()
    torch.testing.assert_close(model[0].get_parameter("weight"), twin, rtol=1e-9, atol=1e-12)


def test_bad_input_is_one_line_and_hooks_can_be_removed() -> None:
    model = nn.Linear(2, 2)
    with refused(OptimError, setting="damping", given=0):
        KFAC(model, damping=0)
    optimizer = KFAC(model)
    with refused(OptimError, setting="closure"):
        optimizer.step(lambda: 0.0)
    optimizer.close()
    assert not model._forward_hooks
