"""Which runtimes and stage caches take arrays, and that arrays give what tensors give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime")

from topograd.decode.engine import Engine
from topograd.decode.strategies import FixedDepth, generate_tokens
from topograd.nn.stack import Stack
from topograd.runtime.onnx_runtime import OnnxRuntime
from topograd.runtime.protocol import ArrayRuntime, ArrayStageCache, TorchRuntime, single_threaded_torch
from topograd.topology.plan import Plan


def test_torch_takes_tensors_alone(stack_of: Callable[[str], Stack]) -> None:
    stack, plan = stack_of("gpt-plain"), Plan.of("2,2", 4)
    torch_runtime, onnx_runtime = TorchRuntime(stack), OnnxRuntime(stack)
    assert not isinstance(torch_runtime, ArrayRuntime)
    assert isinstance(onnx_runtime, ArrayRuntime)
    assert not any(isinstance(stage, ArrayStageCache) for stage in torch_runtime.stage_caches(plan, 8))
    assert all(isinstance(stage, ArrayStageCache) for stage in onnx_runtime.stage_caches(plan, 8))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gpt", "gpt-plain", "llama", "gemma2"])
def test_a_sequence_is_embedded_as_torch_does(stack_of: Callable[[str], Stack], name: str) -> None:
    """The token before counts where the model smears."""
    stack = stack_of(name)
    tokens = [3, 1, 4]
    for before in (None, 5):
        wanted = stack.embed(torch.tensor([tokens]), None if before is None else torch.tensor([before]))
        previous = [-1 if before is None else before, *tokens[:-1]]
        found = torch.from_numpy(OnnxRuntime(stack).embed_array(tokens, previous))[None]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_torch_has_one_thread_beside_another_runtime(
    stack_of: Callable[[str], Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, before = stack_of("gpt-plain"), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = Engine(stack, "2,2", runtime=OnnxRuntime(stack))
        seen = []
        strategy = FixedDepth(engine)
        step = strategy.step

        def watched(*given: Any) -> Any:
            seen.append(torch.get_num_threads())
            return step(*given)

        monkeypatch.setattr(strategy, "step", watched)
        for _ in generate_tokens(strategy, [[1]], 2):
            assert torch.get_num_threads() == 2, "whoever is handed a token has torch as it was"
        assert seen == [1, 1]
        with single_threaded_torch(TorchRuntime(stack)):
            assert torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="anything"), single_threaded_torch(engine.runtime):
            raise ValueError("anything")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
