"""A model's own text: its states, its blocks, what a kill leaves."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from topograd.convert import own_text
from topograd.convert.own_text import OwnText, OwnTextConfig, rows_of_step, write_own_text
from topograd.convert.prompts import Prompts
from topograd.decode.depths import engine_of
from topograd.errors import DataError, RunError
from topograd.runs.session import LoadedTextRun

SHAPE = OwnTextConfig(length=16, rows=8)


def test_states_are_those_of_the_model(session: LoadedTextRun, text: OwnText) -> None:
    assert (len(text), text.tokens) == (32, 512)
    block = text.take([1, 9])
    stack, h = session.stack, session.stack.embed(block.tokens)
    ctx = stack.layer_context(h, block.tokens)
    for stage, layer in enumerate(stack.layers):
        h = layer(h, ctx)
        unit = h / h.square().mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(block.states[:, :, stage], unit.detach(), atol=5e-3, rtol=5e-3)
    said = stack.readout(h, 2).argmax(-1)
    own = block.own[0, 1:]
    assert int(own.sum()) > 0
    assert torch.equal(said[0, :-1][own], block.tokens[0, 1:][own]), "row 1 is greedy"


def test_the_text_is_of_the_precision_that_wrote_it(
    session: LoadedTextRun, prompts: Prompts, text: OwnText, tmp_path: Path
) -> None:
    int4, shape = engine_of(session, weights="int4"), replace(SHAPE, weights="int4")
    other = write_own_text(tmp_path, int4, prompts, session.weights, 512, shape)
    assert not torch.equal(other.take([1]).states, text.take([1]).states)
    with pytest.raises(RunError, match=r"was written with .*weights='int4'"):
        write_own_text(tmp_path, engine_of(session), prompts, session.weights, 512, SHAPE)


def test_a_kill_loses_one_block(
    session: LoadedTextRun, prompts: Prompts, text: OwnText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = own_text._write_block, [2]

    def dies(*given: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(own_text, "_write_block", dies)
    with pytest.raises(KeyboardInterrupt):
        write_own_text(tmp_path, engine_of(session), prompts, session.weights, 512, SHAPE)
    monkeypatch.setattr(own_text, "_write_block", real)
    seen: list[tuple[int, int]] = []
    again = write_own_text(
        tmp_path, engine_of(session), prompts, session.weights, 512, SHAPE, lambda *done: seen.append(done)
    )
    assert seen == [(256, 512), (384, 512)]
    assert (again.all_tokens()[0] == text.all_tokens()[0]).all(), "blocks are functions of the seed"
    with pytest.raises(RunError, match="other weights"):
        OwnText.open(tmp_path, "else")
    with pytest.raises(RunError, match="was written with"):
        write_own_text(tmp_path, engine_of(session), prompts, session.weights, 9, replace(SHAPE, seed=1))


def test_a_block_that_is_gone_is_written_again_and_a_changed_one_refused(
    session: LoadedTextRun, prompts: Prompts, text: OwnText, tmp_path: Path
) -> None:
    folder = tmp_path / "text"
    shutil.copytree(text.folder, folder)
    first, second = (file.name for file in text.blocks[:2])
    (folder / first).unlink()
    again = write_own_text(folder, engine_of(session), prompts, session.weights, 512, SHAPE)
    assert (again.all_tokens()[0] == text.all_tokens()[0]).all()
    content = bytearray((folder / second).read_bytes())
    content[-1] ^= 1
    (folder / second).write_bytes(content)
    with pytest.raises(DataError, match=r"SHA-256 is not the recorded one.*delete it"):
        write_own_text(folder, engine_of(session), prompts, session.weights, 512, SHAPE)


def test_batches_are_functions_of_the_step() -> None:
    rows = list(range(10, 17))
    epoch = [row for step in range(7) for row in rows_of_step(rows, 2, 5, step)]
    assert sorted(epoch[:7]) == sorted(epoch[7:]) == rows
    assert epoch[:7] != epoch[7:]
