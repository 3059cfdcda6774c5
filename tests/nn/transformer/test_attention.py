"""Who may see whom, against a loop over every query and slot; and the rotation."""

import pytest
import torch
from torch import Tensor

from topograd.nn.transformer.attention import attention_mask, rotate_halves


def by_loop(positions: Tensor, total: int, window: int) -> Tensor:
    """(batch, 1, time, total): slot j is seen from position p if p - window < j <= p."""
    batch, time = positions.shape
    seen = torch.zeros(batch, 1, time, total, dtype=torch.bool)
    for row in range(batch):
        for t in range(time):
            p = int(positions[row, t])
            for j in range(total):
                seen[row, 0, t, j] = j <= p and (window == 0 or p - j < window)
    return seen


@pytest.mark.parametrize("window", [0, 1, 3, 6, 7, 8])
@pytest.mark.parametrize(("time", "total"), [(1, 1), (1, 7), (2, 7), (6, 7), (7, 7)])
def test_equally_long_rows(time: int, total: int, window: int) -> None:
    positions = torch.arange(total - time, total)
    expected = by_loop(positions[None], total, window)[0, 0]
    mask = attention_mask(positions, total, window)
    if mask is not None:
        assert torch.equal(mask, expected)
        return
    assert time in (1, total), "without a mask, attention sees everything or is causal"
    plain = torch.ones(time, total).tril(total - time).bool()
    assert torch.equal(plain, expected)


def test_no_mask_is_made_where_none_is_needed() -> None:
    assert attention_mask(torch.arange(7), 7) is None
    assert attention_mask(torch.arange(7), 7, window=7) is None
    assert attention_mask(torch.tensor([6]), 7) is None
    assert attention_mask(torch.tensor([6]), 7, window=6) is not None
    assert attention_mask(torch.arange(5, 7), 7) is not None
    assert attention_mask(torch.tensor([[6]]), 7) is not None, "rows may be shorter than the slots"


@pytest.mark.parametrize("window", [0, 1, 2, 5, 20])
@pytest.mark.parametrize(
    "positions",
    [
        [[0, 1, 2], [4, 5, 6], [8, 8, 8]],
        [[7], [0], [3]],
        [[0, 1, 2, 3, 4, 5, 6, 7, 8], [3, 4, 9, 9, 9, 9, 9, 9, 9]],
        [[2, 3]],
    ],
    ids=["chunks", "steps", "long and short", "one row"],
)
def test_ragged_rows(positions: list[list[int]], window: int) -> None:
    where = torch.tensor(positions)
    total = int(where.max()) + 1
    mask = attention_mask(where, total, window)
    assert mask is not None
    assert torch.equal(mask, by_loop(where, total, window))


def test_both_forms_agree_where_rows_are_equally_long() -> None:
    for window in (0, 3):
        flat = attention_mask(torch.arange(4, 9), 9, window)
        rows = attention_mask(torch.arange(4, 9).expand(2, 5), 9, window)
        assert flat is not None
        assert rows is not None
        assert torch.equal(rows, flat.expand(2, 1, 5, 9))


def test_rotation_turns_pairs_and_keeps_their_length() -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    turned = rotate_halves(x, angles.cos(), angles.sin())
    expected = torch.complex(x[:, :4], x[:, 4:]) * torch.polar(torch.ones_like(angles), -angles)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=1e-14)
