"""Heads of drafters over some tokens: the same logits, and speculation stays exact with every drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from decoding import tokens_of, written
from topograd.decode.draft_head import DraftHead, pruned_size
from topograd.decode.draft_model import ModelDrafter
from topograd.decode.draft_stage import DraftStageDrafter
from topograd.decode.drafters import AutoregressiveDrafter, DraftRule, PrefixDrafter, certainty, largest
from topograd.decode.engine import Engine
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import FixedDepth
from topograd.nn.draft_stage import DraftStage
from topograd.nn.gpt import GPT
from topograd.nn.translator import Translator
from topograd.runtime.native import library
from topograd.runtime.native.runtime import NativeRuntime
from topograd.topology.dag import Topology

SOME = torch.tensor([1, 4, 5, 9, 17, 30, 31, 44, 49])
native = pytest.mark.skipif(library.missing_reason() is not None, reason="the kernels were not built")


def translators() -> dict[int, Translator]:
    torch.manual_seed(2)
    made = Translator(32).double()
    nn.init.normal_(made.affine.weight, std=0.3)
    return {1: made}


@pytest.mark.parametrize("prediction", ["last", "mean"])
@torch.inference_mode()
def test_the_logits_of_some_tokens(gpt: GPT, prediction: str) -> None:
    """Of every exit, with heads of their own, translated or not, alone or pooled."""
    topology = replace(Topology.chain("1,1,1,1"), prediction=prediction)
    engine = Engine(gpt, topology, 24, translators=translators)
    batch = engine.start([[1, 2, 3], [4, 5]])
    for stage in engine.exits:
        engine.run(batch, stage)
        for counts in (None, [2, 1]):
            known = engine.logits(batch, stage, counts)[:, SOME]
            torch.testing.assert_close(DraftHead(engine, stage, SOME).logits(batch, counts), known)
        torch.testing.assert_close(DraftHead(engine, stage, None).logits(batch), engine.logits(batch, stage))


def test_a_stack_that_lends_no_head(make_gpt: Callable[..., GPT]) -> None:
    engine = Engine(make_gpt(architecture="mamba2"), "2,2", 24)
    batch = engine.start([[1, 2, 3]])
    with torch.inference_mode():
        engine.run(batch, 1)
        known = engine.logits(batch, 1)[:, SOME]
        torch.testing.assert_close(DraftHead(engine, 1, SOME).logits(batch), known)


def drafters_of(engine: Engine, model: GPT) -> list[AutoregressiveDrafter]:
    """Each with a pruned head; a block and a chain of several depths."""
    made: list[AutoregressiveDrafter] = [
        PrefixDrafter(engine, DraftRule(0.0, 3), 0, SOME),
        ModelDrafter(engine, engine, rule=DraftRule(0.0, 3), vocabulary=SOME),
    ]
    for depths, slots in (((0, 2, 3), 1), (None, 4)):
        torch.manual_seed(1)
        stage = DraftStage(model, SOME, depths, slots)
        for parameter in stage.parameters():
            nn.init.normal_(parameter, std=0.3)
        made.append(DraftStageDrafter(engine, stage, DraftRule(0.0, 3)))
    return made


def test_greedy_text_is_full_depths(mild: GPT, mild_engine: Engine, prompts: list[list[int]]) -> None:
    expected = tokens_of(FixedDepth(mild_engine), prompts, 30)
    for drafter in drafters_of(mild_engine, mild):
        rows, tally = written(Speculate(mild_engine, drafter), prompts, 30)
        assert [[e.token for e in row] for row in rows] == expected, drafter.name
        assert tally.drafted > 20
        assert {e.token for row in rows for e in row if e.drafter} <= set(SOME.tolist())


@native
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_same_by_kernels(precision: str, make_gpt: Callable[..., GPT], prompts: list[list[int]]) -> None:
    """Text is full depth's, bit for bit; in float32 the stage guesses what it guesses in torch."""
    model = make_gpt(later=0.15).float()
    engine = Engine(model, "1,1,1,1", 24, NativeRuntime(model, precision))  # type: ignore[arg-type]
    expected = tokens_of(FixedDepth(engine), prompts, 30)
    plain = [*drafters_of(Engine(model, "1,1,1,1", 24), model)]
    for drafter, other in zip(drafters_of(engine, model), plain, strict=True):
        rows, tally = written(Speculate(engine, drafter), prompts, 30)
        assert [[e.token for e in row] for row in rows] == expected, drafter.name
        if precision == "float32":
            assert tally.by == written(Speculate(other_engine(other, model), other), prompts, 30)[1].by


def other_engine(drafter: AutoregressiveDrafter, model: GPT) -> Engine:
    return drafter.engine if isinstance(drafter, PrefixDrafter) else Engine(model, "1,1,1,1", 24)


def test_scores_on_a_cpu(mild_engine: Engine) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 40).double()
    torch.testing.assert_close(certainty(logits), logits.softmax(-1).amax(-1))
    assert largest(logits).equal(logits.argmax(-1))
    drafter = PrefixDrafter(mild_engine)
    for row in (*logits.split(1), torch.tensor([[1.0, 3.0, 3.0]]), torch.tensor([[5.0, 1.0]])):
        best = row.topk(2).values[0]
        assert drafter.scores(row).tolist() == [float(best[0] - best[1])]


def test_how_many_tokens_there_are_by_default() -> None:
    assert [pruned_size(vocab) for vocab in (3, 257, 2048, 49152)] == [2, 64, 512, 8192]
