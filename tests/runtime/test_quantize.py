"""Block-wise integers: what they stand for, exact on their own grid, and llama.cpp's Q4_1 is kept."""

from __future__ import annotations

import numpy as np
import pytest

from raising import refused
from topograd.errors import ConfigError
from topograd.runtime.quantize import BLOCK, Precision, again, check_precision, dequantize, quantize


@pytest.mark.parametrize("inputs", [64, 70])
@pytest.mark.parametrize(("precision", "levels"), [("int8", 254), ("int4", 15)])
def test_no_weight_moves_by_more_than_half_a_step(precision: Precision, levels: int, inputs: int) -> None:
    weight = np.random.default_rng(0).normal(size=(5, inputs)).astype(np.float32)
    packed = quantize(weight, precision)
    found = dequantize(packed, inputs)
    assert packed.codes.shape == (5, -(-inputs // BLOCK), BLOCK * packed.bits // 8)
    step = np.repeat(packed.scales, BLOCK, axis=1)[:, :inputs]
    assert (np.abs(found - weight) <= 0.501 * step).all()
    spans = weight[:, :BLOCK].max(1) - weight[:, :BLOCK].min(1)
    assert (packed.scales[:, 0] <= 1.001 * (2 if precision == "int8" else 1) * spans.max() / levels).all()
    again = dequantize(quantize(found, precision), inputs)
    np.testing.assert_allclose(again, found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kinds", "precision", "told"),
    [
        ("F32 Q8_0", "int8", None),
        ("Q4_0 Q4_1", "int4", None),
        ("Q4_K Q6_K", "float32", None),
        (None, "int4", None),
        ("BF16", "int4", None),
        ("Q4_K Q6_K", "int4", "Q4_K, Q6_K"),
        ("Q4_1 Q8_0", "int8", "Q4_1"),
    ],
)
def test_blocks_are_not_quantised_again_in_silence(
    kinds: str | None, precision: str, told: str | None
) -> None:
    said = again(kinds, precision, "onnx")
    assert said is None if told is None else str(said).startswith(f"{told} of")
    if "_K" in str(kinds):
        assert again(kinds, precision, "native") is None


def test_weights_of_a_q4_1_file_are_kept() -> None:
    rng = np.random.default_rng(1)
    scale, low = (rng.normal(size=(4, 2, 1)).astype(np.float16).astype(np.float32) for _ in range(2))
    codes = rng.integers(0, 16, size=(4, 2, BLOCK))
    codes[..., 0], codes[..., 1] = 0, 15  # as the smallest and the largest of a block are written
    weight = (np.abs(scale) * codes + low).reshape(4, -1).astype(np.float32)
    np.testing.assert_allclose(dequantize(quantize(weight, "int4"), 64), weight, rtol=1e-5, atol=1e-5)


def test_rows_and_zeros() -> None:
    weight = np.zeros((3, BLOCK), np.float32)
    weight[1] = np.arange(BLOCK)
    for precision in ("int8", "int4"):
        packed = quantize(weight, check_precision(precision))
        some = dequantize(packed.rows(np.array([1, 0])), BLOCK)
        np.testing.assert_array_equal(some, dequantize(packed, BLOCK)[[1, 0]])
        assert not some[1].any()


def test_unknown_weights_are_refused() -> None:
    with refused(
        ConfigError, setting="weights", given="int3", allowed="one of float32, bfloat16, int8, int4"
    ):
        check_precision("int3")
