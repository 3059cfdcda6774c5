"""Drafts from anywhere change nothing but the work: lookups, prefixes, and one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topograd.depth.autotune import DraftRule
from topograd.depth.drafters import Drafter, FirstOf, LookupDrafter, PrefixDrafter, followers
from topograd.depth.engine import Engine, Prefix, generate_batch
from topograd.depth.sampling import Sampling, probabilities
from topograd.depth.speculation import Speculate
from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.reference.decoding import next_logits

Make = Callable[[Engine], Drafter]
DRAFTERS: dict[str, Make] = {
    "lookup": LookupDrafter,
    "one token behind one": lambda engine: LookupDrafter(engine, tokens=1, longest=1),
    "lookup then prefix": lambda e: FirstOf([LookupDrafter(e), PrefixDrafter(e, DraftRule(0.2, 3))]),
    "prefix then lookup": lambda e: FirstOf([PrefixDrafter(e, DraftRule(1.0, 3), 1), LookupDrafter(e)]),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_that_of_full_depth(mild_engine: Engine, prompts: list[list[int]], name: str) -> None:
    repeating = [prompt + [3, 4, 5] * 3 for prompt in prompts]  # something to look up
    mode = Speculate(mild_engine, DRAFTERS[name](mild_engine))
    found, full = (
        [[emitted.token for emitted in row] for row in generate_batch(each, repeating, 30)]
        for each in (mode, Prefix(mild_engine))
    )
    assert found == full
    assert mode.tally.drafted > mode.tally.accepted > 0


def test_a_model_without_exits_can_look_up(mild: GPT, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(mild, "4")
    prompt = [[7, 8, 9, 7, 8, 9, 7, 8]]
    mode = Speculate(engine, LookupDrafter(engine))
    found, full = (generate_batch(m, prompt, 20)[0] for m in (mode, Prefix(engine)))
    assert [e.token for e in found] == [e.token for e in full]
    assert {e.drafter for e in found} <= {"", "lookup"}
    with pytest.raises(ConfigError, match="1 predicting stages"):
        PrefixDrafter(engine, DraftRule(0.0, 2))


def test_sampled_lookups_have_the_models_distribution(make_gpt: Callable[..., GPT]) -> None:
    torch.manual_seed(0)
    model = make_gpt(vocab=5, context=8, layers=2)
    engine = Engine(model, "2", 8)
    sampling = Sampling(temperature=1.0, seed=3)
    prompt, rows = [1, 2, 3, 1, 2], 1500
    mode = Speculate(engine, LookupDrafter(engine, tokens=2), sampling=sampling)
    first = Counter(row[0].token for row in generate_batch(mode, [prompt] * rows, 1))
    exact = probabilities(next_logits(model, engine.plan, prompt, 0), sampling)
    found = torch.tensor([first[token] / rows for token in range(5)], dtype=torch.float64)
    assert (found - exact).abs().sum() / 2 < 0.05
    assert 0 < mode.tally.accepted < mode.tally.drafted


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4), st.integers(0, 5))
def test_followers_are_the_newest_of_the_longest_match(text: list[int], longest: int, count: int) -> None:
    found = followers(text, longest, count)
    best: list[int] = []
    for n in range(1, longest + 1):
        places = [i for i in range(len(text) - n) if text[i : i + n] == text[len(text) - n :]]
        if n < len(text) and places:
            best = text[places[-1] + n : places[-1] + n + count]
    assert found == best


def test_what_cannot_be_is_refused(mild_engine: Engine) -> None:
    with pytest.raises(ConfigError, match="both are at least 1"):
        LookupDrafter(mild_engine, tokens=0)
    with pytest.raises(ConfigError, match="no drafter"):
        FirstOf([])
