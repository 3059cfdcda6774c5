"""The z-loss against its formula, and that it pins what cross-entropy leaves free."""

import pytest
import torch
import torch.nn.functional as F

from raising import refused
from topograd.errors import OptimError
from topograd.exec.z_loss import z_loss


def test_value_and_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    log_z = logits.detach().exp().sum(-1).log()
    loss = z_loss(logits, 0.3)
    assert loss.item() == pytest.approx(0.3 * (log_z**2).mean().item(), rel=1e-14)
    loss.backward()
    expected = 0.3 * 2 * log_z[..., None] * logits.detach().softmax(-1) / 6
    torch.testing.assert_close(logits.grad, expected)


def test_under_adam_it_pins_log_z_where_cross_entropy_alone_leaves_it() -> None:
    ends = []
    for coefficient in (0.0, 0.1):
        bias = torch.tensor([2.0, 3.0, 2.5], dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([bias], lr=0.1)
        targets = torch.tensor([0, 0, 1, 2])
        for _ in range(400):
            optimizer.zero_grad()
            logits = bias.expand(4, 3)
            (F.cross_entropy(logits, targets) + z_loss(logits, coefficient)).backward()
            optimizer.step()
        ends.append(bias.detach().logsumexp(0).item())
    assert ends[0] > 2.0
    assert abs(ends[1]) < 1e-3


def test_a_negative_coefficient_is_refused() -> None:
    with refused(OptimError, setting="coefficient", given=-1.0):
        z_loss(torch.zeros(1, 2), -1.0)
