"""The gap against tokens per parameter: gaps and verdicts by hand, and rates that are chosen."""

from typing import Any

import pytest

from papers.outcome import asked
from papers.product_of_experts import token_ratio
from papers.product_of_experts.token_ratio import (
    BACKPROP,
    OWN_HEADS,
    STAGES,
    TUNING,
    _claims,
    add_gaps,
    cases,
    config_of,
    gaps,
    scaled,
    steps_of,
)
from papers.verdicts import FAILED, HELD
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.runs.config import OptimizerConfig
from topograd.training.optimizers import make_optimizers

RATIOS = (10.0, 20.0, 30.0)


def made_up(
    plain: tuple[float, float, float], fine: float, coarse: float, own: float
) -> list[dict[str, Any]]:
    """Backprop has a BPB of 2; the gaps are given in percent, a little different for each of three seeds."""
    rows = []
    for seed in range(3):
        for case in cases(RATIOS):
            gap = {
                BACKPROP: 0.0,
                STAGES[1]: fine,
                STAGES[2]: dict(zip(RATIOS, plain, strict=True))[case.ratio],
                STAGES[3]: coarse,
                OWN_HEADS: own,
            }[case.arm]
            bpb = 2.0 * (1 + (gap + (0.001 * seed if gap else 0)) / 100)
            rows.append({"arm": case.arm, "ratio": case.ratio, "seed": seed, "bpb": bpb})
    add_gaps(rows)
    return rows


def test_own_heads_have_the_middle_ratio_alone() -> None:
    assert [case.ratio for case in cases(RATIOS) if case.arm == OWN_HEADS] == [20.0]
    assert len(cases(RATIOS)) == 3 * 4 + 1


def test_gaps_by_hand() -> None:
    rows = made_up((5.0, 6.0, 7.0), 12.0, 3.0, 6.0)
    assert gaps(rows, STAGES[2], 20.0) == pytest.approx([6.0, 6.001, 6.002])
    assert all("gap" not in row for row in rows if row["arm"] == BACKPROP)


def test_a_floor_that_coarser_stages_lower() -> None:
    verdicts = [claim.verdict for claim in _claims(made_up((6.0, 6.2, 6.5), 12.0, 3.0, 5.0), RATIOS)]
    assert verdicts == [HELD, HELD, HELD, HELD]


def test_a_gap_that_tokens_close_and_heads_widen() -> None:
    verdicts = [claim.verdict for claim in _claims(made_up((6.0, 4.0, 2.0), 3.0, 5.0, 7.0), RATIOS)]
    assert verdicts == [HELD, FAILED, FAILED, FAILED]


def test_steps_are_of_tokens_a_parameter() -> None:
    config = config_of(asked("token-ratio", "small"), 0)
    tokens = config.batch * config.model.context * steps_of(config, 10.0)
    parameters = sum(p.numel() for p in GPT(config.gpt).parameters())
    assert tokens == pytest.approx(10 * parameters, rel=0.01)


def test_a_factor_is_of_every_rate_that_is_used() -> None:
    """The usual rates, spelt out, are what an optimizer without them has."""
    config = config_of(asked("token-ratio", "tiny"), 0)
    stack = GPT(config.gpt)
    plan = prepare(stack, token_ratio.topologies()[OWN_HEADS])

    def rates(settings: OptimizerConfig) -> list[float]:
        made = make_optimizers(stack, settings, plan)
        return [group["peak"] for one in made.optimizers.values() for group in one.param_groups]

    usual = rates(config.optimizer)
    assert rates(scaled(config.optimizer, 1.0)) == pytest.approx(usual)
    assert rates(scaled(config.optimizer, 0.5)) == pytest.approx([0.5 * rate for rate in usual])


def test_the_study_takes_each_arms_best_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    best = dict(zip(token_ratio.topologies(), (0.5, 1.0, 2.0, 1.0, 0.5), strict=True))
    seen: list[tuple[str, float, int]] = []

    def train(case: Any, given: Any, rate: float) -> dict[str, Any]:
        seed = given.config.seed
        seen.append((case.arm, rate, seed))
        bpb = 2.0 + abs(rate - best[case.arm]) + 0.1 * (case.arm != BACKPROP) + 0.001 * seed
        key = {"arm": case.arm, "ratio": case.ratio, "seed": seed, "rate": rate}
        return {**key, "steps": 1, "bpb": bpb, "order0": 5.0}

    monkeypatch.setattr(token_ratio, "_train", train)
    found = token_ratio.run(asked("token-ratio", "tiny"))
    assert all(rate == best[arm] for arm, rate, seed in seen if seed != TUNING)
    assert found.record["rates"] == best
    assert {row["seed"] for row in found.rows} == {0, 1}, "the seed that chose judges nothing"
