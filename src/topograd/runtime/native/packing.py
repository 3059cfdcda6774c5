"""Matrices in panels of 8 outputs, in one block of memory with large pages.

    float32     (panels, in / 2, 8, 2): pairs of inputs             bfloat16: the upper halves of the same
    int8        (panels, blocks): 8 scales (f16), then (8, 8, 4) integers: 8 times 4 inputs
    int4        (panels, blocks): 8 scales, 8 minima unless all are -8 d (f16), then (2, 8, 8) bytes, whose
                low halves are inputs 0..15 of the block and whose high halves 16..31
    grid        (panels, blocks): 8 scales and 8 minima (f32) of each half, then as int8

Weights of a block of 32 inputs are d q (int8, |q| ≤ 127) or d q + m (int4, 0 ≤ q ≤ 15), with d and m of 16
bits, as in GGUF. The integers are found for the rounded d and m, so a matrix that came from Q8_0, Q4_0 or
Q4_1 is found again exactly: of such a block the extremes are known to be codes. A matrix of another kind of
GGUF (Q5_0, Q5_1, K-quants) is a grid: 16 inputs are d q + m with 0 ≤ q ≤ 63 and float32 d and m, found from
the values alone, so that nothing is quantised again.

Memory is private and anonymous: shared memory gets no large pages. Cost: O(out · in), once.
"""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topograd.runtime.native.library import FORMATS, Matrix, fill_panels, find_grids
from topograd.runtime.quantize import BLOCK, Quantized, dequantize, pad_blocks

LANES = 8
LEVELS = 63
"""The largest code of a grid: Q6_K has so many."""
ALIGNED = 64
"""Panels begin at multiples of this."""
BEHIND = 4096
"""Bytes behind the last panel, which a prefetch may touch."""
Bytes = NDArray[np.uint8]


