"""Kept logits of a teacher: exact where they are kept, the right mass elsewhere, resumed, verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raising import refused
from topograd.errors import ConfigError, RunError
from topograd.exec.forward import Predictor
from topograd.exec.objectives import teacher_logits
from topograd.exec.train_step import train_step
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.runs.session import LoadedTextRun
from topograd.topology.dag import Topology
from topograd.training import sparse_teacher
from topograd.training.row_cache import open_rows
from topograd.training.sparse_teacher import WHAT, write_teacher


@pytest.fixture(scope="module")
def teacher(make_session: Callable[..., LoadedTextRun]) -> Predictor:
    session = make_session(2)
    return Predictor(session.stack, session.plan)


def rows(count: int = 5) -> tuple[Tensor, Tensor]:
    inputs = torch.randint(200, (count, 8), generator=torch.Generator().manual_seed(0))
    return inputs, inputs.roll(-1, 1)


def student_gradients(inputs: Tensor, targets: Tensor, taught: Callable[[slice], Tensor]) -> list[Tensor]:
    """Of a staged student that follows the teacher at every stage."""
    torch.manual_seed(0)
    stack = GPT(layers=2, width=16, heads=2, vocab=257, context=16, head_std=0.1).double()
    plan = prepare(stack, Topology.chain("1,1", objective="distillation"))
    train_step(stack, plan, inputs, targets, teacher=taught)
    return [p.grad for p in stack.parameters() if p.grad is not None]


def test_all_of_the_vocabulary_is_the_teacher_itself(teacher: Predictor, tmp_path: Path) -> None:
    inputs, targets = rows()
    store = write_teacher(tmp_path / "t", teacher, inputs, targets, name="x", top=257)
    dense = teacher_logits(teacher, inputs)
    torch.testing.assert_close(store.logits(range(5))(slice(0, 40)), dense(slice(0, 40)))
    ours, theirs = (student_gradients(inputs, targets, t) for t in (store.logits(range(5)), dense))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_some_of_it_keeps_probabilities_and_mass(teacher: Predictor, tmp_path: Path) -> None:
    inputs, targets = rows()
    store = write_teacher(tmp_path / "t", teacher, inputs, targets, name="x", top=9)
    kept = store.logits([3, 1])(slice(0, 16)).softmax(-1)
    with torch.no_grad():
        true = teacher(inputs[[3, 1]]).flatten(0, 1).softmax(-1)
    best = true.topk(9).indices
    torch.testing.assert_close(kept.gather(1, best), true.gather(1, best), rtol=1e-4, atol=1e-6)
    rest = kept.scatter(1, best, 0.0)
    torch.testing.assert_close(rest.sum(1), 1 - true.gather(1, best).sum(1), rtol=1e-3, atol=1e-5)


def test_it_goes_on_where_it_was_killed(
    teacher: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_teacher, "SHARD_ROWS", 2)
    inputs, targets = rows()
    whole = write_teacher(tmp_path / "whole", teacher, inputs, targets, name="x", top=4)
    calls = 0

    def killed(rows: Tensor, original: Callable[[Tensor], Tensor] = teacher.forward) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return original(rows)

    monkeypatch.setattr(teacher, "forward", killed)
    with pytest.raises(KeyboardInterrupt):
        write_teacher(tmp_path / "t", teacher, inputs, targets, name="x", top=4)
    with pytest.raises(RunError, match="is not complete"):
        open_rows(tmp_path / "t", WHAT)
    again = write_teacher(tmp_path / "t", teacher, inputs, targets, name="x", top=4)
    assert calls == 4, "the first shard was not computed again"
    assert torch.equal(again.logits(range(5))(slice(0, 40)), whole.logits(range(5))(slice(0, 40)))


def test_another_teacher_and_a_flipped_bit_are_refused(teacher: Predictor, tmp_path: Path) -> None:
    inputs, targets = rows()
    write_teacher(tmp_path / "t", teacher, inputs, targets, name="x", top=4)
    with refused(RunError, setting="teacher", given="y"):
        write_teacher(tmp_path / "t", teacher, inputs, targets, name="y", top=4)
    with refused(ConfigError, setting="top", given=0):
        write_teacher(tmp_path / "t", teacher, inputs, targets, name="x", top=0)
    path = tmp_path / "t" / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="is damaged"):
        open_rows(tmp_path / "t", WHAT)
