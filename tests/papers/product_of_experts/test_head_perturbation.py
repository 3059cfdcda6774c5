"""Noise in a head raises the loss, the more the larger; and the head is left as it was."""

from __future__ import annotations

import torch

from papers.outcome import asked
from papers.product_of_experts.head_perturbation import ARMS, SIGMAS, probe, ratios, run
from papers.staged_runs import PRESETS, held_out, same_batches, train_arm
from topograd.runs.session import load_data


def test_noise_hurts_and_is_taken_back() -> None:
    config, data = load_data(PRESETS["tiny"].config(0, 30))
    stack, plan, _ = train_arm(ARMS[0], config, same_batches(config, data))
    before = stack.head.weight.detach().clone()
    found = probe(stack, plan, held_out(config, data))
    assert torch.equal(before, stack.head.weight)
    rises = [found[f"rise {sigma:g}"] for sigma in SIGMAS]
    assert rises[-1] > rises[2] > 0
    assert probe(stack, plan, held_out(config, data)) == found, "the same draws each time"


def test_the_study_compares_both_arms() -> None:
    found = run(PRESETS["tiny"], asked("head-perturbation", "tiny"))
    assert len(found.rows) == 4
    assert len(found.cells) == len(SIGMAS)
    assert len(found.claims) == 2
    assert all(ratio > 0 for ratio in ratios(found.rows, 1.0))
