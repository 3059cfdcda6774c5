"""Lanes: a mode for rows of many requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from topograd.decode.engine import generate_batch
from topograd.decode.modes import mode_of
from topograd.decode.rows import Rows
from topograd.decode.sampling import Sampling, draw, probabilities
from topograd.errors import ConfigError
from topograd.nn.translator import Translator
from topograd.serve.lanes import MOST_LANES, Lanes, RowChooser


def test_each_row_draws_by_its_own_settings(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    settings = [Sampling(), Sampling(temperature=0.7, seed=3), Sampling(temperature=2.0, top_k=5, seed=4)]
    jobs = [desk.job([1], 1, sampling=sampling) for sampling in settings]
    found = RowChooser(jobs).choose(logits, [True] * 3)
    assert found[0] == int(logits[0].argmax())
    for row in (1, 2):
        own = torch.Generator().manual_seed(settings[row].seed)
        assert found[row] == draw(probabilities(logits[row], settings[row]), own)


def test_lanes_are_shared_where_a_mode_does_not_depend_on_the_sampling(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    lanes: Lanes = desk.scheduler.lanes
    warm = Sampling(temperature=0.5, seed=1)
    assert lanes.of("full", Sampling()) is lanes.of("full", warm) is lanes.full()
    assert lanes.of("speculate:lookup", warm) is not lanes.of("speculate:lookup", warm), "it remembers a text"
    assert lanes.of("speculate:2", Sampling()) is not lanes.of("speculate:2", warm)
    assert lanes.shared(lanes.of("prefix:2", warm))
    assert not lanes.shared(lanes.of("path:1,3", warm))
    for k in range(2 * MOST_LANES):
        lanes.of("speculate:2", Sampling(temperature=1 + k))
    assert len(lanes._made) == MOST_LANES
    with pytest.raises(ConfigError, match="unknown"):
        lanes.of("shallow", warm)


def test_exits_of_a_retrofit_are_served(make_desk: Callable[..., Any]) -> None:
    texts = []
    for translators in ({}, {0: Translator(16).double()}):
        for translator in translators.values():
            nn.init.normal_(translator.affine.weight)
        desk = make_desk()
        engine = desk.model.engine
        engine.translators = lambda found=translators: found
        jobs = [desk.job([1, 2, 3], 8, depth) for depth in ("full", "prefix:1")]
        desk.scheduler.add(jobs)
        desk.run()
        texts.append([desk.tokens(job) for job in jobs])
        alone = mode_of("prefix:1", desk.session, engine, Sampling())
        assert texts[-1][1] == [emitted.token for emitted in generate_batch(alone, [[1, 2, 3]], 8)[0]]
    assert texts[0][0] == texts[1][0]
    assert texts[0][1] != texts[1][1]


def test_what_a_step_runs_and_what_a_prompt_needs(make_desk: Callable[..., Any]) -> None:
    lanes = make_desk().scheduler.lanes
    assert [
        lanes.of(d, Sampling()).first for d in ("full", "prefix:2", "speculate:2", "speculate:lookup")
    ] == [
        [0, 1, 2, 3],
        [0, 1],
        [0],
        [],
    ]
    assert lanes.of("speculate:2", Sampling()).reads == [0, 1, 2, 3]
    assert lanes.of("prefix:1", Sampling()).reads == [0]


@torch.inference_mode()
def test_logits_of_earlier_positions(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    lane = desk.scheduler.lanes.full()
    row, _ = desk.scheduler.base.take([1, 2, 3, 4, 5], lane.reads)
    row.cache.push([[1, 2, 3, 4, 5]])
    Rows([row.cache]).run(3)
    whole = lane.logits(row.cache, 5)
    torch.testing.assert_close(lane.span(row.cache, 4, 1), whole[1:4])
    torch.testing.assert_close(lane.span(row.cache, 4, 1, 3), whole[1:4])


def test_drafts_stop_before_the_end_of_the_context(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    job = desk.job([100] * 8, 8, "speculate:6", logprobs=0)
    desk.scheduler.add([job])
    desk.run()
    assert desk.finish(job) == "length"
    full = desk.job([100] * 8, 8)
    desk.scheduler.add([full])
    desk.run()
    assert desk.tokens(job) == desk.tokens(full)
