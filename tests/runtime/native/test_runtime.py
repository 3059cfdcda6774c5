"""The native backend: the same bits for any number of threads and rows; quantised weights against the oracle.
That float32 is torch's is in ../test_operators.py."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from operator_runtimes import act, close
from raising import refused
from tests.oracles import quantized
from topograd.decode.engine import Engine
from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.nn.stack import Stack
from topograd.nn.transformer.config import TransformerConfig
from topograd.nn.transformer.stack import Transformer
from topograd.runtime.native import library
from topograd.runtime.native.runtime import NativeRuntime, unsupported_reason
from topograd.runtime.quantize import Precision, Quantized, dequantize, quantize

if library.missing_reason():
    pytest.skip(str(library.missing_reason()), allow_module_level=True)

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8", "int4")
VOCAB = 45
LONG = TransformerConfig(
    family="llama",
    layers=3,
    width=72,
    heads=6,
    kv_heads=2,
    head_width=16,
    mlp_width=100,
    vocab=VOCAB,
    context=700,
)
"""Widths that fill neither panels nor blocks; three layers, two of which a stage sends on."""


@pytest.fixture(scope="module")
def stack() -> Stack:
    torch.manual_seed(0)
    made = Transformer(LONG).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def tokens(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(VOCAB) for _ in range(count)]


def logits_in_parts(runtime: NativeRuntime, text: list[int], parts: list[int]) -> torch.Tensor:
    """Logits of a text whose tokens come in runs of these lengths, the last perhaps shorter, and again."""
    engine = Engine(runtime.stack, "1,2", 700, runtime)
    (sequence,) = engine.start([text[:1]])
    found, at, turn = [], 0, 0
    while at < len(text):
        count = min(parts[turn % len(parts)], len(text) - at)
        if at or count > 1:
            sequence.cache.push([sequence], [text[max(at, 1) : at + count]])
        engine.run([sequence], 1)
        found.append(engine.logits([sequence], 1, [count]))
        at, turn = at + count, turn + 1
    return torch.cat(found)


@pytest.mark.parametrize("precision", PRECISIONS)
@torch.inference_mode()
def test_rows_and_threads_do_not_change_a_bit(stack: Stack, precision: Precision) -> None:
    text = tokens(90)
    alone = logits_in_parts(NativeRuntime(stack, precision, threads=1), text, [1])
    for threads in (1, 2, 3):
        runtime = NativeRuntime(stack, precision, threads=threads)
        for parts in ([1], [2], [3], [5], [8], [70, 20], [1, 8, 3]):
            assert torch.equal(logits_in_parts(runtime, text, parts), alone), (threads, parts)


@pytest.mark.parametrize("precision", PRECISIONS)
@torch.inference_mode()
def test_company_does_not_change_a_bit(stack: Stack, precision: Precision) -> None:
    """Sequences of unlike lengths in one call, against each of them alone."""
    runtime = NativeRuntime(stack, precision, threads=2)
    texts = [tokens(count, count) for count in (1, 17, 5, 40)]
    engine = Engine(stack, "1,2", 200, runtime)
    batch = engine.start(texts)
    engine.run(batch, 1)
    together = engine.logits(batch, 1)
    engine.append(batch, [[k] for k in range(4)])
    engine.run(batch, 1)
    after = engine.logits(batch, 1)
    for i, text in enumerate(texts):
        alone = logits_in_parts(runtime, [*text, i], [1])
        assert torch.equal(together[i], alone[-2])
        assert torch.equal(after[i], alone[-1])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.skipif(library.level() < 2, reason="one instruction set here")
@torch.inference_mode()
def test_instruction_sets_agree(stack: Stack, precision: Precision) -> None:
    best = logits_in_parts(NativeRuntime(stack, precision), tokens(30), [8])
    library.use_level(1)
    try:
        lower = logits_in_parts(NativeRuntime(stack, precision), tokens(30), [8, 1, 3])
    finally:
        library.use_level(None)
    assert torch.equal(lower, best)


@pytest.mark.parametrize("precision", PRECISIONS)
@torch.inference_mode()
def test_what_is_not_a_number_stays_so(stack: Stack, precision: Precision) -> None:
    """In its own row alone: nothing is rounded to a number, and the rows beside it are as before."""
    runtime = NativeRuntime(stack, precision, threads=2)
    h = torch.randn(3, 72, generator=torch.Generator().manual_seed(1))
    wanted = runtime.readout(h, 0)
    for bad in (float("nan"), float("inf"), -float("inf")):
        h[1, 40] = bad
        found = runtime.readout(h, 0)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], wanted[[0, 2]])


@torch.inference_mode()
def test_a_layer_passes_on_what_is_not_a_number() -> None:
    torch.manual_seed(0)
    for activation in ("silu", "relu"):
        broken = Transformer(LONG.changed(activation=activation)).eval()
        broken.embedding.weight.detach()[7] = float("nan")
        for precision in PRECISIONS:
            found = logits_in_parts(NativeRuntime(broken, precision), [1, 2, 7, 3], [4])
            assert found[:2].isfinite().all()
            assert found[2:].isnan().all(), "what follows reads its keys and values"


@torch.inference_mode()
def test_runtimes_of_two_threads_take_turns(stack: Stack) -> None:
    """Each thread with a runtime of its own: one team serves both, one call at a time."""
    text = tokens(60)
    alone = {p: logits_in_parts(NativeRuntime(stack, p, threads=2), text, [1]) for p in PRECISIONS}

    def again(precision: Precision) -> bool:
        with torch.inference_mode():
            own = NativeRuntime(stack, precision, threads=2)
            return torch.equal(logits_in_parts(own, text, [1, 4]), alone[precision])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(again, PRECISIONS))


@torch.inference_mode()
def test_a_forked_process_has_threads_of_its_own(stack: Stack) -> None:
    runtime, h = NativeRuntime(stack, threads=2), torch.randn(2, 72)
    wanted = runtime.readout(h, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
        child = os.fork()
    if not child:
        os._exit(0 if torch.equal(runtime.readout(h, 0), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(runtime.readout(h, 0), wanted)


@torch.inference_mode()
def test_a_long_text_is_torchs(stack: Stack) -> None:
    """More rows than go through a stage at once, and more positions than a first buffer holds."""
    text = tokens(660)
    found = logits_in_parts(NativeRuntime(stack), text, [600, 1, 59])
    engine = Engine(stack, "1,2", 700)
    batch = engine.start([text])
    engine.run(batch, 1)
    close(found, engine.logits(batch, 1, [660]))


@pytest.mark.parametrize("precision", ["int8", "int4"])
@torch.inference_mode()
def test_a_head_is_the_oracles_product(stack: Stack, precision: Precision) -> None:
    runtime = NativeRuntime(stack, precision, threads=2)
    h = torch.randn(11, 72, generator=torch.Generator().manual_seed(1))
    found = runtime.readout(h, 0).numpy()
    assert isinstance(stack, Transformer)
    x = stack.normalize(h).numpy()
    wanted = quantized.product(x, runtime.made["head"])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * np.abs(wanted).max())
    exact = x.astype(np.float64) @ dequantize(runtime.made["head"], 72).T
    bound = 1e-4 if precision == "int8" else 2e-2
    assert np.abs(found - exact).max() < bound * np.abs(exact).max(), "activations are rounded a little"


@pytest.mark.parametrize("name", ["gpt", "gpt-windows", "long"])
@torch.inference_mode()
def test_int8_is_the_model_of_its_weights(stack_of: Callable[[str], Stack], stack: Stack, name: str) -> None:
    """A stack whose matrices are the quantised ones, in torch, to the rounding of 16-bit activations."""
    same = stack if name == "long" else stack_of(name)
    runtime = NativeRuntime(same, "int8")
    ours, twin = logits_of(Engine(same, str(len(same.layers)), 20, runtime)), deepcopy(same)
    assert isinstance(twin, Transformer)
    replace_matrices(twin, runtime.made)
    theirs = logits_of(Engine(twin, str(len(same.layers)), 20))
    assert (ours - theirs).abs().max() < 2e-3 * theirs.abs().max()


def logits_of(engine: Engine) -> torch.Tensor:
    batch = engine.start([[1, 2, 3, 4, 5, 6, 7], [8]])
    engine.run(batch, 0)
    return engine.logits(batch, 0, [7, 1])


def replace_matrices(stack: Transformer, made: dict[str, Quantized]) -> None:
    blocks: list[Any] = [*stack.layers]
    for index, layer in enumerate(blocks):
        a, mlp = layer.attention, layer.mlp
        for name, maps in {
            "qkv": [a.query, a.key, a.value],
            "output": [a.output],
            "gate_up": [mlp.gate, mlp.up],
            "up": [mlp.up],
            "down": [mlp.down],
        }.items():
            packed = made.get(f"layers.{index}.{name}")
            if packed is None:
                continue
            values = torch.from_numpy(dequantize(packed, maps[0].weight.shape[1]))
            for own, part in zip(maps, values.split([len(m.weight) for m in maps]), strict=True):
                own.weight.copy_(part)
    if "head" in made:
        stack.head.weight.copy_(torch.from_numpy(dequantize(made["head"], stack.width)))


@pytest.mark.parametrize("name", ["gpt", "gpt-windows", "llama", "mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
@torch.inference_mode()
def test_any_schedule_of_quantised_weights_gives_one_text(
    stack_of: Callable[[str], Stack], name: str, precision: Precision
) -> None:
    """One engine with three threads and one with one, over the same schedule: equal bits."""
    stack = stack_of(name)
    engines = [Engine(stack, "2,1,1", runtime=NativeRuntime(stack, precision, threads=n)) for n in (1, 3)]
    both = [engine.start([[k] for k in range(6)]) for engine in engines]
    for step in range(20):
        one, other = (
            act(engine, batch, random.Random(step)) for engine, batch in zip(engines, both, strict=True)
        )
        assert torch.equal(one, other)


def gridded(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Numbers as in Q4_K: for 32 of them a scale and a minimum that 16 bits do not hold."""
    codes = torch.randint(0, 16, (shape[0], shape[1] // 32, 32), generator=generator)
    scales, minima = torch.rand(2, shape[0], shape[1] // 32, 1, generator=generator)
    return (codes * scales * 0.05 - minima * 0.4).view(shape)


@pytest.mark.skipif(library.level() < 2, reason="one instruction set here")
@pytest.mark.parametrize("precision", ["int8", "int4"])
@torch.inference_mode()
def test_k_quants_are_not_quantised_again(precision: Precision) -> None:
    """To the rounding of 16-bit activations the float32 model; the same bits in every way."""
    torch.manual_seed(0)
    made = Transformer(LONG.changed(width=96, mlp_width=128)).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        if parameter.dim() == 2:
            parameter.copy_(gridded(parameter.shape, generator))
    text, runtime = tokens(40), NativeRuntime(made, precision, threads=2)
    found = logits_in_parts(runtime, text, [1])
    assert not runtime.made, "no matrix was quantised"
    exact = logits_in_parts(NativeRuntime(made), text, [8])
    assert (found - exact).abs().max() < 2e-3 * exact.abs().max()
    assert torch.equal(logits_in_parts(runtime, text, [8, 3, 29]), found)
    library.use_level(1)
    try:
        assert torch.equal(logits_in_parts(NativeRuntime(made, precision, threads=1), text, [7]), found)
    finally:
        library.use_level(None)


@torch.inference_mode()
def test_bfloat16_is_exact_for_weights_that_are(stack: Stack) -> None:
    torch.manual_seed(0)
    rounded = Transformer(LONG).eval()
    for own, its in zip(rounded.parameters(), stack.parameters(), strict=True):
        own.copy_(its.bfloat16().float())
    text = tokens(40)
    exact = logits_in_parts(NativeRuntime(rounded, "float32"), text, [8])
    assert torch.equal(logits_in_parts(NativeRuntime(rounded, "bfloat16"), text, [8]), exact)


@torch.inference_mode()
def test_matrices_that_are_made_already_are_taken(stack: Stack) -> None:
    assert isinstance(stack, Transformer)
    made = {"head": quantize(-stack.head.weight.detach().numpy(), "int8")}
    h = torch.randn(2, 72, generator=torch.Generator().manual_seed(1))
    own, given = NativeRuntime(stack, "int8"), NativeRuntime(stack, "int8", made)
    torch.testing.assert_close(given.readout(h, 0), -own.readout(h, 0), rtol=0, atol=0.1)


def test_what_cannot_be_run_is_refused(
    stack_of: Callable[[str], Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unsupported_reason(stack_of("llama")) is None
    other = GPT(layers=2, width=32, heads=2, vocab=9, context=8, architecture="mamba3", ssm_state=4)
    assert unsupported_reason(other) is None
    other.layers[1].mixer = torch.nn.Identity()
    assert "Identity layers are not transformer blocks" in str(unsupported_reason(other))
    for wrong in (other, GPT(layers=2, width=32, heads=2, vocab=9, context=8).double()):
        with refused(ConfigError, setting="runtime"):
            NativeRuntime(wrong)
    monkeypatch.setattr(library, "missing_reason", lambda: "no compiler")
    assert unsupported_reason(stack_of("llama")) == "no compiler"
