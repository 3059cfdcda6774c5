"""Block-quantised weights, 32 integers a block: int8 with a scale, int4 with a scale and a minimum.

For a matrix W (out, in), each row's inputs in blocks of 32, with integers q, a scale d and a minimum m per
block:

    int8    w ≈ d (q - 128),            d = max |w| / 127                        9 bits a weight
    int4    w ≈ d q + m = d (q - 8) + (m + 8 d),   d = (max w - min w) / 15      6 bits a weight

int4 is llama.cpp's Q4_1 with float32 scales: weights that come from such a file are represented exactly, but
for rounding. The product splits accordingly: x Wᵀ = Σ_blocks d ⟨x, q - 8⟩ + (m + 8 d) Σ x, where the first
term is MatMulNBits' and the second a product of the blocks' sums of x with a small matrix (out, in / 32).

Cost: O(out · in) once. Limits: what MatMulNBits multiplies by are activations in blocks of 8-bit integers too
(accuracy level 4; its other levels take up to a second a token here). Source: ONNX Runtime's MatMulNBits.

A run can keep its quantised weights, so that they need not be made at every start: a safetensors file of
every matrix's integers, scales and offsets, with their SHA-256 and that of the weights that they were made
of. A file of other weights is refused, and so is one that was changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from topograd.errors import ConfigError, RunError
from topograd.files import DamagedFileError, reading_tensors, replacing, saving_tensors
from topograd.runs.tensor_files import tensors_digest

Precision = Literal["float32", "bfloat16", "int8", "int4"]
BLOCK = 32
LEAST = 32
"""Matrices with fewer inputs than this are not quantised."""
SAME = {"int8": {"Q8_0"}, "int4": {"Q4_0", "Q4_1"}}
"""Kinds of GGUF blocks that a precision keeps as they are."""
GRIDS = {"Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
"""Those that the native runtime keeps in either (`native/packing.py`)."""
_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Quantized:
    """A matrix (out, in) in blocks."""

    bits: int
    codes: NDArray[np.uint8]
    """(out, blocks, bytes of a block); of int4, the first of two weights is in the lower half of a byte."""
    scales: NDArray[np.float32]
    """(out, blocks)."""
    offsets: NDArray[np.float32] | None
    """int4: (blocks, out), what the sum of a block of x is multiplied by."""

    def rows(self, which: NDArray[np.int64]) -> Quantized:
        """Some rows of the matrix."""
        offsets = None if self.offsets is None else self.offsets[:, which]
        return Quantized(self.bits, self.codes[which], self.scales[which], offsets)


def check_precision(name: str) -> Precision:
    """The precision of that name."""
    precision: Precision | None = next((each for each in get_args(Precision) if each == name), None)
    if precision is None:
        raise ConfigError(setting="weights", given=name, allowed=f"one of {', '.join(get_args(Precision))}")
    return precision


def again(kinds: str | None, precision: str, runtime: str) -> str | None:
    """What is said where a file's blocks, of the kinds named, are quantised once more; None where none is."""
    found = {kind for kind in (kinds or "").split() if kind.startswith("Q")}
    found -= GRIDS if runtime == "native" else set()
    if precision not in SAME or not (other := sorted(found - SAME[precision])):
        return None
    return f"{', '.join(other)} of the model's file is quantised again: --weights float32 keeps its values"


def quantize(weight: NDArray[np.float32], precision: Precision) -> Quantized:
    """W (out, in) in blocks along its inputs; a last block that is short is filled with zeros."""
    parts = pad_blocks(weight)
    if precision == "int8":
        scales = np.maximum(np.abs(parts).max(-1) / 127, _TINY).astype(np.float32)
        codes = (np.rint(parts / scales[..., None]) + 128).astype(np.uint8)
        return Quantized(8, codes, scales, None)
    low, high = parts.min(-1), parts.max(-1)
    scales = np.maximum((high - low) / 15, _TINY).astype(np.float32)
    codes = np.clip(np.rint((parts - low[..., None]) / scales[..., None]), 0, 15).astype(np.uint8)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return Quantized(4, packed, scales, np.ascontiguousarray((low + 8 * scales).astype(np.float32).T))


def pad_blocks(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """(out, in) as (out, blocks, 32), the last block filled with zeros."""
    out, inputs = weight.shape
    blocks = -(-inputs // BLOCK)
    if inputs % BLOCK:
        weight = np.pad(weight, ((0, 0), (0, blocks * BLOCK - inputs)))
    return weight.reshape(out, blocks, BLOCK)


_TINY = np.float32(1e-30)
"""The scale of a block of zeros."""


def dequantize(packed: Quantized, inputs: int) -> NDArray[np.float32]:
    """The matrix (out, in) that the integers stand for."""
    if packed.offsets is None:
        values = (packed.codes.astype(np.float32) - 128) * packed.scales[..., None]
    else:
        low, high = packed.codes & 15, packed.codes >> 4
        codes = np.stack((low, high), axis=-1).reshape(*packed.scales.shape, BLOCK).astype(np.float32)
        values = (codes - 8) * packed.scales[..., None] + packed.offsets.T[..., None]
    return values.reshape(len(values), -1)[:, :inputs]


def weights_file(folder: Path, precision: str) -> Path:
    """Where a run keeps its weights in a precision."""
    return folder / f"weights-{precision}.safetensors"


def save_weights(file: Path, made: dict[str, Quantized], precision: Precision, weights: str) -> None:
    """Keep matrices by name; `weights` is the SHA-256 of what they were made of."""
    tensors: dict[str, np.ndarray] = {}
    for name, packed in made.items():
        tensors |= {f"{name}:codes": packed.codes, f"{name}:scales": packed.scales}
        if packed.offsets is not None:
            tensors[f"{name}:offsets"] = packed.offsets
    about = {"weights": weights, "precision": precision, "sha256": _digest(tensors)}
    with replacing(file) as temporary, saving_tensors(file):
        save_file(tensors, temporary, metadata=about)


def load_weights(file: Path, precision: Precision, weights: str) -> dict[str, Quantized]:
    """The matrices of a file, if it is of these weights."""
    again = (
        f"delete it, or make it again with: topograd eval {file.parent} --weights {precision} --keep-weights"
    )
    with reading_tensors(file, RunError, again):
        with safe_open(file, "numpy") as opened:
            known = opened.metadata() or {}
            if known.get("weights") != weights or known.get("precision") != precision:
                raise RunError(
                    f"{file} is of other weights than this run's", setting="weights", given=file, remedy=again
                )
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if known.get("sha256") != _digest(tensors):
            raise DamagedFileError("its SHA-256 is not the recorded one")
    return {
        name: Quantized(
            _BITS[precision],
            tensors[f"{name}:codes"],
            tensors[f"{name}:scales"],
            tensors.get(f"{name}:offsets"),
        )
        for name in sorted({name.rpartition(":")[0] for name in tensors})
    }


def _digest(tensors: Mapping[str, NDArray[Any]]) -> str:
    import torch

    return tensors_digest({name: torch.from_numpy(array) for name, array in tensors.items()})
