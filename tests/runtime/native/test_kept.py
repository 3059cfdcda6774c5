"""Packed weights that are kept: the bits of packing in memory, without a look at the stack; damage, a full
disk and several writers at once never give other ones."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch

from topograd.decode.engine import Engine
from topograd.nn.stack import Stack
from topograd.runtime.native import kept as module
from topograd.runtime.native import library
from topograd.runtime.native.kept import ABOUT, WEIGHTS, KeptRuntime, keep, open_kept, place_of
from topograd.runtime.native.runtime import NativeRuntime
from topograd.runtime.quantize import Precision
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology
from topograd.topology.plan import Plan

if library.missing_reason():
    pytest.skip(str(library.missing_reason()), allow_module_level=True)

NAMES = ("gpt-plain", "gpt-windows", "llama-biases", "qwen3", "gpt2", "gemma2", "gemma3")
PLAN = Plan.of("2,2", 4)
CONTEXT = 20


def untouched() -> Stack:
    raise AssertionError("the stack was opened")


def opened(place: Path, precision: Precision = "float32") -> KeptRuntime:
    found = open_kept(place, precision, untouched)
    assert found is not None
    return found


@torch.inference_mode()
def logits(runtime: NativeRuntime, stack: Stack | None) -> list[torch.Tensor]:
    """What every exit predicts behind two texts that slide past the context."""
    engine = Engine(stack, PLAN, CONTEXT, runtime)
    batch, found = engine.start([[1, 2, 3], [5] * (CONTEXT - 1)]), []
    for token in (4, 6, 7):
        engine.append(batch, [[token], [token]])
        for stage in engine.exits:
            engine.run(batch, stage)
            found.append(engine.logits(batch, stage, [2, 1]))
    return found


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_mapped_weights_give_the_bits_of_packed_ones(
    name: str, precision: Precision, stack_of: Callable[[str], Stack], tmp_path: Path
) -> None:
    stack = stack_of(name)
    packed = NativeRuntime(stack, precision)
    keep(packed, PLAN, tmp_path)
    for a, b in zip(logits(packed, stack), logits(opened(tmp_path, precision), None), strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def place(stack_of: Callable[[str], Stack], tmp_path: Path) -> Path:
    keep(NativeRuntime(stack_of("llama")), PLAN, tmp_path / "entry")
    opened(tmp_path / "entry")
    return tmp_path / "entry"


@pytest.mark.parametrize("file", [WEIGHTS, ABOUT])
@pytest.mark.parametrize("damage", ["bit", "end", "gone", "empty"])
def test_a_damaged_file_is_not_used(place: Path, file: str, damage: str) -> None:
    content = bytearray((place / file).read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        (place / file).unlink()
    else:
        written = {"bit": bytes(content), "end": bytes(content[:-1]), "empty": b""}
        (place / file).write_bytes(written[damage])
    assert open_kept(place, "float32", untouched) is None


def test_other_weights_settings_precisions_and_layouts_have_other_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    precisions: tuple[Precision, ...] = ("int8", "int4")
    places = {place_of(content, p) for content in (["a", 1], ["a", 2], ["b", 1]) for p in precisions}
    monkeypatch.setattr(module, "FORMAT", -1)
    assert len(places | {place_of(["a", 1], "int8")}) == 7


def test_low_ranks_and_other_relays_are_not_kept(stack_of: Callable[[str], Stack], tmp_path: Path) -> None:
    stack = deepcopy(stack_of("llama"))
    stages = Stage(0, 2, (Edge(EMBEDDING),)), Stage(2, 4, (Edge(0, relay="pre-norm"),))
    keep(NativeRuntime(stack), Plan.of(Topology(4, stages), 4), tmp_path / "relay")
    stack.add_heads([0], rank=2)
    keep(NativeRuntime(stack), PLAN, tmp_path / "low-rank")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_keeps_nothing(
    stack_of: Callable[[str], Stack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    keep(NativeRuntime(stack_of("llama")), PLAN, tmp_path / "entry")
    assert list((tmp_path / "entry").iterdir()) == []


def test_a_folder_that_cannot_be_made_keeps_nothing(stack_of: Callable[[str], Stack], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep(NativeRuntime(stack_of("llama")), PLAN, tmp_path / "file" / "entry")
    assert open_kept(tmp_path / "file" / "entry", "float32", untouched) is None


def test_several_writers_and_readers_at_once(stack_of: Callable[[str], Stack], tmp_path: Path) -> None:
    stack = stack_of("llama")
    wanted = logits(NativeRuntime(stack), stack)

    def work(turn: int) -> list[torch.Tensor] | None:
        keep(NativeRuntime(stack), PLAN, tmp_path)
        found = open_kept(tmp_path, "float32", untouched)
        return None if found is None else logits(found, None)

    with ThreadPoolExecutor(4) as pool:
        for each in pool.map(work, range(12)):  # one that reads between two renames finds the same bytes
            assert each is not None
            assert all(torch.equal(a, b) for a, b in zip(each, wanted, strict=True))
    assert {file.name for file in tmp_path.iterdir()} == {WEIGHTS, ABOUT}


def test_the_least_recently_used_are_dropped_and_a_mapped_one_stays(
    stack_of: Callable[[str], Stack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 1)
    runtime = NativeRuntime(stack_of("llama"))
    first, second, third = (tmp_path / (24 * digit) for digit in "abc")
    keep(runtime, PLAN, first)
    mapped = opened(first)
    keep(runtime, PLAN, second)
    assert first.exists()
    assert logits(mapped, None)
    del mapped
    gc.collect()
    os.utime(first, (1, 1))
    keep(runtime, PLAN, third)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == [third.name]


def test_what_is_not_kept_opens_the_stack(
    stack_of: Callable[[str], Stack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = stack_of("llama")
    monkeypatch.setattr(module, "REACH", 8)
    keep(NativeRuntime(stack, "int8"), PLAN, tmp_path)
    runtime = open_kept(tmp_path, "int8", lambda: stack)
    assert runtime is not None
    wanted = NativeRuntime(stack, "int8")
    assert "stack" not in vars(runtime)
    for name, table in wanted.rotations(CONTEXT).items():
        assert np.array_equal(runtime.rotations(CONTEXT)[name], table)
    h, rows = torch.randn(2, stack.width), torch.tensor([3, 1])
    wanted.head(-1)
    assert torch.equal(runtime.readout(h, 1, rows), wanted.readout(h, 1, rows))
