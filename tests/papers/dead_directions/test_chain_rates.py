"""The compatibility sweep in miniature: what can be read, what must be refused."""

import pytest
import torch

from papers.dead_directions import chain_rates as study
from topograd.geometry.rules.architectures import Chain

VARIATIONS = {variation.name: variation for variation in study.variations()}


@pytest.fixture(autouse=True)
def fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "SAMPLES", 100)


def test_there_are_22_variations_and_three_of_ours() -> None:
    assert len(VARIATIONS) == len(study.variations()) == 25
    ours = [variation for variation in VARIATIONS.values() if variation.optimizer.startswith("DDC")]
    assert len(ours) == 3
    assert VARIATIONS["32 layers"].predicted == 62
    assert VARIATIONS["layernorm"].predicted == 2


@pytest.mark.parametrize(
    ("name", "slope"), [("linear, SGD, squared error", 4), ("2 layers", 2), ("cross-entropy", 4)]
)
def test_a_trained_linear_chain_has_the_slope_and_no_rate(name: str, slope: float) -> None:
    """The way is straight, and too far from its end to be called a rate."""
    moments = study.descend(VARIATIONS[name], seeds=2, steps=80)
    assert study.slopes_on_the_way(moments) == pytest.approx([slope] * 2, abs=0.01)
    assert all(rate.slope is None for rate in study.rates(moments, VARIATIONS[name].chain.depth))


def test_a_dead_row_that_turns_refuses_the_slope() -> None:
    found = study.rates(study.descend(VARIATIONS["layernorm"], seeds=1, steps=400), depth=3)
    assert found[0].alignment_error > 0.1
    assert found[0].slope is None
    assert "alignment" in str(found[0].refused)


@pytest.mark.parametrize("name", sorted(VARIATIONS))
def test_every_variation_runs_from_where_it_says(name: str) -> None:
    variation = VARIATIONS[name]
    first, *_, last = study.descend(variation, seeds=1, steps=2)
    assert first.t.item() == pytest.approx(variation.start)
    assert first.error.item() == 0.0
    assert first.G.item() > 0
    assert last.t.item() != first.t.item()


def test_all_depths_start_with_one_speed() -> None:
    speeds = [VARIATIONS[f"{depth} layers"].start ** (2 * depth - 2) for depth in (2, 6, 32)]
    assert speeds == pytest.approx([study.START**4] * 3)


def test_the_dead_entry_is_the_noise_times_what_follows() -> None:
    weights = [torch.diag(torch.tensor([1.0, 1.0, t], dtype=torch.float64))[None] for t in (0.5, 0.2, 0.1)]
    inputs = torch.randn(1, 20, 3, dtype=torch.float64)
    moment = study.read_moment(Chain(3, 3), weights, inputs)
    assert moment.G.item() == pytest.approx((study.SIGMA * 0.2 * 0.1) ** 2)
    assert moment.t.item() == pytest.approx(0.01 ** (1 / 3))


def test_the_table_says_why_a_slope_is_missing() -> None:
    chosen = [VARIATIONS["2 layers"], VARIATIONS["layernorm"]]
    plain, turned = study.table([study.descended(variation, 2, steps=400) for variation in chosen]).rows
    assert plain[0] == "2 layers"
    assert plain[2].startswith("2.000")
    assert plain[5] == turned[5] == "0/2"
    assert "a rate needs" in plain[6]
    assert "alignment error" in turned[6]
