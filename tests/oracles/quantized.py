"""Products with quantised matrices, written out: integers times integers, summed in float64.

x ≈ s c per block of 32, c the nearest integers with max |c| = 32767 (int8 weights) or 127 (int4)
y = Σ_blocks s d Σ c q  (+ m s Σ c)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from topograd.runtime.quantize import BLOCK, Quantized

Array = NDArray[np.float64]


def activation_codes(x: NDArray[np.float32], limit: int) -> tuple[Array, Array]:
    """Integers (rows, blocks, 32) and scales (rows, blocks); divided in float32, as the kernels do."""
    blocks = -(-x.shape[1] // BLOCK)
    parts = np.zeros((len(x), blocks * BLOCK), np.float32)
    parts[:, : x.shape[1]] = x
    parts = parts.reshape(len(x), blocks, BLOCK)
    codes, scales = np.zeros(parts.shape), np.zeros(parts.shape[:2])
    for row in range(len(x)):
        for block in range(blocks):
            largest = np.abs(parts[row, block]).max()
            if largest > 0:
                codes[row, block] = np.rint(parts[row, block] * (np.float32(limit) / largest))
            scales[row, block] = largest / np.float32(limit)
    return codes, scales


def product(x: NDArray[np.float32], matrix: Quantized) -> Array:
    """x Wᵀ (rows, out) with activations rounded too."""
    codes, scales = activation_codes(x, 32767 if matrix.bits == 8 else 127)
    out, blocks = matrix.scales.shape
    y = np.zeros((len(x), out))
    for block in range(blocks):
        bytes_ = matrix.codes[:, block].astype(np.int64)
        if matrix.offsets is None:
            q, least = bytes_ - 128, np.zeros(out)
        else:
            q = np.stack((bytes_ & 15, bytes_ >> 4), -1).reshape(out, BLOCK)
            least = matrix.offsets[block].astype(np.float64) - 8 * matrix.scales[:, block].astype(np.float64)
        own, s = codes[:, block], scales[:, block, None]
        y += s * matrix.scales[:, block] * (own @ q.T) + least * s * own.sum(1, keepdims=True)
    return y
