"""ONNX graphs written node by node, and their sessions.

Weights are not written into the graph: a session is handed the memory that holds them, so that no graph comes
near the two gigabytes that its format allows, and nothing is held twice but what ONNX Runtime packs for its
kernels. Small constants are part of the graph.

    y = graph.op("Add", a, b)                 a node; names of values in, names of values out
    y = graph.linear(x, name, weight, bias)   x Wᵀ + b in the precision of the graph (`quantize.py`)
    session = graph.session(settings)         ready to run

Limits: float32 and, for matrices, block-wise integers. Source: ONNX operators (opset 24) and those of
onnxruntime's own domain, "com.microsoft".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor

from topograd.runtime.hugepages import added, anonymous, collect
from topograd.runtime.quantize import BLOCK, LEAST, Precision, Quantized, quantize

OPSETS = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
IR_VERSION = 11
OWN = "com.microsoft"
FUSED = ("FusedMatMul", "GroupQueryAttention", "SkipSimplifiedLayerNormalization")
EXTRA = frozenset({*FUSED, "MatMulNBits", "QuickGelu"})
"""Operators of onnxruntime's own domain."""
INLINE = 1024
"""Constants of at most this many numbers are part of the graph."""
LARGE_WEIGHTS, SETTLED = 1 << 24, 32
"""Weights of so many bytes go to large pages once a session has run so often (`pages.py`)."""


@dataclass(frozen=True)
class Settings:
    """How sessions run."""

    provider: str = "CPUExecutionProvider"
    threads: int | None = None
    """Threads of a session's own; None is the pool that all sessions share."""


class Graph:
    """Nodes, inputs, outputs and weights."""

    def __init__(
        self,
        precision: Precision = "float32",
        made: dict[str, Quantized] | None = None,
        grouped: bool = False,
    ) -> None:
        self.precision, self.grouped = precision, grouped
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.weights: dict[str, NDArray[Any]] = {}
        self.made = {} if made is None else made
        """Matrices that are quantised already, by name; new ones are added."""
        self._count = 0

    def input(self, name: str, kind: int, *shape: int | str) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, value: str, name: str, kind: int, *shape: int | str) -> None:
        if value != name:
            self.nodes.append(helper.make_node("Identity", [value], [name]))
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def name(self, kind: str) -> str:
        """A name that no value has."""
        self._count += 1
        return f"{kind}_{self._count}"

    def node(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        """A node."""
        domain = OWN if kind in EXTRA else ""
        self.nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))

    def op(self, kind: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        """A node with one output."""
        out = to or self.name(kind)
        self.node(kind, inputs, [out], **attributes)
        return out

    def ops(self, kind: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """A node with several outputs."""
        out = [self.name(kind) for _ in range(count)]
        self.node(kind, inputs, out, **attributes)
        return out

    def constant(self, values: NDArray[Any] | np.floating[Any] | Sequence[int]) -> str:
        """A weight or a constant; shapes are given as whole numbers."""
        array = np.asarray(values)
        name = self.name("constant")
        self.weights[name] = np.ascontiguousarray(array) if array.ndim else array
        return name

    def tensor(self, tensor: Tensor) -> str:
        """A parameter, whose memory is shared where it can be."""
        return self.constant(tensor.detach().float().contiguous().numpy())

    def linear(self, x: str, name: str, weight: Tensor, bias: Tensor | None = None) -> str:
        """x Wᵀ + b, W (out, in); by its name the matrix is found again when it is quantised."""
        if self.precision != "float32" and weight.shape[1] >= LEAST:
            y = self._quantized(x, name, weight)
        else:
            y = self.op("FusedMatMul", x, self.tensor(weight), transB=1)
        return y if bias is None else self.op("Add", y, self.tensor(bias))

    def _quantized(self, x: str, name: str, weight: Tensor) -> str:
        if name not in self.made:
            self.made[name] = quantize(weight.detach().float().contiguous().numpy(), self.precision)
        packed = self.made[name]
        out, inputs = weight.shape
        y = self.op(
            "MatMulNBits",
            x,
            self.constant(packed.codes),
            self.constant(packed.scales),
            K=inputs,
            N=out,
            bits=packed.bits,
            block_size=BLOCK,
            accuracy_level=4,
        )
        if packed.offsets is None:
            return y
        # the sum of x over each block of its inputs; the last block may be short
        blocks = np.equal.outer(np.arange(inputs) // BLOCK, np.arange(-(-inputs // BLOCK)))
        sums = self.op("MatMul", x, self.constant(blocks.astype(np.float32)))
        return self.op("Add", y, self.op("FusedMatMul", sums, self.constant(packed.offsets)))

    def session(self, settings: Settings) -> Session:
        """The graph, ready to run."""
        outside = self._outside()
        return Session(self._model([_referred(name, a) for name, a in outside.items()]), outside, settings)

    def write(self, file: Path) -> None:
        """The graph in a file, and its weights in another of the same name that ends in .bin."""
        data, start, referred = file.with_suffix(".bin"), 0, []
        with data.open("wb") as opened:
            for name, array in self._outside().items():
                opened.write(array.tobytes())
                place = {"location": data.name, "offset": str(start), "length": str(array.nbytes)}
                referred.append(_referred(name, array, place))
                start += array.nbytes
        file.write_bytes(self._model(referred))

    def _outside(self) -> dict[str, NDArray[Any]]:
        return {name: a for name, a in self.weights.items() if a.size > INLINE}

    def _model(self, referred: list[TensorProto]) -> bytes:
        inline = [
            helper.make_tensor(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape, a.ravel())
            for name, a in self.weights.items()
            if a.size <= INLINE
        ]
        graph = helper.make_graph(self.nodes, "stage", self.inputs, self.outputs, [*inline, *referred])
        model = helper.make_model(graph, opset_imports=OPSETS, ir_version=IR_VERSION)
        serialized: bytes = model.SerializeToString()
        return serialized


def _referred(name: str, array: NDArray[Any], place: Mapping[str, str] | None = None) -> TensorProto:
    """A weight that is not in the graph: it has a place in a file, or the session is handed its memory."""
    tensor = TensorProto(name=name, data_location=TensorProto.EXTERNAL)
    tensor.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor.dims.extend(array.shape)
    for key, value in (place or {"location": "memory"}).items():
        tensor.external_data.add(key=key, value=value)
    return tensor


class Session:
    """An InferenceSession with the memory of its weights."""

    def __init__(self, model: bytes, weights: Mapping[str, NDArray[Any]], settings: Settings) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if settings.threads is None:
            options.use_per_session_threads = False
        else:
            options.intra_op_num_threads = settings.threads
        self._values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(a) for name, a in weights.items()}
        if weights:
            options.add_external_initializers(list(self._values), list(self._values.values()))
        large = sum(a.nbytes for a in weights.values()) >= LARGE_WEIGHTS
        before = anonymous() if large else []
        self.session = onnxruntime.InferenceSession(model, options, providers=[settings.provider])
        self._packed = added(anonymous(), before) if large else []
        """Where the memory lies that it took for its weights."""
        self._left = SETTLED
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]
        self.width: int = self.session.get_outputs()[0].shape[-1]
        """Numbers in the last dimension of the first output."""

    def binding(self) -> Any:
        """A new set of inputs and outputs to run on."""
        return self.session.io_binding()

    def run(self, binding: Any) -> None:
        """Run on what is bound."""
        self.session.run_with_iobinding(binding)
        if self._left:
            self._left -= 1
            if not self._left and self._packed:
                collect(self._packed)
