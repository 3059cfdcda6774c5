"""Models with a recurrent memory run like the GPT: full depth, prefixes, early exits, and speculation, which
goes back by replaying from a snapshot. And a model of regions writes what teacher forcing says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from decoding import written
from raising import refused
from tests.oracles.decoding import greedy
from topograd.decode.drafters import DraftRule
from topograd.decode.engine import Engine
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import DecodeStrategy, FixedDepth, generate_batch
from topograd.decode.wand import Wand
from topograd.errors import ConfigError
from topograd.exec.forward import stage_outputs
from topograd.nn.config import SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.mamba.recurrent import RecurrentState
from topograd.topology.dag import Topology

CONTEXT, LAST, TOKENS = 24, 3, 26
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [3]]


@pytest.fixture(scope="module", params=["mamba2", "mamba3", "hybrid"])
def model(request: pytest.FixtureRequest, make_gpt: Callable[..., GPT]) -> GPT:
    return make_gpt(later=0.15, width=16, architecture=request.param, ssm_state=8)


def tokens_of(mode: DecodeStrategy, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    return [[emitted.token for emitted in row] for row in generate_batch(mode, prompts, TOKENS)]


@pytest.mark.covers("mamba", "decode")
@pytest.mark.covers("mamba", "decode", feature="early exit")
def test_every_prefix_writes_what_the_slow_way_writes(model: GPT, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(model)
    assert engine.keeps_states
    for stage in (0, LAST):
        expected = [greedy(model, engine.plan, prompt, TOKENS, stage, CONTEXT) for prompt in PROMPTS]
        assert tokens_of(FixedDepth(engine, stage)) == expected


@pytest.mark.covers("mamba", "decode", feature="speculation")
@pytest.mark.parametrize("longest", [1, 3, 6])
def test_speculation_replays_instead_of_rolling_back(
    model: GPT, make_engine: Callable[..., Engine], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model)
    replayed: list[int] = []
    truncate = RecurrentState.truncate

    def watched(state: RecurrentState, length: int) -> int:
        reached = truncate(state, length)
        replayed.append(length - reached)
        return reached

    monkeypatch.setattr(RecurrentState, "truncate", watched)
    found, tally = written(Speculate(engine, DraftRule(0.0, longest), 0), PROMPTS, TOKENS)
    assert [[e.token for e in row] for row in found] == tokens_of(FixedDepth(engine))
    assert 0 < tally.accepted < tally.drafted
    if longest > 1:
        assert max(replayed) > 0, "some draft was kept and another was not"


def test_leaving_early_and_catching_up(model: GPT, make_engine: Callable[..., Engine]) -> None:
    """Positions that a token left pending are run later, as one batch."""
    engine = make_engine(model)
    (emitted,) = generate_batch(Wand(engine, [0.4, 0.4, 0.4]), PROMPTS[:1], TOKENS)
    assert len({token.exit for token in emitted}) > 1
    never = tokens_of(Wand(engine, [float("inf")] * 3), PROMPTS[:1])
    assert never == tokens_of(FixedDepth(engine, None), PROMPTS[:1])


@pytest.mark.parametrize("pool", ["tail", "mean", "cumulative"])
def test_regions_write_what_teacher_forcing_says(
    model: GPT, make_engine: Callable[..., Engine], pool: str
) -> None:
    settings = SegmentInterface(segments=6, rank=4, pool=pool)  # type: ignore[arg-type]
    add_interfaces(model, settings, 4, model.config.width, CONTEXT)
    for relay in model.learned_relays().values():
        for parameter in relay.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    engine = make_engine(model, Topology.regions("1,1,1,1"))
    rows = [
        [emitted.token for emitted in row] for row in generate_batch(FixedDepth(engine, None), PROMPTS, 16)
    ]
    for prompt, row in zip(PROMPTS, rows, strict=True):
        inputs = torch.tensor([[*prompt, *row]])
        logits = model.readout(stage_outputs(model, engine.plan, inputs, [LAST])[LAST], LAST)
        assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == row
    assert engine.exits == [LAST], "one region predicts"
    with refused(ConfigError, setting="exit", given=2):
        FixedDepth(engine, 1)
