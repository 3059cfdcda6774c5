"""Linear maps of rows that are divided by their root mean square, by the kernels of a head.

    y = W x / rms(x),   rms(x)² = mean(x²) + ε

x (rows, in), y (rows, out). W is packed like the weights of a stage (`packing.py`), in the same precision.
"""

from __future__ import annotations

from ctypes import pointer

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from topograd.runtime.native import library
from topograd.runtime.native.library import Norm, Readout
from topograd.runtime.native.packing import Memory, pack_blocks, pack_floats, packed_size, quantize_half
from topograd.runtime.quantize import LEAST, Precision

EPSILON = float(np.finfo(np.float32).eps)
"""As torch.nn.functional.rms_norm has it."""


class NormedLinear:
    """One matrix, packed when it is made."""

    def __init__(self, weight: Tensor, precision: Precision, threads: int) -> None:
        values, self.threads = weight.detach().float().contiguous().numpy(), threads
        outputs, inputs = values.shape
        if precision in ("float32", "bfloat16") or inputs < LEAST:
            form = "bfloat16" if precision == "bfloat16" else "float32"
            self._memory = Memory(packed_size(outputs, inputs, form))
            self._matrix = pack_floats([values], form, self._memory)
        else:
            blocks = quantize_half(values, 8 if precision == "int8" else 4)
            self._memory = Memory(packed_size(outputs, inputs, "int8"))
            self._matrix = pack_blocks(blocks, inputs, self._memory)
        self._norm = Norm(library.RMS, None, None, EPSILON)

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        x = np.ascontiguousarray(x, np.float32)
        y = np.empty((len(x), self._matrix.outputs), np.float32)
        readout = Readout(len(x), x.shape[1], self.threads, pointer(self._matrix), pointer(self._norm))
        readout.h, readout.logits, readout.softcap = x.ctypes.data, y.ctypes.data, 0.0
        library.run_readout(readout)
        return y
