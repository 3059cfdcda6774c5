"""A draft stage beside a cache: what it drafts is what it says when it is unrolled on the model's states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from topograd.decode.autotune import DraftRule
from topograd.decode.draft_stage import DraftStageDrafter
from topograd.decode.engine import Engine, Prefix
from topograd.decode.speculation import Speculate
from topograd.errors import ConfigError
from topograd.exec.forward import stage_outputs
from topograd.nn.draft_stage import DraftStage
from topograd.nn.gpt import GPT


def stage_of(model: GPT) -> DraftStage:
    torch.manual_seed(1)
    stage = DraftStage(model, torch.arange(3, 45))
    for parameter in stage.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stage


@torch.inference_mode()
def test_drafts_are_those_of_the_unrolled_stage(mild: GPT, mild_engine: Engine) -> None:
    """In ragged rows, round after round, behind rounds in which some rows did not draft."""
    stage = stage_of(mild)
    drafter = DraftStageDrafter(mild_engine, stage, DraftRule(0.0, 3))
    mode = Speculate(mild_engine, drafter)
    cache = mild_engine.start([[1, 2, 3, 4], [9, 8], [5, 6, 7]])
    mode.begin(3)
    for turn in range(4):
        active = [True, turn != 1, turn != 2]
        texts = [list(text) for text in cache.tokens]
        drafts = drafter.draft(cache, active, mode.sampling, mode.generators)
        for text, draft, on in zip(texts, drafts, active, strict=True):
            if not on or turn == 0:
                assert draft.tokens == []
                continue
            chain = list(text)
            for step, token in enumerate(draft.tokens):
                inputs = torch.tensor([chain])
                states = stage_outputs(mild, mild_engine.plan, inputs, [3])[3]
                said = [stage.readout(g) for g in stage.unroll(inputs, states, step + 1)][-1][0, -1]
                assert token == int(stage.vocabulary[said.argmax()])
                chain.append(token)
        cache.truncate([len(text) for text in texts])
        Prefix(mild_engine).engine.run(cache, 3)
        mild_engine.append(cache, [[turn + 1] if on else [] for on in active])


def test_it_needs_a_memory(forgetful: Engine, make_gpt: Callable[..., GPT]) -> None:
    with pytest.raises(ConfigError, match="needs a model that keeps its states"):
        DraftStageDrafter(forgetful, stage_of(make_gpt(heads_of_their_own=4)))
