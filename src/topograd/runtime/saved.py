"""Quantised weights in a file beside their run, so that they need not be made at every start.

A safetensors file of every matrix's integers, scales and, for int4, offsets (`quantize.py`), with the SHA-256
of the weights that they were made of: a file of other weights is refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from topograd.errors import RunError
from topograd.runtime.quantize import Precision, Quantized

_BITS = {"int8": 8, "int4": 4}


def weights_file(folder: Path, precision: str) -> Path:
    """Where a run keeps its weights in a precision."""
    return folder / f"weights-{precision}.safetensors"


def save(file: Path, made: dict[str, Quantized], precision: Precision, weights: str) -> None:
    """Keep matrices by name; `weights` is the SHA-256 of what they were made of."""
    tensors: dict[str, np.ndarray] = {}
    for name, packed in made.items():
        tensors |= {f"{name}:codes": packed.codes, f"{name}:scales": packed.scales}
        if packed.offsets is not None:
            tensors[f"{name}:offsets"] = packed.offsets
    part = file.with_name(f".{file.name}.part")
    save_file(tensors, part, metadata={"weights": weights, "precision": precision})
    part.replace(file)


def load(file: Path, precision: Precision, weights: str) -> dict[str, Quantized]:
    """The matrices of a file, if it is of these weights."""
    again = (
        f"delete it, or make it again with: topograd eval {file.parent} --weights {precision} --keep-weights"
    )
    try:
        with safe_open(file, "numpy") as opened:
            known = opened.metadata() or {}
            if known.get("weights") != weights or known.get("precision") != precision:
                raise RunError(f"{file} is of other weights than this run's; {again}")
            names = set(opened.keys())
            return {
                name: Quantized(
                    _BITS[precision],
                    opened.get_tensor(f"{name}:codes"),
                    opened.get_tensor(f"{name}:scales"),
                    opened.get_tensor(f"{name}:offsets") if f"{name}:offsets" in names else None,
                )
                for name in sorted({name.rpartition(":")[0] for name in names})
            }
    except (SafetensorError, OSError) as problem:
        raise RunError(f"{file} is damaged ({problem}); {again}") from None
