"""Rotations as complex products are the rotations of `attention.rotate`."""

import pytest
import torch

from topograd.nn.transformer.attention import rotate_halves
from topograd.nn.transformer.decode import RotaryCache, paired, rotate_pairs

FREQUENCIES = 10.0 ** -torch.arange(4, dtype=torch.float64)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_rotated_pairs_are_a_rotation(sign: int, ragged: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)  # batch, time, heads, head width
    inputs = torch.zeros(2, 3, dtype=torch.long)
    offset = torch.tensor([[4, 5, 6], [0, 1, 9]]) if ragged else 4
    ctx = RotaryCache(FREQUENCIES, torch.float64, sign, reach=6).layer_context(x, inputs, offset)
    rows = paired(x.reshape(6, 40).t(), 8).t().contiguous()  # as a matrix with reordered rows would give them
    result = rotate_pairs(rows, ctx, 8)
    positions = offset if isinstance(offset, torch.Tensor) else torch.arange(4, 7).expand(2, 3)
    angles = (positions[..., None] * FREQUENCIES)[:, :, None]
    plain = rotate_halves(x, angles.cos(), -sign * angles.sin())  # `rotate` turns clockwise
    back = result.unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2)  # pairs apart again
    torch.testing.assert_close(back, plain, rtol=0, atol=1e-14)


def test_positions_beyond_the_reach_are_made_when_they_come() -> None:
    cache = RotaryCache(FREQUENCIES, torch.float64, 1, reach=2)
    x = torch.zeros(1, 1, 8, dtype=torch.float64)
    ctx = cache.layer_context(x, torch.zeros(1, 1, dtype=torch.long), 7)
    assert ctx.positions.tolist() == [7]
    assert torch.equal(ctx.rotary[0, 0], torch.polar(torch.ones(4).double(), 7 * FREQUENCIES))
