"""The front against scale: gaps, slopes, fronts and verdicts by hand, and the study in miniature."""

from collections.abc import Callable
from typing import Any

import pytest

from papers.outcome import Asked
from papers.presets import Size
from papers.stage_partitioned_learning import front_scale
from papers.stage_partitioned_learning.front_scale import (
    FIXED,
    RATIOS,
    SCALES,
    Scale,
    add_gaps,
    by_seed,
    claims,
    learned,
    on_front,
    scale_slopes,
    steps_of,
    topology,
)
from papers.verdicts import FAILED, HELD, UNDECIDED
from topograd.nn.gpt import GPT

SMALLER, LARGER = Scale(4, 16), Scale(8, 32)
BOTH = (SMALLER, LARGER)
Gap = Callable[[Scale, int], float]


def made_up(gap: Gap, order0: float = 5.0) -> list[dict[str, Any]]:
    """Backprop has a BPB of 2; gaps are in percent, a little different for each of three seeds."""
    rows = [
        {
            "scale": str(scale),
            "stages": stages,
            "seed": seed,
            "parameters": 10**4 if scale == SMALLER else 10**5,
            "bpb": 2.0 * (1 + (gap(scale, stages) + 0.001 * seed) / 100) if stages > 1 else 2.0,
            "activation_share": 1 / stages,
            "peak_bytes": 100 + 900 // stages,
            "order0": order0,
        }
        for seed in range(3)
        for scale in BOTH
        for stages in scale.counts
    ]
    add_gaps(rows)
    return rows


def verdicts(gap: Gap) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in claims(made_up(gap), BOTH)}


def test_arms_of_a_scale() -> None:
    assert SMALLER.counts == (1, 2, 4), "stages of one layer are four of them"
    assert Scale(12, 32).counts == (1, 2, 4, 12)
    parts = [stage.stop - stage.start for stage in topology(Scale(12, 32), 4).stages]
    assert parts == [3, 3, 3, 3]
    for scales in SCALES.values():
        assert all(scale.layers % stages == 0 for scale in scales for stages in scale.counts)


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_tokens_are_in_proportion_to_parameters(preset: str) -> None:
    sizes = []
    for scale in SCALES[preset]:
        config = scale.config(preset, 0)
        assert (config.model.layers, config.model.width) == (scale.layers, scale.width)
        sizes.append(sum(p.numel() for p in GPT(config.gpt).parameters()))
        tokens = steps_of(config, RATIOS[preset]) * config.batch * config.model.context
        assert abs(tokens - RATIOS[preset] * sizes[-1]) <= config.batch * config.model.context / 2
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)


def test_gaps_and_slopes_by_hand() -> None:
    rows = made_up(lambda scale, stages: stages * (3.0 if scale == SMALLER else 2.0))
    assert by_seed(rows, SMALLER, 2) == pytest.approx([6.0, 6.001, 6.002])
    assert by_seed(rows, LARGER, 1) == [0.0] * 3
    assert by_seed(rows, LARGER, 2, "peak_share") == pytest.approx([0.55] * 3)
    assert scale_slopes(rows, BOTH, 2) == pytest.approx([-2.0] * 3), "ten times the parameters"
    assert scale_slopes(rows, BOTH, 4) == pytest.approx([-4.0] * 3)


def test_fronts_by_hand() -> None:
    rows = made_up(lambda scale, stages: -1.0 if stages == 2 else float(stages))
    assert on_front(rows, SMALLER) == [{2, 4}] * 3, "backprop has more BPB than K = 2, and more memory"
    rows = made_up(lambda scale, stages: float(stages) if stages < 8 else -9.0)
    assert on_front(rows, LARGER) == [{1, 2, 4}] * 3, "stages of one layer are not at every scale"


def test_a_gap_that_shrinks_and_a_front_that_stays() -> None:
    found = verdicts(lambda scale, stages: stages * (3.0 if scale == SMALLER else 2.0))
    assert set(found.values()) == {HELD}
    assert len(found) == 5


def test_a_gap_that_grows_and_an_order_that_turns() -> None:
    """Finer stages are best at the smaller scale, and coarser ones at the larger."""
    found = verdicts(lambda scale, stages: -1.0 * stages if scale == SMALLER else 1.0 * stages)
    assert set(found.values()) == {FAILED}


def test_one_number_of_stages_may_shrink_alone() -> None:
    gaps = {(SMALLER, 2): 1.0, (SMALLER, 4): 3.0, (LARGER, 2): 1.5, (LARGER, 4): 2.0, (LARGER, 8): 4.0}
    found = verdicts(lambda scale, stages: gaps[scale, stages])
    assert found["the gap shrinks, K = 2"] == FAILED
    assert found["the gap shrinks, K = 4"] == HELD
    assert found["coarser stages cost less at every scale"] == HELD


def test_the_finest_stages_count_where_they_differ() -> None:
    found = verdicts(lambda scale, stages: float(stages) if stages < 8 else 1.0)
    assert found["coarser stages cost less at every scale"] == FAILED
    assert found["the front keeps its shape"] == HELD


def test_every_scale_must_have_learned() -> None:
    rows = made_up(lambda scale, stages: float(stages))
    found = claims(rows, BOTH)
    assert learned(found, rows, BOTH) == found
    for row in rows:
        row["order0"] = 1.0 if row["scale"] == str(SMALLER) else 5.0
    assert {claim.verdict for claim in learned(found, rows, BOTH)} == {UNDECIDED}


def test_the_study_in_miniature() -> None:
    told: list[tuple[int, int]] = []
    found = front_scale.run(Asked("front-scale", "tiny", Size(0.1, seeds=2), lambda *done: told.append(done)))
    arms = sum(len(scale.counts) for scale in SCALES["tiny"])
    assert told == [(i + 1, 2 * arms) for i in range(2 * arms)]
    assert len(found.rows) == 2 * arms
    for row in found.rows:
        share = pytest.approx(1 / row["stages"])
        assert row["gradient_share"] == row["activation_share"] == row["exit_share"] == share
        assert row["peak_share"] < 1 or row["stages"] == 1
    (table,) = found.tables
    assert len(table.rows) == arms
    assert all(len(row) == len(table.header) for row in table.rows)
    assert {claim.verdict for claim in found.claims} == {UNDECIDED}, "a few steps teach nothing"
    assert found.drawing is not None
    assert [series.name for series in found.drawing.series] == [f"K = {k}" for k in FIXED] + [
        "stages of one layer"
    ]
    first = {row["bpb"] for row in found.rows if row["stages"] == 2}
    assert len(first) == 4, "seeds and scales differ"
