"""A graph's matrices, in each precision, against numpy; its weights are memory that is handed over."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")

from topograd.runtime.graph import INLINE, Graph, Session
from topograd.runtime.layers import FLOAT
from topograd.runtime.onnx_runtime import shared_settings
from topograd.runtime.quantize import Precision, dequantize


def run(session: Session, x: np.ndarray, width: int) -> np.ndarray:
    y = np.empty((len(x), width), np.float32)
    binding = session.binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    session.run(binding)
    return y


@pytest.mark.parametrize("inputs", [64, 70])
@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
def test_a_matrix_in_each_precision(precision: Precision, inputs: int) -> None:
    """With quantised weights x is quantised too, to 1/254 of its largest number in a block."""
    torch.manual_seed(0)
    weight, bias = torch.randn(48, inputs), torch.randn(48)
    graph = Graph(precision)
    graph.input("x", FLOAT, "rows", inputs)
    graph.output(graph.linear("x", "w", weight, bias), "y", FLOAT, "rows", 48)
    assert any(a.size > INLINE for a in graph.weights.values()), "the matrix is outside the graph"
    session = graph.session(shared_settings())
    assert (session.inputs, session.outputs, session.width) == (["x"], ["y"], 48)
    matrix = weight.numpy() if precision == "float32" else dequantize(graph.made["w"], inputs)
    for rows in (1, 3):
        x = np.random.default_rng(rows).normal(size=(rows, inputs)).astype(np.float32)
        wanted = x @ matrix.T + bias.numpy()
        bound = 1e-4 if precision == "float32" else 0.02 * np.abs(x).max() * np.sqrt(inputs)
        assert np.abs(run(session, x, 48) - wanted).max() < bound


def test_float32_weights_are_not_copied() -> None:
    weight = torch.randn(64, 64)
    graph = Graph()
    name = graph.tensor(weight)
    assert graph.weights[name].ctypes.data == weight.data_ptr()