class Memory:
    """A block of memory that is filled from its start on."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(size, 1) + BEHIND, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self._filled = 0

    def take(self, size: int) -> Bytes:
        """The next bytes, aligned."""
        start = -(-self._filled // ALIGNED) * ALIGNED
        self._filled = start + size
        assert self._filled + BEHIND <= len(self._bytes), "the block was made for less"
        return self._bytes[start : self._filled]

    def filled(self) -> Bytes:
        """All bytes that were taken."""
        return self._bytes[: self._filled]


def padded(count: int) -> int:
    """Outputs in whole panels."""
    return -(-count // LANES) * LANES


def gate_order(inner: int) -> NDArray[np.int64]:
    """Rows of gate (0..inner) and up (inner..2 inner) as panels in turns; -1 is a row of zeros."""
    panels = np.full(padded(inner), -1)
    panels[:inner] = np.arange(inner)
    up = np.where(panels < 0, -1, panels + inner)
    return np.stack((panels.reshape(-1, LANES), up.reshape(-1, LANES)), 1).reshape(-1)


def ordered(x: NDArray[np.float32], order: NDArray[np.int64]) -> NDArray[np.float32]:
    """Rows in an order."""
    found = x[order]
    found[order < 0] = 0
    return found


def ordered_blocks(matrix: Quantized, order: NDArray[np.int64]) -> Quantized:
    """The same of a quantised matrix."""
    found, missing = matrix.rows(order), order < 0
    found.scales[missing] = 0
    if found.offsets is not None:
        found.offsets[:, missing] = 0
    return found


def packed_size(outputs: int, inputs: int, form: str) -> int:
    """Bytes of a matrix in a format, with what alignment may add."""
    blocks = -(-inputs // BLOCK)
    even = inputs + inputs % 2
    each = {
        "grid": 48 * blocks,
        "float32": 4 * even,
        "bfloat16": 2 * even,
        "int8": 34 * blocks,
        "int4": 18 * blocks,
    }
    return padded(outputs) * each.get(form, 20 * blocks) + ALIGNED


def pack_floats(
    weights: Sequence[NDArray[np.float32]],
    form: str,
    memory: Memory,
    order: NDArray[np.int64] | None = None,
) -> Matrix:
    """Matrices (out, in) one below the other, in float32 or rounded to bfloat16.

    Their rows come in an order, where -1 is a row of zeros; they are read where they are.
    """
    inputs = weights[0].shape[1]
    rows = np.concatenate([each.ctypes.data + each.strides[0] * np.arange(len(each)) for each in weights])
    assert all(each.dtype == np.float32 and each.strides[1] in (4, 4 * inputs) for each in weights)
    if order is not None:
        rows = np.where(order < 0, 0, rows[order])
    full = np.zeros(padded(len(rows)), np.int64)
    full[: len(rows)] = rows
    half = form == "bfloat16"
    target = memory.take(len(full) * (inputs + inputs % 2) * (2 if half else 4))
    fill_panels(full.ctypes.data, len(full) // LANES, inputs, half, target.ctypes.data)
    return _matrix(form, len(rows), inputs, target)


def pack_blocks(matrix: Quantized, inputs: int, memory: Memory) -> Matrix:
    """A quantised matrix whose scales and minima are 16-bit floats."""
    out, blocks = matrix.scales.shape
    scales = _panels(matrix.scales.astype(np.float16))
    heads, form = [scales], "int8"
    if matrix.offsets is not None:
        form = "int4-minima" if matrix.offsets.any() else "int4"
        if matrix.offsets.any():
            minima = matrix.offsets.T - 8 * matrix.scales
            heads.append(_panels(minima.astype(np.float16)))
        nibbles = np.stack((matrix.codes & 15, matrix.codes >> 4), -1).reshape(out, blocks, 2, 16)
        codes = nibbles[:, :, 0] | nibbles[:, :, 1] << 4
        groups = 2
    else:
        codes, groups = matrix.codes ^ 128, 8  # 128 + q to q in two's complement
    parts = _panels(codes).reshape(-1, blocks, LANES, groups, codes.shape[-1] // groups)
    body = np.ascontiguousarray(parts.transpose(0, 1, 3, 2, 4)).reshape(len(parts), blocks, -1)
    joined = [np.ascontiguousarray(head).view(np.uint8).reshape(len(parts), blocks, -1) for head in heads]
    width = sum(part.shape[-1] for part in [*joined, body])
    target = memory.take(len(parts) * blocks * width).reshape(len(parts), blocks, width)
    np.concatenate([*joined, body], axis=-1, out=target)
    return _matrix(form, out, inputs, target)


@dataclass(frozen=True)
class Grid:
    """A matrix (out, in) whose runs of 16 inputs are d q + m."""

    codes: NDArray[np.uint8]
    """(out, blocks, 2, 16)."""
    scales: NDArray[np.float32]
    """(out, blocks, 2)."""
    minima: NDArray[np.float32]


def grid_of(values: NDArray[np.float32]) -> Grid | None:
    """W (out, in) as a grid, if it is one that neither int8 nor int4 blocks keep."""
    out, inputs = values.shape
    some = values[:64]
    if inputs % BLOCK or not np.isfinite(some).all():
        return None
    if any(np.allclose(dequantize(quantize_half(some, bits), inputs), some, 1e-5, 1e-8) for bits in (8, 4)):
        return None
    codes = np.empty((out, inputs // BLOCK, 2, BLOCK // 2), np.uint8)
    scales, minima = (np.empty(codes.shape[:3], np.float32) for _ in range(2))
    wide = np.ascontiguousarray(values)
    addresses = [each.ctypes.data for each in (codes, scales, minima)]
    if find_grids(wide.ctypes.data, scales.size, LEVELS, *addresses) < scales.size:
        return None
    return Grid(codes, scales, minima)


def pack_grid(grid: Grid, memory: Memory) -> Matrix:
    """A grid in panels."""
    out, blocks = grid.scales.shape[:2]
    heads = np.stack((_panels(grid.scales), _panels(grid.minima)), 2).transpose(0, 1, 4, 2, 3)
    head = np.ascontiguousarray(heads).view(np.uint8).reshape(len(heads), blocks, -1)
    parts = _panels(grid.codes).reshape(-1, blocks, LANES, 8, 4).transpose(0, 1, 3, 2, 4)
    target = memory.take(len(heads) * blocks * 384).reshape(len(heads), blocks, 384)
    np.concatenate([head, parts.reshape(len(heads), blocks, -1)], axis=-1, out=target)
    return _matrix("grid", out, blocks * BLOCK, target)


def _panels(x: NDArray[np.generic]) -> NDArray[np.generic]:
    """(out, blocks, ...) to (panels, blocks, 8, ...)."""
    full = np.pad(x, [(0, padded(len(x)) - len(x)), *((0, 0) for _ in x.shape[1:])])
    return np.moveaxis(full.reshape(-1, LANES, *x.shape[1:]), 1, 2)


def _matrix(form: str, outputs: int, inputs: int, data: NDArray[np.generic]) -> Matrix:
    return Matrix(FORMATS.index(form), outputs, inputs, data.ctypes.data, None)


def quantize_half(weight: NDArray[np.float32], bits: int) -> Quantized:
    """W (out, in) in blocks with scales and minima that are 16-bit floats."""
    parts = pad_blocks(weight)
    if bits == 8:
        scales = _half(np.abs(parts).max(-1) / 127)
        codes = np.clip(_ratio(parts, scales), -127, 127) + 128
        return Quantized(8, codes.astype(np.uint8), scales, None)
    low, high = parts.min(-1), parts.max(-1)
    minima, scales = _half(low), _half((high - low) / 15)
    centred, centred_scales = _centred(parts, low, high)
    scales = np.where(centred, centred_scales, scales)
    minima = np.where(centred, -8 * scales, minima)
    integers = np.clip(_ratio(parts - minima[..., None], scales), 0, 15).astype(np.uint8)
    packed = integers[..., 0::2] | integers[..., 1::2] << np.uint8(4)
    return Quantized(4, packed, scales, np.ascontiguousarray((minima + 8 * scales).T))


def _half(x: NDArray[Any]) -> NDArray[np.float32]:
    """Rounded to 16-bit floats."""
    return x.astype(np.float16).astype(np.float32)


def _ratio(parts: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each number by its block's scale, to the nearest; 0 where the scale is."""
    wide = scales[..., None]
    return np.rint(np.divide(parts, wide, out=np.zeros_like(parts), where=wide != 0))


def _centred(
    parts: NDArray[np.float32], low: NDArray[np.float32], high: NDArray[np.float32]
) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Which blocks are d (q - 8) exactly, as in Q4_0, and their d: there the largest in size is -8 d."""
    largest = np.where(-low >= high, low, high)
    scales = _half(largest / -8)
    codes = _ratio(parts, scales)
    exact = (codes * scales[..., None] == parts).all(-1) & (codes >= -8).all(-1) & (codes <= 7).all(-1)
    return exact & (scales != 0), scales


def halved(matrix: Quantized) -> Quantized:
    """With scales and minima rounded to 16 bits; nothing changes where they are."""
    scales = _half(matrix.scales)
    if matrix.offsets is None:
        return Quantized(matrix.bits, matrix.codes, scales, None)
    minima = _half(matrix.offsets.T - 8 * matrix.scales)
    return Quantized(matrix.bits, matrix.codes, scales, np.ascontiguousarray((minima + 8 * scales).T))


def pointers(arrays: Sequence[NDArray[np.generic] | None]) -> ctypes.Array[ctypes.c_void_p]:
    """The addresses of arrays; null where there is none."""
    return (ctypes.c_void_p * len(arrays))(*(None if a is None else a.ctypes.data for a in arrays))
