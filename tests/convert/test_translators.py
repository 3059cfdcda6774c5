"""Exits on a frozen trunk: they start near the last stage's states and are fitted to what it says."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from topograd.convert.own_text import OwnText
from topograd.convert.translators import TranslatorTask, fit_exits, regress
from topograd.nn.translator import Translator
from topograd.runs.session import LoadedTextRun
from topograd.training.trainer import Trainer, train_task


def test_every_exit_before_the_last_is_fitted(session: LoadedTextRun, text: OwnText) -> None:
    session.stack.requires_grad_(False)
    told: list[tuple[int, int]] = []
    fitted, rows = fit_exits(session, text, lambda *done: told.append(done), steps=3)
    assert [row["stage"] for row in rows] == [1, 2]
    assert set(fitted) == {0, 1}
    assert told == [(1, 2), (2, 2)]
    assert all(0 <= row[key] <= 1 for row in rows for key in ("agreement", "lens"))
    assert [row["parameters"] for row in rows] == [16 * 17] * 2


def test_the_start_is_the_least_squares_map(session: LoadedTextRun, text: OwnText) -> None:
    rows = list(range(len(text)))
    translator = Translator(16)
    regress(translator, text, rows, 0)
    states = text.take(rows).states[:, 1:].flatten(0, 1).double()
    u = F.pad(states[:, 0], (0, 1), value=1.0)
    ridge = (1e-3 * len(u)) ** 0.5 * torch.eye(17, dtype=torch.float64)
    wanted = torch.cat([states[:, -1] - states[:, 0], torch.zeros(17, 16)])
    solved = torch.linalg.lstsq(torch.cat([u, ridge]), wanted).solution
    assert torch.allclose(translator.affine.weight.double(), solved[:-1].T, atol=1e-4)
    assert torch.allclose(translator.affine.bias.double(), solved[-1], atol=1e-4)


def test_fitting_comes_nearer_to_the_last_stage(session: LoadedTextRun, text: OwnText) -> None:
    session.stack.requires_grad_(False)
    stack, states = session.stack, text.take(list(range(16))).states[:, 1:].flatten(0, 1)
    vocab = torch.arange(257)
    wanted = stack.readout(states[:, -1], stack.last_stage, vocab).softmax(-1)

    def loss(translator: Translator) -> float:
        with torch.no_grad():
            said = stack.readout(translator(states[:, 0]), 0, vocab)
        return float(F.cross_entropy(said, wanted))

    torch.manual_seed(0)
    fitted = Translator(16)
    before = loss(fitted)
    train_task(TranslatorTask(stack, fitted, text, range(16), 0, 0, vocab, 80), None)
    assert loss(fitted) < before - 0.05


def test_exits_that_were_stopped_go_on_bit_for_bit(
    session: LoadedTextRun, text: OwnText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended by a signal within the first exit, killed within the second."""
    session.stack.requires_grad_(False)
    straight, rows = fit_exits(session, text, steps=6)
    one_step, calls = Trainer._one_step, list[int]()

    def interrupted(trainer: Trainer[TranslatorTask]) -> list[float]:
        calls.append(trainer.step)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        if len(calls) == 9:
            raise RuntimeError("killed")
        return one_step(trainer)

    monkeypatch.setattr(Trainer, "_one_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit_exits(session, text, steps=6, work=tmp_path)
    with pytest.raises(RuntimeError, match="killed"):
        fit_exits(session, text, steps=6, work=tmp_path)
    resumed, again = fit_exits(session, text, steps=6, work=tmp_path)
    assert calls == [0, 1, 2, 3, 4, 5, 0, 1, 2, *range(6)]
    assert again == rows
    for head, translator in straight.items():
        for a, b in zip(translator.parameters(), resumed[head].parameters(), strict=True):
            assert torch.equal(a, b)
