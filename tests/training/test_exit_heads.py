"""Heads that begin by least squares: the map by another solver, exits that become the model's, a run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import topograd as tg
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import open_session
from topograd.training import exit_heads
from topograd.training.activation_cache import StateBatch
from topograd.training.exit_heads import begin_exit_heads, leading_map
from topograd.training.runs import resume, start


def rows(seed: int = 0, count: int = 200, width: int = 6) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_all_of_the_map_is_least_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_heads, "RIDGE", 0.0)
    x, y = rows(0), rows(1)
    basis, reading = leading_map(x, y, 6)
    torch.testing.assert_close((basis @ reading).T, torch.linalg.lstsq(x, y - x).solution)


@pytest.mark.parametrize("rank", [1, 3])
def test_the_leading_part_is_the_best_of_its_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eckart and Young: of the guesses D x, no map of this rank says more."""
    monkeypatch.setattr(exit_heads, "RIDGE", 0.0)
    x, y = rows(0) * torch.arange(1.0, 7.0), rows(1)
    basis, reading = leading_map(x, y, rank)
    guess = x @ torch.linalg.lstsq(x, y - x).solution
    least = torch.linalg.svdvals(guess)[rank:].square().sum()
    torch.testing.assert_close((guess - x @ (basis @ reading).T).square().sum(), least)


def staged(rank: int) -> tuple[tg.GPT, tg.Plan]:
    torch.manual_seed(0)
    stack = tg.GPT(layers=2, width=8, heads=2, vocab=32, context=16)
    torch.nn.init.normal_(stack.head.weight)
    plan = tg.Plan.of("1,1", 2)
    stack.add_heads([0], rank)
    return stack.double(), plan


def test_an_exit_that_is_a_linear_map_away_reads_what_the_last_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States are made up, so that x_K = M x_k exactly; at full rank the exit's logits are the model's."""
    monkeypatch.setattr(exit_heads, "RIDGE", 1e-12)
    stack, plan = staged(8)
    turn = torch.linalg.qr(rows(3, 8, 8)).Q
    h = torch.randn(4, 16, 8, dtype=torch.float64)
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    begin_exit_heads(stack, plan, lambda: StateBatch(tokens, tokens, {1: h, 2: h @ turn.T}))
    torch.testing.assert_close(stack.readout(h, 0), stack.readout(h @ turn.T, 1), rtol=1e-8, atol=1e-8)
    up, down = stack.head.low_rank(0) or pytest.fail("it has a head of low rank")
    torch.testing.assert_close(up.square().mean(), down.square().mean())


def test_kept_states_and_computed_ones_give_one_head() -> None:
    (one, plan), (other, _) = staged(3), staged(3)
    tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(0))
    outputs = tg.stage_outputs(one, plan, tokens, [0, 1])
    begin_exit_heads(
        one, plan, lambda: StateBatch(tokens, tokens, {1: outputs[0].detach(), 2: outputs[1].detach()})
    )
    begin_exit_heads(other, plan, lambda: StateBatch(tokens, tokens, {}))
    torch.testing.assert_close(one.state_dict(), other.state_dict())


def test_a_head_that_has_learned_stays_as_it_is() -> None:
    stack, plan = staged(3)
    up, _ = stack.head.low_rank(0) or pytest.fail("it has a head of low rank")
    up.data[5, 1] = 1.0
    before = {name: tensor.clone() for name, tensor in stack.state_dict().items()}
    begin_exit_heads(stack, plan, lambda: pytest.fail("nothing was to be read"))
    torch.testing.assert_close(stack.state_dict(), before, rtol=0, atol=0)


def test_rows_without_targets_change_nothing() -> None:
    stack, plan = staged(3)
    before = {name: tensor.clone() for name, tensor in stack.state_dict().items()}
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    begin_exit_heads(stack, plan, lambda: StateBatch(tokens, torch.full((2, 4), -100), {}))
    torch.testing.assert_close(stack.state_dict(), before, rtol=0, atol=0)


def test_a_frozen_run_begins_better_and_keeps_full_depth(
    config: TrainConfig, straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against heads of zero; a run that was ended before its first checkpoint begins alike."""
    tune = replace(config.tune, frozen=True, exit_rank=8)
    tuned = replace(config, init=str(straight.folder), steps=2, tune=tune)
    tuned = tuned.changed(objective="distillation", teacher="self", teacher_mix=1.0)

    def losses(folder: str) -> list[float]:
        metrics = Run.open(tmp_path / folder).metrics()
        return [row["loss"][0] for row in metrics if row["kind"] == "train"]

    start(tuned, tmp_path / "begun").train()
    start(tuned, tmp_path / "ended")
    resume(tmp_path / "ended").train()
    assert losses("ended") == losses("begun")
    monkeypatch.setattr("topograd.training.runs.begin_exit_heads", lambda *_: None)
    start(tuned, tmp_path / "zero").train()
    assert losses("begun")[0] < losses("zero")[0]
    tokens = torch.arange(12)[None]
    base, frozen = (open_session(folder) for folder in (straight.folder, tmp_path / "begun"))
    with torch.no_grad():
        was, now = (tg.Predictor(s.stack, s.plan)(tokens) for s in (base, frozen))
    assert torch.equal(was, now), "full depth is the base's, bit for bit"
