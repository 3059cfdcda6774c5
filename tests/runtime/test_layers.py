"""Nonlinearities and norms as operators, each against torch; whole layers are in test_onnx_runtime.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")

from topograd.decode.engine import Engine
from topograd.nn.transformer.config import TransformerConfig
from topograd.nn.transformer.parts import ACTIVATIONS, RMSNorm
from topograd.nn.transformer.stack import Transformer
from topograd.runtime.graph import Graph
from topograd.runtime.layers import FLOAT, Stream, activation
from topograd.runtime.onnx_runtime import OnnxRuntime, shared_settings


def run(graph: Graph, x: torch.Tensor) -> torch.Tensor:
    session = graph.session(shared_settings())
    y = np.empty(x.shape, np.float32)
    binding = session.binding()
    binding.bind_cpu_input("x", x.numpy())
    binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    session.run(binding)
    return torch.from_numpy(y)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_activation(kind: str) -> None:
    x = torch.linspace(-6, 6, 101)[None]
    graph = Graph()
    graph.input("x", FLOAT, 1, 101)
    graph.output(activation(graph, "x", kind), "y", FLOAT, 1, 101)
    torch.testing.assert_close(run(graph, x), ACTIVATIONS[kind](x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("kind", ["rms", "rms around one", "layer"])
def test_a_sum_and_its_norm(kind: str, added: bool) -> None:
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(16) if kind == "layer" else RMSNorm(16, 1e-3, kind == "rms around one")
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(1, 5, 16)
    graph = Graph()
    graph.input("x", FLOAT, 1, 5, 16)
    stream = Stream(graph, "x")
    if added:
        stream.add("x")
    normed = stream.norm(norm, 16)
    graph.output(graph.op("Add", normed, stream.sum()), "y", FLOAT, 1, 5, 16)
    total = 2 * x if added else x
    torch.testing.assert_close(run(graph, x), (norm(total) + total).detach(), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_gate_in_int8_is_one_matrix_with_what_it_gates() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(
        family="llama",
        vocab=23,
        context=20,
        layers=2,
        width=64,
        heads=4,
        kv_heads=4,
        head_width=16,
        mlp_width=48,
    )
    stack = Transformer(config).eval()
    runtime = OnnxRuntime(stack, "int8")
    found = []
    for engine in (Engine(stack, "1,1", 20), Engine(stack, "1,1", 20, runtime)):
        cache = engine.start([[1, 2, 3, 4]])
        engine.run(cache, 1)
        found.append(engine.logits(cache, 1, [4]))
    assert (found[0] - found[1]).norm() < 0.03 * found[0].norm()
    assert runtime.made["layers.1.gate_up"].codes.shape == (2 * 48, 2, 32)
