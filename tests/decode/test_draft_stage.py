"""A draft stage beside a cache: what it drafts is what it says when it is unrolled on the model's states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from raising import refused
from topograd.decode.draft_stage import DraftStageDrafter
from topograd.decode.drafters import CompositeDrafter, DraftRule
from topograd.decode.engine import Engine
from topograd.errors import ConfigError
from topograd.exec.forward import stage_outputs
from topograd.nn.draft_stage import DraftStage
from topograd.nn.gpt import GPT


def stage_of(model: GPT, depths: tuple[int, ...] | None = None, slots: int = 1) -> DraftStage:
    torch.manual_seed(1)
    stage = DraftStage(model, torch.arange(3, 45), depths, slots)
    for parameter in stage.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stage


@pytest.mark.parametrize("kind", [(None, 1), ((0, 2, 3), 1), (None, 3), ((0, 3), 4)])
@torch.inference_mode()
def test_drafts_are_those_of_the_unrolled_stage(
    mild: GPT, mild_engine: Engine, kind: tuple[tuple[int, ...] | None, int]
) -> None:
    """In ragged rows, round after round, behind rounds in which some rows did not draft."""
    stage = stage_of(mild, *kind)
    read = kind[0] or (3,)
    drafter = DraftStageDrafter(mild_engine, stage, DraftRule(0.0, 3))
    composite = CompositeDrafter(mild_engine, [drafter])
    batch = mild_engine.start([[1, 2, 3, 4], [9, 8], [5, 6, 7]])
    cache, drafted = batch[0].cache, 0
    for turn in range(4):
        active = [s for i, s in enumerate(batch) if (turn, i) not in ((1, 1), (2, 2))]
        texts = [list(s.tokens) for s in active]
        drafts = composite.draft(active)
        for text, draft in zip(texts, drafts, strict=True):
            assert turn or not draft.tokens, "at first the model has no state"
            drafted += len(draft.tokens)
            chain = list(text)
            for step, token in enumerate(draft.tokens):
                inputs = torch.tensor([chain])
                outputs = stage_outputs(mild, mild_engine.plan, inputs, read)
                states = torch.stack([outputs[k] for k in read], dim=2)
                said = [stage.readout(g) for g in stage.unroll(inputs, states, step + 1)][-1][0, -1]
                assert token == int(stage.vocabulary[said.argmax()])
                chain.append(token)
        cache.truncate(active, [len(text) for text in texts])
        mild_engine.run(batch, 3)
        mild_engine.append(active, [[turn + 1]] * len(active))
    assert drafted > 12


def test_it_needs_a_memory(forgetful: Engine, make_gpt: Callable[..., GPT]) -> None:
    with refused(ConfigError, setting="engine"):
        DraftStageDrafter(forgetful, stage_of(make_gpt(heads_of_their_own=4)))
