"""ONNX Runtime: which sessions there are, and what is refused; what they compute is in test_operators.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("onnxruntime")

from raising import refused
from topograd.decode.engine import Engine
from topograd.decode.strategies import PathEnsemble, generate_batch
from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.nn.stack import Stack
from topograd.runtime.onnx_runtime import OnnxRuntime, shared_settings, unsupported_reason
from topograd.topology.plan import Plan

CONTEXT = 20


@torch.inference_mode()
def test_paths_share_sessions_and_agree(stack_of: Callable[[str], Stack]) -> None:
    stack, plan = stack_of("gpt-plain"), Plan.of("2,1,1", 4)
    engines = [Engine(stack, plan, CONTEXT), Engine(stack, plan, CONTEXT, OnnxRuntime(stack))]
    texts = [generate_batch(PathEnsemble(e, {(0, 2): 1.0, (0, 1): 2.0}), [[1, 2], [3]], 12) for e in engines]
    assert [[e.token for e in row] for row in texts[0]] == [[e.token for e in row] for row in texts[1]]
    runtime = engines[1].runtime
    assert isinstance(runtime, OnnxRuntime)
    intervals, layouts = {key[:2] for key in runtime._sessions}, {key[-1] for key in runtime._sessions}
    assert (len(intervals), layouts) == (3, {True, False})
    assert len(runtime._sessions) == 6, "one for each interval and layout, whichever path runs it"


def test_what_cannot_be_run_is_refused(stack_of: Callable[[str], Stack]) -> None:
    assert unsupported_reason(stack_of("llama")) is None
    mamba = GPT(layers=2, width=32, heads=2, vocab=9, context=8, architecture="mamba3", ssm_state=4)
    with refused(ConfigError, setting="runtime"):
        OnnxRuntime(mamba)
    wide = GPT(layers=2, width=32, heads=2, vocab=9, context=8).double()
    with refused(ConfigError, setting="runtime"):
        OnnxRuntime(wide)
    with refused(ConfigError, setting="provider", given="cuda"):
        shared_settings("cuda")
