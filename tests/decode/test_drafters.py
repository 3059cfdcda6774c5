"""Drafts from anywhere change nothing but the work: lookups, prefixes, and one after the other."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from decoding import written
from raising import refused
from tests.oracles.decoding import next_logits
from topograd.decode.draft_model import ModelDrafter
from topograd.decode.draft_stage import DraftStageDrafter
from topograd.decode.drafters import CompositeDrafter, DraftRule, FirstMatchPolicy, PrefixDrafter
from topograd.decode.engine import Engine
from topograd.decode.lookup import NGramTable, TableLookup, TextLookup
from topograd.decode.sampling import Sampling, probabilities
from topograd.decode.speculation import Drafter, Speculate
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.errors import ConfigError
from topograd.nn.draft_stage import DraftStage
from topograd.nn.gpt import GPT

Make = Callable[[Engine, GPT], list[Drafter]]


def draft_stage(model: GPT, seed: int = 0, tokens: int = 40) -> DraftStage:
    """A draft stage with random weights: now and then it is right."""
    torch.manual_seed(seed)
    stage = DraftStage(model, torch.arange(tokens))
    for parameter in stage.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stage


def small(model: GPT) -> Engine:
    """The first half of the model as a model of its own: it often agrees."""
    half = copy.deepcopy(model)
    half.layers = half.layers[:2]
    half.config = replace(half.config, layers=2)
    return Engine(half, "2", 24)


def table(model: GPT) -> NGramTable:
    """Of what the model writes behind every token."""
    engine = Engine(model, "4", 24)
    rows = [
        [t, *(e.token for e in row)]
        for t, row in enumerate(generate_batch(FixedDepth(engine), [[t] for t in range(50)], 20))
    ]
    return NGramTable.of(np.array(rows), least=1)


def both(*drafters: Make) -> Make:
    return lambda e, m: [drafter for make in drafters for drafter in make(e, m)]


def look(e: Engine, m: GPT) -> list[Drafter]:
    return [TextLookup()]


def stage(e: Engine, m: GPT) -> list[Drafter]:
    return [DraftStageDrafter(e, draft_stage(m), DraftRule(0.0, 3))]


def other(e: Engine, m: GPT) -> list[Drafter]:
    return [ModelDrafter(e, small(m), rule=DraftRule(0.1, 4))]


def counted(e: Engine, m: GPT) -> list[Drafter]:
    return [TableLookup(table(m), DraftRule(0.1, 5))]


def prefix(e: Engine, m: GPT) -> list[Drafter]:
    return [PrefixDrafter(e, DraftRule(0.2, 3))]


DRAFTERS: dict[str, Make] = {
    "lookup": look,
    "one token behind one": lambda e, m: [TextLookup(tokens=1, longest=1)],
    "table": counted,
    "draft stage": stage,
    "model": other,
    "lookup then prefix": both(look, prefix),
    "prefix then lookup": both(prefix, look),
    "lookup, table, draft stage": both(look, counted, stage),
    "model then lookup": both(other, look),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_that_of_full_depth(
    mild: GPT, mild_engine: Engine, prompts: list[list[int]], name: str
) -> None:
    """In ragged rows that pass the context, and in one row."""
    repeating = [prompt + [3, 4, 5] * 3 for prompt in prompts]  # something to look up
    mode = Speculate(mild_engine, DRAFTERS[name](mild_engine, mild))
    full = [[e.token for e in row] for row in generate_batch(FixedDepth(mild_engine), repeating, 30)]
    found, tally = written(mode, repeating, 30)
    assert [[e.token for e in row] for row in found] == full
    assert tally.drafted > tally.accepted > 0
    assert sum(count.drafted for count in tally.by.values()) == tally.drafted
    assert sum(bool(e.drafter) for row in found for e in row) <= tally.accepted
    one = generate_batch(mode, repeating[1:2], 30)[0]
    assert [e.token for e in one] == full[1]


@pytest.mark.parametrize("name", ["table", "draft stage", "model", "lookup, table, draft stage"])
def test_sampled_text_has_the_models_distribution(make_gpt: Callable[..., GPT], name: str) -> None:
    model = make_gpt(vocab=5, context=8, layers=4, later=0.3)
    engine = Engine(model, "4", 8)
    sampling = Sampling(temperature=1.0, seed=3)
    prompt, rows = [1, 2], 600
    makers: dict[str, Make] = {
        "table": lambda e, m: [
            TableLookup(NGramTable.of(np.array([[1, 2, 3, 1, 2, 3, 4, 0, 1, 2, 4]]), least=1))
        ],
        "draft stage": lambda e, m: [DraftStageDrafter(e, draft_stage(m, 1, 3), DraftRule(0.0, 2))],
        "model": lambda e, m: [ModelDrafter(e, Engine(_half(m), "2", 8), rule=DraftRule(0.0, 2))],
    }
    makers["lookup, table, draft stage"] = both(look, makers["table"], makers["draft stage"])
    texts, tally = written(Speculate(engine, makers[name](engine, model)), [prompt] * rows, 2, sampling)
    second = Counter((row[0].token, row[1].token) for row in texts)
    p = probabilities(next_logits(model, engine.plan, prompt, 0), sampling)
    exact = torch.stack(
        [p[t] * probabilities(next_logits(model, engine.plan, [*prompt, t], 0), sampling) for t in range(5)]
    )
    found = torch.tensor([[second[a, b] / rows for b in range(5)] for a in range(5)], dtype=torch.float64)
    assert (found - exact).abs().sum() / 2 < 0.1
    assert 0 < tally.accepted < tally.drafted


def _half(model: GPT) -> GPT:
    half = copy.deepcopy(model)
    half.layers, half.config = half.layers[:2], replace(half.config, layers=2)
    return half


def test_a_model_without_exits_can_look_up(mild: GPT, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(mild, "4")
    prompt = [[7, 8, 9, 7, 8, 9, 7, 8]]
    mode = Speculate(engine, TextLookup())
    found, full = (generate_batch(m, prompt, 20)[0] for m in (mode, FixedDepth(engine)))
    assert [e.token for e in found] == [e.token for e in full]
    assert {e.drafter for e in found} <= {"", "lookup"}
    with refused(ConfigError, setting="partition"):
        PrefixDrafter(engine, DraftRule(0.0, 2))


def test_sampled_lookups_have_the_models_distribution(make_gpt: Callable[..., GPT]) -> None:
    torch.manual_seed(0)
    model = make_gpt(vocab=5, context=8, layers=2)
    engine = Engine(model, "2", 8)
    sampling = Sampling(temperature=1.0, seed=3)
    prompt, rows = [1, 2, 3, 1, 2], 1500
    texts, tally = written(Speculate(engine, TextLookup(tokens=2)), [prompt] * rows, 1, sampling)
    first = Counter(row[0].token for row in texts)
    exact = probabilities(next_logits(model, engine.plan, prompt, 0), sampling)
    found = torch.tensor([first[token] / rows for token in range(5)], dtype=torch.float64)
    assert (found - exact).abs().sum() / 2 < 0.05
    assert 0 < tally.accepted < tally.drafted


def test_what_cannot_be_is_refused(mild: GPT, mild_engine: Engine, make_gpt: Callable[..., GPT]) -> None:
    with refused(ConfigError, setting="tokens", given=0):
        TextLookup(tokens=0)
    with refused(ConfigError, setting="drafters"):
        CompositeDrafter(mild_engine, [])
    with refused(ConfigError, setting="drafters"):
        CompositeDrafter(mild_engine, both(prefix, other)(mild_engine, mild))
    wide = Engine(make_gpt(vocab=60, layers=1), "1", 24)
    with refused(ConfigError, setting="small", given="model"):
        ModelDrafter(mild_engine, wide)


class Never(FirstMatchPolicy):
    """Drafts as the first match does, and says that no batch pays."""

    def pays(self, chances: Sequence[Sequence[float]]) -> bool:
        return False


def test_only_drafts_that_were_looked_up_are_dropped_where_they_do_not_pay(
    mild: GPT, mild_engine: Engine
) -> None:
    """Those that were computed may have been drawn, and what follows from a draw must not decide about it."""
    rules = {"lookup": DraftRule(0.0, 3), "model": DraftRule(0.0, 3)}
    for make, dropped in ((look, True), (other, False)):
        batch = mild_engine.start([[3, 4, 5, 3, 4], [7, 8, 7]], Sampling(temperature=1.0))
        with torch.inference_mode():
            drafts = CompositeDrafter(mild_engine, make(mild_engine, mild), Never(rules)).draft(batch)
        assert any(draft.tokens for draft in drafts) != dropped
        assert [len(sequence) for sequence in batch] == [5 + len(drafts[0].tokens), 3 + len(drafts[1].tokens)]
