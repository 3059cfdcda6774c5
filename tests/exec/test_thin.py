"""Rounding to few bits: against numbers one by one, its bounds, its mean, and its bytes."""

from __future__ import annotations

import math

import pytest
import torch

from topograd.exec.thin import packed, packed_shape, quantized, rounded, unpacked

BITS = (16, 8, 4, 3)
KEY = (1, 2, 0, 1, 0)


def gradient(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("bits", BITS)
def test_every_number_is_the_floor_with_its_noise(bits: int) -> None:
    g, levels = gradient(2, 3, 5), 2 ** (bits - 1) - 1
    numbers, scale = quantized(g, bits, KEY)
    noise = torch.rand(g.shape, generator=_same_generator())
    for place in torch.cartesian_prod(*map(torch.arange, g.shape)).tolist():
        b, t, i = place
        s = torch.tensor(max(abs(x) for x in g[b, t].tolist()) / levels, dtype=torch.float32).item()
        assert scale[b, t, 0].item() == s
        q = min(levels, max(-levels, math.floor(g[b, t, i].item() / s + noise[b, t, i].item())))
        assert numbers[b, t, i].item() == q


def _same_generator() -> torch.Generator:
    import hashlib

    digest = hashlib.blake2b(b"(1, 2, 0, 1, 0)", digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@pytest.mark.parametrize("bits", BITS)
def test_the_error_is_below_the_scale_and_has_mean_zero(bits: int) -> None:
    g, draws = gradient(4, 16), 2000
    _, scale = quantized(g, bits, KEY)
    errors = torch.stack([rounded(g, bits, (i,)) - g for i in range(draws)])
    assert bool((errors.abs() <= scale * (1 + 1e-6)).all())
    # a draw's deviation is at most s / 2: five of the mean's
    assert bool((errors.mean(0).abs() <= 5 * scale / 2 / math.sqrt(draws)).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 16])
def test_bytes_give_the_rounded_gradient_again(bits: int, dtype: torch.dtype, width: int) -> None:
    g = gradient(2, 3, width, dtype=dtype)
    stored = packed(g, bits, KEY)
    assert stored.dtype == torch.uint8
    assert stored.shape == packed_shape(tuple(g.shape), bits)
    assert torch.equal(unpacked(stored, tuple(g.shape), dtype, bits), rounded(g, bits, KEY))


def test_four_bits_are_an_eighth_of_float32_beside_the_scale() -> None:
    positions, size = packed_shape((2, 8, 64), 4)
    assert positions * (size - 4) == 2 * 8 * 64 * 4 // 8
    assert packed_shape((1, 16), 3) == (1, 4 + 6)


def test_32_bits_change_nothing_and_other_keys_draw_otherwise() -> None:
    g = gradient(3, 8)
    assert rounded(g, 32, KEY) is g
    assert torch.equal(rounded(g, 4, KEY), rounded(g, 4, KEY))
    for i in range(len(KEY)):
        other = tuple(k + (i == j) for j, k in enumerate(KEY))
        assert not torch.equal(rounded(g, 4, KEY), rounded(g, 4, other))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_stays_visible(bad: float) -> None:
    g = gradient(2, 8, dtype=torch.float32)
    g[0, 3] = bad
    out = rounded(g, 4, KEY)
    assert not out[0].isfinite().all()
    assert out[1].isfinite().all()
    assert not unpacked(packed(g, 4, KEY), (2, 8), torch.float32, 4)[0].isfinite().all()


def test_zeros_stay_zeros() -> None:
    assert not rounded(torch.zeros(2, 8), 4, KEY).any()
