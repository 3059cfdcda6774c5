"""The compiled kernels, called by ctypes.

The library is built when the package is installed (setup.py); where there was no compiler it is missing, and
`missing_reason` says so. Nothing is compiled at first use. The structures are those of `csrc/layout.h`.
"""

import ctypes
import os
import sys
from collections.abc import Iterable
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LEVELS = ("none", "avx2", "avx512-vnni")
"""Instruction sets, as `topograd_level` counts them."""
FORMATS = ("float32", "bfloat16", "int8", "int4", "int4-minima", "grid")
ACTIVATIONS = ("silu", "gelu", "gelu-tanh", "relu", "relu2")
NO_NORM, RMS, LAYER = range(3)
ATTENTION, MAMBA2, MAMBA3 = range(3)
ROW = ("token", "position", "slot", "room", "buffer", "sequence", "first")
"""The columns of an array of new positions."""


class Matrix(Structure):
    _fields_ = (
        ("format", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


class Norm(Structure):
    _fields_ = (("kind", c_int64), ("gain", c_void_p), ("shift", c_void_p), ("epsilon", c_float))


class Layer(Structure):
    _fields_ = (
        ("kind", c_int64),
        *((name, Matrix) for name in ("qkv", "output", "hidden", "down")),
        *((f"{name}_norm", Norm) for name in ("attention", "mlp")),
        *((f"{name}_post", Norm) for name in ("attention", "mlp")),
        *((f"{name}_norm", Norm) for name in ("query", "key")),
        *((name, c_void_p) for name in ("positions", "values")),
        *((name, c_int64) for name in ("position_rows", "heads", "kv_heads", "head_width", "window")),
        *((name, c_int64) for name in ("rotation", "norm_behind_rotation", "gated", "activation")),
        *((name, c_float) for name in ("x0_scale", "scale", "softcap")),
        *((name, c_int64) for name in ("state", "groups", "angles")),
        *((name, c_void_p) for name in ("taps", "taps_bias", "dt_bias", "rate", "skip")),
        *((name, c_void_p) for name in ("B_bias", "C_bias")),
        *((name, Norm) for name in ("gated_norm", "B_norm", "C_norm")),
    )


class Run(Structure):
    _fields_ = (
        *(
            (name, c_int64)
            for name in ("rows", "width", "layers", "buffers", "threads", "packed", "sequences")
        ),
        ("layer", POINTER(Layer)),
        *((name, c_void_p) for name in ("row", "h", "x0", "keys", "values", "before", "after")),
        *((name, c_void_p * 2) for name in ("cosine", "sine")),
        ("taps", c_void_p),
    )


class Readout(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "width", "threads")),
        *(("matrix", POINTER(Matrix)), ("norm", POINTER(Norm))),
        *(("h", c_void_p), ("logits", c_void_p), ("softcap", c_float)),
    )


@cache
def _library() -> ctypes.CDLL | None:
    """The library, if it was built."""
    for file in sorted(HERE.glob("_kernels*.so")):
        library = ctypes.CDLL(str(file))
        library.topograd_level.restype = library.topograd_size.restype = c_int64
        library.topograd_size.argtypes = [c_int64]
        sizes = [ctypes.sizeof(each) for each in (Matrix, Norm, Layer, c_int64 * len(ROW), Run, Readout)]
        if [library.topograd_size(i) for i in range(len(sizes))] != sizes:
            return None  # built of another version of the sources
        library.topograd_stage.argtypes = library.topograd_readout.argtypes = [c_void_p, c_int64]
        library.topograd_stage.restype = library.topograd_readout.restype = None
        library.topograd_panels.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p]
        library.topograd_panels.restype = None
        library.topograd_grids.argtypes = [c_void_p, c_int64, c_int64, *[c_void_p] * 3]
        library.topograd_grids.restype = c_int64
        library.topograd_read.argtypes = [c_void_p, c_int64, c_int64]
        library.topograd_read.restype = None
        return library
    return None


_forced: list[int] = []


def level() -> int:
    """Which instruction set of LEVELS runs here; 0 where none can or nothing was built."""
    library = _library()
    return 0 if library is None else min([int(library.topograd_level()), *_forced])


def use_level(wanted: int | None) -> None:
    """Use no more than an instruction set from now on, or the best one (None): for comparisons."""
    _forced[:] = [] if wanted is None else [wanted]


def missing_reason() -> str | None:
    """Why there are no kernels on this machine; None where there are."""
    if _library() is None:
        return "its kernels were not built: install a C++ compiler, then topograd again"
    return None if level() else "this processor has no AVX2, FMA and F16C"


def default_threads() -> int:
    """As many as torch has, or would have: OMP_NUM_THREADS, else one for each core that may be used."""
    if "torch" in sys.modules:
        count: int = sys.modules["torch"].get_num_threads()
        return count
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if given.isdigit() and int(given):
        return int(given)
    usable: Iterable[int] = range(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
    return len({_siblings(cpu) for cpu in usable})


def _siblings(cpu: int) -> str:
    """Which processors share a core with one."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def run_stage(run: Run) -> None:
    """The layers of a stage, or of a chain of them, on new positions."""
    _called().topograd_stage(byref(run), level())


def run_readout(readout: Readout) -> None:
    """Logits of rows by a head."""
    _called().topograd_readout(byref(readout), level())


def fill_panels(rows: int, panels: int, inputs: int, half: bool, to: int) -> None:
    """Rows of floats, by an array of their addresses, to panels (`packing.py`)."""
    _called().topograd_panels(rows, panels, inputs, half, to)


def find_grids(values: int, count: int, levels: int, codes: int, scales: int, minima: int) -> int:
    """Grids of runs of 16 floats (`packing.py`): how many there are before the first run that has none."""
    return int(_called().topograd_grids(values, count, levels, codes, scales, minima))


def read_plainly(address: int, size: int, threads: int) -> None:
    """Load some memory and do nothing with it."""
    _called().topograd_read(address, size, threads)


def _called() -> Any:
    library = _library()
    assert library is not None, "a runtime is made only where missing_reason is None"
    return library
