"""Runtimes that tests compare with torch, by name, and what is done with both; a missing one is skipped."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from topograd.decode.engine import Engine
from topograd.decode.sequence import Sequence
from topograd.exec.forward import stage_outputs
from topograd.nn.stack import Stack
from topograd.runtime.choice import installed
from topograd.runtime.native.library import missing_reason
from topograd.runtime.protocol import Runtime
from topograd.topology.plan import Plan

NAMES = ("onnx", "native")
PLAN = Plan.of("2,2", 4)


def make(name: str, stack: Stack, precision: Any = "float32") -> Runtime:
    """A runtime over a stack."""
    if name == "native":
        if reason := missing_reason():
            pytest.skip(reason)
        from topograd.runtime.native.runtime import NativeRuntime

        return NativeRuntime(stack, precision)
    if not installed():
        pytest.skip("onnxruntime is not installed")
    from topograd.runtime.onnx_runtime import OnnxRuntime

    return OnnxRuntime(stack, precision)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal to float32's rounding after some layers of noise."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


def act(engine: Engine, batch: list[Sequence], chance: random.Random) -> torch.Tensor:
    """Something happens to some sequences; what they predict after it."""
    what, cache = chance.random(), batch[0].cache
    one, other = chance.sample(range(len(batch)), 2)
    if what < 0.2:
        cache.truncate([batch[one]], [chance.randint(1, len(batch[one]))])
    elif what < 0.35:
        twin = cache.fork(batch[other], chance.randint(1, len(batch[other])))
        cache.free(batch[one])
        batch[one] = twin
    elif what < 0.45:
        cache.free(batch[one])
        batch[one] = cache.new()
        cache.push([batch[one]], [[one]])
    some = [batch[i] for i in chance.sample(range(len(batch)), chance.randint(1, len(batch)))]
    cache.truncate(some, [min(len(sequence), 12) for sequence in some])
    most = chance.choice([1, 1, 3])
    cache.push(some, [[chance.randrange(20) for _ in range(chance.randint(1, most))] for _ in some])
    stage = chance.choice(engine.exits)
    engine.run(some, stage)
    counts = [chance.randint(1, min(len(sequence), 3)) for sequence in some]
    return engine.logits(some, stage, counts)


def check(runtime: Runtime, batch: list[Sequence]) -> None:
    """The last hidden states of sequences are those of the whole texts."""
    found = batch[0].cache.hidden(batch, 1)
    for h, sequence in zip(found, batch, strict=True):
        wanted = stage_outputs(runtime.stack, PLAN, torch.tensor([sequence.tokens]), [1])[1][0, -1]
        torch.testing.assert_close(h, wanted, rtol=1e-4, atol=1e-5)
