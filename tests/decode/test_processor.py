"""Bias and penalties at every depth, against decoding token by token with plain lists, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decoding import tokens_of, written
from raising import refused
from tests.oracles.decoding import moved, next_logits
from tests.oracles.processing import changed, pooled_predictor, processed_greedy, stage_predictor
from topograd.decode.cache import Batch
from topograd.decode.draft_model import ModelDrafter
from topograd.decode.drafters import Draft, DraftRule, PrefixDrafter
from topograd.decode.engine import Emitted, Engine
from topograd.decode.lookup import NGramTable, TableLookup, TextLookup
from topograd.decode.processor import LogitsProcessor
from topograd.decode.sampling import Sampling, distribution
from topograd.decode.speculation import Drafter, Speculate
from topograd.decode.strategies import FixedDepth, PathEnsemble, generate_batch
from topograd.decode.wand import Wand
from topograd.errors import ConfigError, DivergenceError
from topograd.nn.gpt import GPT

CONTEXT, LAST, TOKENS = 24, 3, 30
SAMPLINGS = {
    "bias": Sampling(logit_bias={7: 2.0, 3: -4.0, 49: 1.5}),
    "presence": Sampling(presence_penalty=1.1),
    "frequency": Sampling(frequency_penalty=0.4),
    "rewarded": Sampling(frequency_penalty=-0.7, presence_penalty=0.3),
    "repetition": Sampling(repetition_penalty=1.4),
    "all": Sampling(logit_bias={1: 1.0}, presence_penalty=0.2, frequency_penalty=0.3, repetition_penalty=1.2),
}
samplings = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@samplings
def test_every_position_has_its_own_history(sampling: Sampling) -> None:
    prompt, text, ahead, z = [1, 2, 2], [3, 3, 4], [5, 3, 1], rows(0, 4, 50)
    processor = LogitsProcessor(sampling, prompt)
    processor.take(text[:1])
    processor.take(text[1:])
    found = processor.process(z, ahead)
    for i in range(4):
        expected = changed(z[i].tolist(), prompt, [*text, *ahead[:i]], sampling)
        assert torch.allclose(found[i], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)
    assert torch.equal(processor.process(z[3:], ahead)[0], found[3]), "one row is behind all that is ahead"
    assert torch.equal(processor.process(z, ahead), found), "nothing ahead was remembered"


@samplings
def test_full_and_prefix_depths(
    mild: GPT, mild_engine: Engine, prompts: list[list[int]], sampling: Sampling
) -> None:
    plain = tokens_of(FixedDepth(mild_engine), prompts, TOKENS)
    for exit_ in (0, LAST):
        predict = stage_predictor(mild, mild_engine.plan, exit_)
        expected = [processed_greedy(predict, prompt, TOKENS, CONTEXT, sampling) for prompt in prompts]
        assert tokens_of(FixedDepth(mild_engine, exit_), prompts, TOKENS, sampling) == expected
    assert expected != plain, "a sampling that changes nothing would show nothing"


class Narrow(PrefixDrafter):
    """A drafter that knows every second token only, as a draft stage knows a part of the vocabulary."""

    vocabulary: Tensor | None = torch.arange(0, 50, 2)

    def step(self, batch: Batch, drafts: Sequence[Draft]) -> Tensor:
        return super().step(batch, drafts)[:, ::2]


def drafters_of(name: str, engine: Engine, texts: list[list[int]], make_gpt: Any) -> list[Drafter]:
    made: dict[str, Callable[[], list[Drafter]]] = {
        "stage": lambda: [PrefixDrafter(engine, DraftRule(0.0, 4))],
        "narrow": lambda: [Narrow(engine, DraftRule(0.0, 4))],
        "lookup": lambda: [TextLookup()],
        "table": lambda: [TableLookup(NGramTable.of(np.array(texts), least=1), DraftRule(0.0, 4))],
        "model": lambda: [
            ModelDrafter(engine, Engine(make_gpt(later=0.1), "4", CONTEXT), rule=DraftRule(0, 3))
        ],
        "both": lambda: [TextLookup(), PrefixDrafter(engine, DraftRule(0.2, 3), 1)],
    }
    return made[name]()


@samplings
@pytest.mark.parametrize("name", ["stage", "narrow", "lookup", "table", "model", "both"])
def test_speculation_writes_what_full_depth_writes(
    mild: GPT,
    mild_engine: Engine,
    make_gpt: Callable[..., GPT],
    prompts: list[list[int]],
    sampling: Sampling,
    name: str,
) -> None:
    predict = stage_predictor(mild, mild_engine.plan, LAST)
    expected = [processed_greedy(predict, prompt, TOKENS, CONTEXT, sampling) for prompt in prompts]
    strategy = Speculate(mild_engine, drafters_of(name, mild_engine, expected, make_gpt))
    together, tally = written(strategy, prompts, TOKENS, sampling)
    assert [[e.token for e in row] for row in together] == expected
    assert tally.drafted > 0
    assert tokens_of(strategy, prompts[3:4], TOKENS, sampling) == expected[3:4]


def test_texts_with_and_without_penalties_share_a_batch(mild_engine: Engine) -> None:
    mode = Speculate(mild_engine, DraftRule(0.0, 3))
    each = [Sampling(), SAMPLINGS["all"], Sampling(temperature=0.8, seed=3), SAMPLINGS["frequency"]]
    cache = mild_engine.new_cache()
    batch = [cache.new(sampling) for sampling in each]
    with torch.inference_mode():
        cache.push(batch, [[3, 1, 4]] * 4)
        while min(len(sequence) for sequence in batch) < 20:
            mode.step([sequence for sequence in batch if len(sequence) < 20])
    for sequence, sampling in zip(batch, each, strict=True):
        assert sequence.tokens[3:20] == tokens_of(mode, [[3, 1, 4]], 17, sampling)[0]


@samplings
def test_ensembles(mild: GPT, mild_engine: Engine, sampling: Sampling) -> None:
    """Paths 1 and 1-2 are exits 0 and 1; the pool is what is changed."""
    strategy = PathEnsemble(mild_engine, {(0,): 1.0, (0, 1): 3.0})
    predict = pooled_predictor(mild, mild_engine.plan, {0: 0.25, 1: 0.75})
    expected = processed_greedy(predict, [3, 1, 4], TOKENS, CONTEXT, sampling)
    assert tokens_of(strategy, [[3, 1, 4]], TOKENS, sampling) == [expected]


@samplings
@pytest.mark.parametrize("bounds", [None, (math.inf,) * 3, (0.05,) * 3], ids=["all", "loose", "pruned"])
def test_wand_by_the_margins_of_changed_logits(
    mild: GPT, mild_engine: Engine, sampling: Sampling, bounds: Sequence[float] | None
) -> None:
    thresholds = (0.5, 0.4, 0.3)
    window, text, expected = [3, 1, 4], list[int](), list[Emitted]()
    for _ in range(TOKENS):
        for exit_, tau in enumerate([*thresholds, -math.inf]):
            logits = next_logits(mild, mild_engine.plan, window, exit_).tolist()
            z = changed(logits, [3, 1, 4], text, sampling)
            first, second = sorted(z, reverse=True)[:2]
            if first - second > tau:
                break
        text.append(z.index(first))
        expected.append(Emitted(text[-1], exit_))
        window = moved(window, text[-1], CONTEXT)
    assert generate_batch(Wand(mild_engine, thresholds, bounds), [[3, 1, 4]], TOKENS, sampling)[0] == expected
    assert len({emitted.exit for emitted in expected}) > 1


ROWS, FARTHEST = 1500, 0.1
"""As in test_speculation.py: total variation of 25 pairs that 1500 rows exceed with probability 1e-3."""


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 1.5, "logit_bias": {0: 1.0, 3: -1.0}},
        {"repetition_penalty": 1.7, "frequency_penalty": -1.0, "min_p": 0.2},
    ],
    ids=["presence and bias", "repetition and min_p"],
)
@pytest.mark.parametrize("drafter", ["stage", "lookup"])
def test_sampled_text_has_the_distribution_of_token_by_token(
    make_gpt: Callable[..., GPT], make_engine: Callable[..., Engine], settings: dict[str, Any], drafter: str
) -> None:
    model, prompt = make_gpt(layers=2, width=8, heads=1, vocab=5, context=6), [2, 0, 2]
    engine, sampling = make_engine(model, "1,1", context=6), Sampling(temperature=1.0, seed=1, **settings)
    predict = stage_predictor(model, engine.plan, 1)

    def exact(text: list[int], given: Sampling) -> Tensor:
        z = changed(predict([*prompt, *text]).tolist(), prompt, text, given)
        return distribution(torch.tensor(z, dtype=torch.float64), given)

    def pairs(given: Sampling) -> Tensor:
        return exact([], given)[:, None] * torch.stack([exact([token], given) for token in range(5)])

    drafters: Drafter = PrefixDrafter(engine, DraftRule(0.0, 3)) if drafter == "stage" else TextLookup()
    texts, tally = written(Speculate(engine, drafters), [prompt] * ROWS, 2, sampling)
    found = torch.zeros(5, 5, dtype=torch.float64)
    for a, b in texts:
        found[a.token, b.token] += 1 / ROWS
    assert (found - pairs(sampling)).abs().sum() / 2 < FARTHEST
    assert (pairs(Sampling(temperature=1.0)) - pairs(sampling)).abs().sum() / 2 > 2 * FARTHEST
    assert 0 < tally.accepted < tally.drafted


def test_a_bias_of_a_token_that_the_model_does_not_have_is_refused(mild_engine: Engine) -> None:
    with refused(ConfigError, setting="logit_bias"):
        tokens_of(FixedDepth(mild_engine), [[1]], 2, Sampling(logit_bias={50: 1.0}))


def test_logits_that_are_not_finite_are_refused_before_they_are_changed(
    mild: GPT, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(mild)
    readout = engine.stack.readout
    monkeypatch.setattr(
        engine.runtime, "readout", lambda *given: readout(*given).index_fill(-1, torch.tensor([5]), -math.inf)
    )
    with refused(DivergenceError, setting="logits"):
        tokens_of(FixedDepth(engine), [[1]], 2, SAMPLINGS["bias"])
