"""Which runtimes and memories take one row as arrays, and that arrays give what tensors give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")

from topograd.decode.engine import Engine, Prefix, generate_tokens
from topograd.nn.stack import Stack
from topograd.runtime.onnx_runtime import OnnxRuntime
from topograd.runtime.protocol import RowEmbedding, RowMemory, TorchRuntime, torch_beside
from topograd.topology.plan import Plan


def test_torch_takes_tensors_alone(stack_of: Callable[[str], Stack]) -> None:
    stack, plan = stack_of("gpt-plain"), Plan.of("2,2", 4)
    torch_runtime, onnx_runtime = TorchRuntime(stack), OnnxRuntime(stack)
    assert not isinstance(torch_runtime, RowEmbedding)
    assert isinstance(onnx_runtime, RowEmbedding)
    assert not any(isinstance(memory, RowMemory) for memory in torch_runtime.memories(plan, 1, 8))
    assert all(isinstance(memory, RowMemory) for memory in onnx_runtime.memories(plan, 1, 8))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gpt", "gpt-plain", "llama", "gemma2"])
def test_a_row_is_embedded_as_torch_does(stack_of: Callable[[str], Stack], name: str) -> None:
    """The token before counts where the model smears."""
    stack = stack_of(name)
    tokens = np.array([[3, 1, 4]])
    for before in (None, 5):
        wanted = stack.embed(torch.from_numpy(tokens), None if before is None else torch.tensor([before]))
        found = torch.from_numpy(OnnxRuntime(stack).embed_row(tokens, before))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_torch_has_one_thread_beside_another_runtime(
    stack_of: Callable[[str], Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, before = stack_of("gpt-plain"), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = Engine(stack, "2,2", runtime=OnnxRuntime(stack))
        seen = []
        mode = Prefix(engine)
        advance = mode.advance

        def watched(*given: Any) -> Any:
            seen.append(torch.get_num_threads())
            return advance(*given)

        monkeypatch.setattr(mode, "advance", watched)
        for _ in generate_tokens(mode, [[1]], 2):
            assert torch.get_num_threads() == 2, "whoever is handed a token has torch as it was"
        assert seen == [1, 1]
        with torch_beside(TorchRuntime(stack)):
            assert torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="anything"), torch_beside(engine.runtime):
            raise ValueError("anything")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
