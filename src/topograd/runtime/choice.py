"""Choice of an inference backend and of a precision.

By rule, what was measured to be faster (docs/results, `benchmarks/llama_cpp.py`): ONNX Runtime if it can run
the model, since it was at every size and number of rows that was tried; torch for everything else: float64,
other devices, layers that are not written as operators, and where onnxruntime is not installed. Weights are
float32 unless less is asked for.
"""

from __future__ import annotations

import importlib.util

from topograd.errors import ConfigError
from topograd.nn.stack import Stack
from topograd.runtime.protocol import Runtime
from topograd.runtime.quantize import Quantized, check_precision

RUNTIMES = ("torch", "onnx")


def installed() -> bool:
    """Whether onnxruntime and onnx can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxruntime"))


def runtime_of(
    stack: Stack,
    name: str | None = None,
    weights: str = "float32",
    made: dict[str, Quantized] | None = None,
) -> Runtime | None:
    """The runtime of that name (torch, onnx or onnx:PROVIDER), by default the faster; None is torch.

    `made` holds matrices that are quantised already.
    """
    precision = check_precision(weights)
    kind, _, provider = (name or "").partition(":")
    if name is not None and (kind not in RUNTIMES or (kind != "onnx" and provider)):
        raise ConfigError(setting="runtime", given=name, allowed="torch, onnx or onnx:PROVIDER")
    if kind == "torch":
        if precision != "float32":
            raise ConfigError(
                f"weights is {weights}, which only onnx runs",
                setting="weights",
                given=weights,
                remedy="torch keeps the model's own",
            )
        return None
    if not installed():
        if name is None and precision == "float32":
            return None
        raise ConfigError(
            "the runtime onnx is not installed",
            setting="runtime",
            given=name,
            remedy="pip install onnx onnxruntime",
        )
    from topograd.runtime.onnx_runtime import OnnxRuntime, unsupported_reason

    if name is None and precision == "float32" and unsupported_reason(stack) is not None:
        return None
    return OnnxRuntime(stack, precision, provider or "cpu", made)
