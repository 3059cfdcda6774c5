"""Choice of an inference backend and of a precision.

By rule, what was measured to be faster (`benchmarks/llama_cpp.py`, `benchmarks/runtimes.py`): our own kernels
if they were built, the processor has AVX2 and they can run the model; else ONNX Runtime if it can; torch for
everything else: float64, other devices, layers that neither has. Weights are float32 unless less is asked
for.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from topograd.errors import ConfigError
from topograd.runtime.native import library
from topograd.runtime.protocol import Runtime
from topograd.runtime.quantize import Precision, Quantized, check_precision

if TYPE_CHECKING:
    from topograd.nn.stack import Stack

RUNTIMES = ("torch", "onnx", "native")
WEIGHTS = {"torch": ("float32",), "onnx": ("float32", "int8", "int4")}
"""Precisions of those that do not have all."""


def installed() -> bool:
    """Whether onnxruntime and onnx can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxruntime"))


def preferred() -> str:
    """What runs a model on this machine where it can and nothing else is asked for."""
    if library.missing_reason() is None:
        return "native"
    return "onnx" if installed() else "torch"


def runtime_of(
    stack: Stack,
    name: str | None = None,
    weights: str = "float32",
    made: dict[str, Quantized] | None = None,
) -> Runtime | None:
    """The runtime of that name (torch, native, onnx or onnx:PROVIDER), by default the faster; None is torch.

    `made` holds matrices that are quantised already.
    """
    precision = check_precision(weights)
    chosen = name or _default(stack, precision)
    check_runtime(chosen, weights)
    kind, _, provider = chosen.partition(":")
    if kind == "torch":
        return None
    if kind == "native":
        from topograd.runtime.native.runtime import NativeRuntime

        return NativeRuntime(stack, precision, made)
    from topograd.runtime.onnx_runtime import OnnxRuntime

    return OnnxRuntime(stack, precision, provider or "cpu", made)


def check_runtime(name: str | None, weights: str) -> None:
    """Raise ConfigError for a runtime that is none or not installed, and for a precision that it lacks."""
    precision = check_precision(weights)
    if name is None:
        return
    kind, _, provider = name.partition(":")
    if kind not in RUNTIMES or (kind != "onnx" and provider):
        raise ConfigError(setting="runtime", given=name, allowed="torch, native, onnx or onnx:PROVIDER")
    if precision not in WEIGHTS.get(kind, (precision,)):
        problem = f"weights is {weights}, which {kind} does not run"
        remedy = "torch keeps the model's own" if kind == "torch" else "use --runtime native"
        raise ConfigError(problem, setting="weights", given=weights, remedy=remedy)
    if kind == "onnx" and not installed():
        problem, remedy = "the runtime onnx is not installed", "pip install onnx onnxruntime"
        raise ConfigError(problem, setting="runtime", given=name, remedy=remedy)


def _default(stack: Stack, precision: Precision) -> str:
    """The faster runtime that can; where none has the precision, the one that says why."""
    from topograd.runtime.native.runtime import unsupported_reason

    if unsupported_reason(stack) is None or precision == "bfloat16":
        return "native"
    if precision != "float32":
        return "onnx"
    if not installed():
        return "torch"
    from topograd.runtime import onnx_runtime

    return "onnx" if onnx_runtime.unsupported_reason(stack) is None else "torch"
