"""One pass with a shared beginning gives what predicting every token by itself gives, at every depth; and no
score depends on what else is scored."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from pieces import pooled
from raising import refused
from tests.oracles.scoring import token_logprobs
from topograd.decode.engine import Engine
from topograd.decode.strategies import PathEnsemble
from topograd.errors import ConfigError
from topograd.evaluation.scoring import Scorer, TokenRow, common
from topograd.nn.gpt import GPT
from topograd.nn.stack import Stack
from topograd.topology.branches import parse_branches
from topograd.topology.dag import Topology

MakeEngine = Callable[..., Engine]
VOCAB = 40


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def bundles_of(seed: int = 3) -> list[list[TokenRow]]:
    """Questions of one to four choices, some of which begin alike further than the question goes."""
    chance = random.Random(seed)

    def some(n: int) -> list[int]:
        return [chance.randrange(VOCAB) for _ in range(n)]

    found = []
    for choices, length in ((1, 5), (2, 9), (4, 12), (3, 1), (2, 9), (2, 20)):
        question = some(length)
        found.append([TokenRow([*question, *some(chance.randint(1, 5))], length) for _ in range(choices)])
    schema = some(4)
    found.append([TokenRow([*some(n), *schema], n) for n in (3, 5)])
    return found


@pytest.mark.covers("gpt", "decode", feature="scores")
@pytest.mark.covers("mamba", "decode", feature="scores")
@pytest.mark.parametrize(
    ("topology", "architecture"),
    [
        ("1,1,1", "transformer"),
        ("1,2", "mamba2"),
        (replace(Topology.chain("1,1,1"), prediction="sum"), "transformer"),
        (Topology.forest(["1", "2"]), "transformer"),
    ],
    ids=["chain", "mamba2", "sum", "forest"],
)
def test_every_exit_scores_what_predicting_each_token_by_itself_gives(
    make_engine: MakeEngine, topology: Topology | str, architecture: str
) -> None:
    engine = make_engine(topology, architecture=architecture, ssm_state=4)
    bundles = bundles_of()
    scorer = Scorer(engine)
    assert scorer.depths == len(engine.exits)
    for bundle, scores in zip(bundles, scorer.score(bundles), strict=True):
        for row, score in zip(bundle, scores, strict=True):
            for k, stage in enumerate(engine.exits):
                terms = engine.plan.prediction.after(stage)
                slow = token_logprobs(engine.stack, engine.plan, row.tokens, row.start, terms)
                assert score.logprob[k].tolist() == pytest.approx([p for p, _ in slow], rel=1e-9)
                assert score.rank[k].tolist() == [rank for _, rank in slow]
                assert score.greedy[k].tolist() == [rank == 1 for _, rank in slow]
                assert score.total[k] == pytest.approx(sum(p for p, _ in slow), rel=1e-9)
                assert score.mean_loss[k] == pytest.approx(-sum(p for p, _ in slow) / len(slow), rel=1e-9)


def test_a_model_that_keeps_no_states_scores_the_same(make_engine: MakeEngine) -> None:
    class Plain(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, h: torch.Tensor, ctx: object) -> torch.Tensor:
            out: torch.Tensor = self.layer(h, ctx)
            return out

    engine = make_engine()
    twin = Engine(_plain(Plain), engine.plan, engine.context)
    assert engine.keeps_states
    assert not twin.keeps_states
    for ours, theirs in zip(
        Scorer(engine).score(bundles_of()), Scorer(twin).score(bundles_of()), strict=True
    ):
        for a, b in zip(ours, theirs, strict=True):
            close(a.logprob, b.logprob)


def _plain(kind: Callable[[nn.Module], nn.Module]) -> Stack:
    torch.manual_seed(0)
    model = GPT(layers=3, width=16, heads=2, vocab=VOCAB, context=32).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.layers = nn.ModuleList(kind(layer) for layer in model.layers)
    return model


def test_a_question_is_run_once_for_all_its_choices(make_engine: MakeEngine) -> None:
    engine = make_engine()
    positions = []
    hook = engine.stack.layers[0].register_forward_pre_hook(
        lambda _, given: positions.append(given[0].shape[0] * given[0].shape[1])
    )
    question = list(range(20))
    Scorer(engine).score([[TokenRow([*question, 30 + i, 3], 20) for i in range(4)]])
    hook.remove()
    assert positions == [19, 4 * 2]  # all but its last token; then that and the first token of each choice


def test_in_float64_neither_batches_nor_order_change_a_bit(make_engine: MakeEngine) -> None:
    engine, bundles = make_engine(), bundles_of()
    order = random.Random(1).sample(range(len(bundles)), len(bundles))
    expected = Scorer(engine).score(bundles)
    for size in (1, 30, 10_000):
        found = Scorer(engine, batch_tokens=size).score([bundles[i] for i in order])
        for i, scores in zip(order, found, strict=True):
            for a, b in zip(expected[i], scores, strict=True):
                assert torch.equal(a.logprob, b.logprob)


def test_in_float32_alone_is_exact_and_together_is_close(make_engine: MakeEngine) -> None:
    engine, bundles = make_engine(dtype=torch.float32), bundles_of()
    order = random.Random(2).sample(range(len(bundles)), len(bundles))
    expected = Scorer(engine, batch_tokens=1).score(bundles)
    alone = Scorer(engine, batch_tokens=1).score([bundles[i] for i in order])
    together = Scorer(engine, batch_tokens=10_000).score([bundles[i] for i in order])
    for i, single, joint in zip(order, alone, together, strict=True):
        for a, b, c in zip(expected[i], single, joint, strict=True):
            assert torch.equal(a.logprob, b.logprob)
            torch.testing.assert_close(a.logprob, c.logprob, rtol=0, atol=1e-4)  # rounding of float32


def test_depths_are_those_of_generation(make_engine: MakeEngine) -> None:
    engine, bundles = make_engine(), bundles_of()
    every = Scorer(engine).score(bundles)
    for depth, exit_ in (("full", 2), ("prefix:1", 0), ("prefix:3", 2)):
        for ours, theirs in zip(Scorer(engine, depth).score(bundles), every, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                close(a.logprob[0], b.logprob[exit_])
    for named, weights in (("path:1,3", "1,3"), ("branches:1-3*3+1-2", "1-3*3+1-2")):
        strategy = PathEnsemble(engine, parse_branches(weights))
        row = bundles[2][0]
        for place in range(row.start, len(row.tokens)):
            slow = pooled(strategy, row.tokens[:place])
            found = Scorer(engine, named).score([[row]])[0][0].logprob[0, place - row.start]
            close(found, slow[row.tokens[place]].double())


def test_a_model_that_predicts_by_a_path_is_scored_by_it(make_engine: MakeEngine) -> None:
    engine = make_engine(replace(Topology.chain("1,1,1"), prediction="path:1,3"))
    found = Scorer(engine).score(bundles_of())
    path = Scorer(make_engine(), "path:1,3").score(bundles_of())
    first = Scorer(make_engine(), "prefix:1").score(bundles_of())
    for each, by_path, by_first in zip(found, path, first, strict=True):
        for score, a, b in zip(each, by_path, by_first, strict=True):
            assert len(score.logprob) == 3
            close(score.logprob[-1], a.logprob[0])
            close(score.logprob[0], b.logprob[0])


def test_what_is_common_stops_before_what_is_scored() -> None:
    rows = [TokenRow([1, 2, 3, 4], 3), TokenRow([1, 2, 3, 5], 3)]
    assert common(rows) == 2
    assert common(rows[:1]) == 0
    assert common([TokenRow([1, 2, 3, 4], 3), TokenRow([9, 2, 3, 5], 3)]) == 0
    assert TokenRow([1, 2, 3, 4], 3).cut(2) == TokenRow([3, 4], 1)
    assert TokenRow([1, 2, 3, 4], 1).cut(2) == TokenRow([3, 4], 1), "a token behind nothing is not scored"


def test_what_cannot_be_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with refused(ConfigError, setting="start", given=0):
        TokenRow([1, 2], 0)
    with refused(ConfigError, setting="tokens", given=40):
        Scorer(engine).score([[TokenRow([1] * 40, 3)]])
    with refused(ConfigError, setting="batch_tokens", given=0):
        Scorer(engine, batch_tokens=0)
    with refused(ConfigError, setting="depth", given="wand"):
        Scorer(engine, "wand")
    with refused(ConfigError, setting="exit", given=4):
        Scorer(engine, "prefix:4")
    assert Scorer(engine).score([]) == []
    assert Scorer(engine).score([[]]) == [[]]
