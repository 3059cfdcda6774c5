import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from papers import staged_runs as module
from papers.outcome import asked
from papers.stage_partitioned_learning.experiment_c import forest
from papers.stage_partitioned_learning.experiment_e import behind_root
from papers.staged_runs import (
    PRESETS,
    SWEEP,
    Arm,
    Sizes,
    bpb_at,
    chain,
    differences,
    held_out,
    order0,
    slopes,
    spread,
    tail_use,
    train_arms,
    values,
)
from raising import refused
from topograd.data import Text, windows
from topograd.errors import ConfigError, DivergenceError
from topograd.runs.config import OptimizerConfig
from topograd.runs.session import load_data

ASKED = asked("stage0-depth", "tiny")


def test_equal_arms_are_equal_and_others_are_not(sizes: Sizes) -> None:
    arms = [chain("2,2,2", "a"), chain("2,2,2", "b"), chain("4,1,1")]
    rows = train_arms(arms, replace(sizes, seeds=2), ASKED)
    assert differences(rows, "a", "b") == [0.0, 0.0]
    assert all(x != 0 for x in differences(rows, "a", "4,1,1"))
    assert values(rows, "a")[0] != values(rows, "a")[1]
    assert [row["seed"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert rows[2]["partition"] == [4, 1, 1]


def test_arms_share_first_weights_and_data(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def fit(stack: Any, plan: Any, batches: Any, steps: int, config: Any, watch: Any) -> Any:
        assert config.lr_relay == (0.5 if seen[1:] else OptimizerConfig().lr_relay)
        seen.append((stack.layers[0].state_dict(), stack.embedding.weight, list(batches), steps))
        return torch.zeros(steps, len(plan.stages))

    monkeypatch.setattr(module, "fit", fit)
    own_rate = replace(chain("1,3,2", objective="residual"), relays=0.5)
    train_arms([chain("6"), behind_root("gate"), own_rate], replace(sizes, seeds=1), ASKED)
    first, *others = seen
    for weights, embedding, batches, steps in others:
        assert steps == len(batches) == sizes.steps
        assert all(torch.equal(weights[name], first[0][name]) for name in weights)
        assert torch.equal(embedding, first[1])
        assert all(
            torch.equal(a, b)
            for x, y in zip(batches, first[2], strict=True)
            for a, b in zip(x, y, strict=True)
        )


def test_an_arm_is_read_by_what_its_topology_predicts(sizes: Sizes) -> None:
    arms = [chain("2,2,2"), chain("2,2,2", "r", "residual"), forest("2,2,2")]
    plain, corrected, parallel = train_arms(arms, replace(sizes, seeds=1), ASKED)
    assert [row["prediction"] for row in (plain, corrected, parallel)] == ["last", "sum", "pool"]
    assert plain["bpb"] == plain["bpb_last"] == plain["bpb_prefix"][-1] == plain["bpb_stages"][-1]
    assert corrected["bpb"] == corrected["bpb_sum"] == corrected["bpb_prefix"][-1] != corrected["bpb_last"]
    assert parallel["bpb"] == pytest.approx(parallel["bpb_mean"]) != pytest.approx(parallel["bpb_last"])
    assert len(plain["usefulness"]) == len(plain["effective_rank"]) == 3


def test_the_first_weights_of_relays_may_be_set(sizes: Sizes) -> None:
    seen: list[Any] = []

    def start(stack: Any) -> None:
        seen.append(sorted(stack.learned_relays()))

    train_arms([replace(behind_root("gate"), start=start)], replace(sizes, seeds=1), ASKED)
    assert seen == [["gate-1"]], "its relays are there, and nothing was trained yet"


def test_no_way_around_the_stage_before(sizes: Sizes) -> None:
    model = sizes.config(0).gpt
    assert not model.smear
    assert not model.x0_blend
    assert model.value_embeddings == "none"


def test_order0_is_the_entropy_of_the_bytes(sizes: Sizes) -> None:
    config, data = load_data(sizes.config(0))
    text = held_out(config, data)
    assert torch.equal(text.targets, windows(data.heldout, data.tokenizer, 16, 200)[1])
    even = Text(torch.zeros(1, 8), torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4]]), 8)
    assert order0(even) == pytest.approx(2.0)
    padded = Text(torch.zeros(1, 4), torch.tensor([[1, 2, -100, -100]]), 4)
    assert order0(padded) == pytest.approx(0.5)


def test_a_probe_adds_its_readings(sizes: Sizes) -> None:
    told: list[tuple[int, int]] = []
    watched = replace(ASKED, on_more=lambda *done: told.append(done))
    rows = train_arms([chain("6")], sizes, watched, lambda stack, plan, text: {"x": text.nbytes})
    assert [row["x"] for row in rows] == [rows[0]["x"]] * 2
    assert told == [(1, 2), (2, 2)]


def test_bits_per_byte_on_the_way(sizes: Sizes) -> None:
    """Read before the step of that number, so that at a share of 0 nothing is learned and at the end all."""
    plain = train_arms([chain("2,2,2")], replace(sizes, seeds=1), ASKED)[0]
    (row,) = train_arms([chain("2,2,2")], replace(sizes, seeds=1), ASKED, shares=(0.0, 0.5))
    assert row[bpb_at(0.0)] == pytest.approx(math.log2(257), rel=0.05), "no head has learned anything"
    assert row["bpb"] < row[bpb_at(0.5)] < row[bpb_at(0.0)]
    assert {key: row[key] for key in plain} == plain, "reading changes nothing"


@pytest.mark.parametrize(
    ("partition", "layer", "setting"),
    [
        ("6", 0, "arm"),
        ("2,2,2", 5, "arm"),
    ],
)
def test_a_loss_that_is_not_finite(partition: str, layer: int, setting: str, sizes: Sizes) -> None:
    """A stage that breaks is not left out in silence: the others would be another arm."""

    @torch.no_grad()
    def spoil(stack: Any) -> None:
        for parameter in stack.layers[layer].parameters():
            parameter.fill_(math.nan)

    with refused(DivergenceError, setting=setting):
        train_arms([replace(chain(partition), start=spoil)], replace(sizes, seeds=1), ASKED)


def test_no_seeds(sizes: Sizes) -> None:
    with refused(ConfigError, setting="seeds", given=0):
        train_arms([chain("6")], replace(sizes, seeds=0), ASKED)


def test_slopes_are_by_layer(invent: Any) -> None:
    arms = [chain(partition) for partition in SWEEP]
    rows = invent(arms, bpb=lambda arm: 3 - 0.25 * arm.depth)
    assert slopes(rows, arms) == pytest.approx([-0.25] * 3, abs=1e-3)
    assert [arm.depth for arm in arms] == [1, 2, 3, 3, 4]
    assert spread(rows, "2,2,2") == f"{statistics.stdev(values(rows, '2,2,2')):.4f}"
    assert spread(rows[:5], "2,2,2") == "–"


def test_tail_use_leaves_the_first_stage_out(invent: Any) -> None:
    arms: list[Arm] = [chain("2,2,2"), chain("4,1,1")]
    rows = invent(arms, usefulness=lambda arm: [0.1 * arm.depth, 0.3 * arm.depth])
    assert tail_use(rows, arms) == pytest.approx([0.6] * 3, abs=1e-3)


def test_presets_are_as_documented() -> None:
    assert PRESETS["small"].seeds >= 3
    assert 150 <= PRESETS["small"].steps <= 300
    assert PRESETS["tiny"].steps < 10
