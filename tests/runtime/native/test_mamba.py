"""Recurrent mixers in the native backend: torch's to rounding over any schedule, and one set of bits."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest
import torch

from operator_runtimes import act, close
from topograd.decode.engine import Engine
from topograd.nn.gpt import GPT
from topograd.nn.stack import Stack
from topograd.runtime.native import library
from topograd.runtime.native.runtime import NativeRuntime
from topograd.runtime.quantize import Precision, dequantize

if library.missing_reason():
    pytest.skip(str(library.missing_reason()), allow_module_level=True)

KINDS = ("mamba2", "mamba3", "hybrid")


def made(architecture: str, width: int = 32) -> Stack:
    """Heads of 16 and states of 12, which fill no vector; a hybrid attends in its last layer."""
    torch.manual_seed(4)
    stack = GPT(
        layers=4, width=width, heads=2, vocab=23, context=90, architecture=architecture, ssm_state=12
    ).eval()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stack


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_any_schedule_is_torchs(kind: str) -> None:
    stack = made(kind)
    engines = [Engine(stack, "2,1,1"), Engine(stack, "2,1,1", runtime=NativeRuntime(stack, threads=2))]
    both = [engine.start([[k] for k in range(6)]) for engine in engines]
    for step in range(50):
        theirs, ours = (
            act(engine, batch, random.Random(step)) for engine, batch in zip(engines, both, strict=True)
        )
        close(ours, theirs)


def logits(runtime: NativeRuntime, parts: list[int]) -> torch.Tensor:
    """Of a text whose tokens come in such runs."""
    chance, engine = random.Random(0), Engine(runtime.stack, "2,2", runtime=runtime)
    text = [chance.randrange(23) for _ in range(sum(parts))]
    (sequence,), found = engine.start([text[: parts[0]]]), []
    for i, count in enumerate(parts):
        if i:
            sequence.cache.push([sequence], [text[sum(parts[:i]) : sum(parts[: i + 1])]])
        engine.run([sequence], 1)
        found.append(engine.logits([sequence], 1, [count]))
    return torch.cat(found)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["mamba2", "hybrid"])
@torch.inference_mode()
def test_rows_and_threads_do_not_change_a_bit(kind: str, precision: Precision) -> None:
    stack = made(kind)
    alone = logits(NativeRuntime(stack, precision, threads=1), [1] * 80)
    for threads in (1, 2, 3):
        runtime = NativeRuntime(stack, precision, threads=threads)
        for parts in ([80], [3, 70, 1, 6]):
            assert torch.equal(logits(runtime, parts), alone), (threads, parts)


@torch.inference_mode()
def test_a_run_leaves_the_state_before_it_as_it_was() -> None:
    """A snapshot is the memory that a run reads, and goes back to."""
    stack = made("mamba2")
    engine = Engine(stack, "2,2", runtime=NativeRuntime(stack))
    batch = engine.start([[1, 2, 3]])
    engine.run(batch, 1)
    state = batch[0].cache.stages[0].states([batch[0].place])[0]  # type: ignore[attr-defined]
    kept = state["all"].clone()
    before = state["all"]
    engine.append(batch, [[4]])
    engine.run(batch, 1)
    assert torch.equal(before, kept)
    assert not torch.equal(state["all"], kept)


@pytest.mark.parametrize("kind", ["mamba2", "mamba3"])
@torch.inference_mode()
def test_int8_is_the_model_of_its_weights(kind: str) -> None:
    stack = made(kind, width=64)
    runtime = NativeRuntime(stack, "int8")
    ours, twin = logits(runtime, [80]), deepcopy(stack)
    layers, head = [*twin.layers], twin.get_submodule("head")
    for name, packed in runtime.made.items():
        weight = head.get_parameter("weight") if name == "head" else _projection(layers, name)
        weight.copy_(torch.from_numpy(dequantize(packed, weight.shape[1])))
    assert len(runtime.made) == 9
    theirs = logits(NativeRuntime(twin), [80])
    assert (ours - theirs).abs().max() < 2e-3 * theirs.abs().max()


def _projection(layers: list[torch.nn.Module], name: str) -> torch.Tensor:
    _, index, part = name.split(".")
    weight: torch.Tensor = layers[int(index)].get_submodule(f"mixer.{part}").weight  # type: ignore[assignment]
    return weight
