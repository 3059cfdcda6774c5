"""Panels, and blocks whose scales are 16-bit floats: GGUF's are found again exactly."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from topograd.runtime.native.library import FORMATS
from topograd.runtime.native.packing import (
    Memory,
    gate_order,
    grid_of,
    halved,
    ordered,
    ordered_blocks,
    pack_blocks,
    pack_floats,
    packed_size,
    quantize_half,
)
from topograd.runtime.quantize import dequantize, quantize


def matrix(out: int = 24, inputs: int = 96, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(out, inputs)).astype(np.float32)


def test_a_panel_has_eight_outputs_side_by_side() -> None:
    weight, memory = matrix(11, 5), Memory(packed_size(11, 5, "float32"))
    packed = pack_floats([weight[:3], weight[3:]], "float32", memory)
    floats = np.frombuffer(ctypes.string_at(packed.data, 2 * 6 * 8 * 4), np.float32)
    panels = floats.reshape(2, 3, 8, 2).swapaxes(2, 3).reshape(2, 6, 8)
    np.testing.assert_array_equal(panels[0, :5], weight[:8].T)
    np.testing.assert_array_equal(panels[1, :5, :3], weight[8:].T)
    assert not panels[1, :, 3:].any()
    assert not panels[:, 5].any(), "inputs come in pairs"


@pytest.mark.parametrize("bits", [8, 4])
def test_scales_are_halves_and_integers_fit_them(bits: int) -> None:
    weight = matrix()
    packed = quantize_half(weight, bits)
    np.testing.assert_array_equal(packed.scales, packed.scales.astype(np.float16))
    found = dequantize(packed, 96)
    assert (np.abs(found - weight) <= 0.51 * np.abs(packed.scales).repeat(32, 1) + 2e-3).all()
    same = halved(packed)
    np.testing.assert_array_equal(dequantize(same, 96), found)


def test_zeros_and_tiny_numbers() -> None:
    for weight in (np.zeros((8, 32), np.float32), np.full((8, 32), 1e-12, np.float32)):
        for bits in (8, 4):
            assert np.abs(dequantize(quantize_half(weight, bits), 32)).max() <= 1e-12


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4), ("Q4_1", 4)])
def test_blocks_of_gguf_are_found_again(kind: str, bits: int) -> None:
    gguf = pytest.importorskip("gguf")
    type_ = gguf.GGMLQuantizationType[kind]
    there = gguf.quants.dequantize(gguf.quants.quantize(0.05 * matrix(64, 256), type_), type_)
    packed = quantize_half(there, bits)
    np.testing.assert_allclose(dequantize(packed, 256), there, rtol=0, atol=1e-8)
    made = pack_blocks(packed, 256, Memory(packed_size(64, 256, "int4-minima" if bits == 4 else "int8")))
    assert FORMATS[made.format] == {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4-minima"}[kind]


def dequantised(kind: str, rows: int = 16, inputs: int = 512) -> np.ndarray:
    """Random blocks of a kind of GGUF, whose numbers of 16 bits are small."""
    gguf = pytest.importorskip("gguf")
    type_ = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    raw = np.random.default_rng(1).integers(0, 256, (rows * inputs // block, size), np.uint8)
    halves = {"Q5_0": [0], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208]}
    for at, value in zip(halves.get(kind, [0, 2]), (0.0123, 0.0345), strict=False):
        raw[:, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    found: np.ndarray = gguf.quants.dequantize(raw.reshape(-1), type_).reshape(rows, inputs)
    return found


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_other_blocks_of_gguf_are_grids(kind: str) -> None:
    there = dequantised(kind)
    grid = grid_of(there)
    assert grid is not None
    found = grid.codes * grid.scales[..., None] + grid.minima[..., None]
    np.testing.assert_allclose(found.reshape(there.shape), there, rtol=1e-5, atol=1e-6 * np.abs(there).max())


def test_other_numbers_are_no_grid() -> None:
    gguf = pytest.importorskip("gguf")
    assert grid_of(matrix(16, 512)) is None
    assert grid_of(matrix(16, 70)) is None
    assert grid_of(np.full((8, 32), np.nan, np.float32)) is None
    for kind in ("Q8_0", "Q4_0", "Q4_1"):
        type_ = gguf.GGMLQuantizationType[kind]
        there = gguf.quants.dequantize(gguf.quants.quantize(matrix(16, 512), type_), type_)
        assert grid_of(there) is None, "int8 or int4 keep it in less memory"


def test_bfloat16_rounds_as_torch() -> None:
    x = matrix(8, 1000)
    x[0, :4] = np.inf, -np.inf, np.nan, 0
    memory = Memory(packed_size(8, 1000, "bfloat16"))
    packed = pack_floats([x], "bfloat16", memory)
    found = np.frombuffer(ctypes.string_at(packed.data, 8 * 1000 * 2), np.int16).copy()
    halves = torch.from_numpy(found.reshape(500, 8, 2).swapaxes(0, 1).reshape(8, 1000).copy())
    torch.testing.assert_close(
        halves.view(torch.bfloat16), torch.from_numpy(x).bfloat16(), rtol=0, atol=0, equal_nan=True
    )


def test_gate_and_up_take_turns() -> None:
    order = gate_order(10)
    assert order.tolist() == [*range(8), *range(10, 18), 8, 9, *[-1] * 6, 18, 19, *[-1] * 6]
    weight = matrix(20, 32)
    rows = ordered(weight, order)
    assert not rows[order < 0].any()
    np.testing.assert_array_equal(rows[order >= 0], weight[order[order >= 0]])
    for precision in ("int8", "int4"):
        blocks = quantize(weight, precision)
        found = dequantize(ordered_blocks(blocks, order), 32)
        np.testing.assert_array_equal(found, ordered(dequantize(blocks, 32), order))


def test_memory_is_taken_in_order() -> None:
    memory = Memory(1000)
    first, second = memory.take(10), memory.take(100)
    assert second.ctypes.data - first.ctypes.data == 64
    assert not second.any()
    with pytest.raises(AssertionError):
        memory.take(5000)
