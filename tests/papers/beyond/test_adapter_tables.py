"""Forgetting at one level: an arm that learns less must not look safer for it."""

from typing import Any

import pytest

from papers.beyond import adapter_tables as tables


def row(arm: str, new: list[float], lost: list[float], seed: int = 0, base: str = "m") -> dict[str, Any]:
    old = [[1 + value, 1.5 + 1.01 * value] for value in lost]
    shared = {"base": base, "arm": arm, "seed": seed, "rate": 1e-3, "parameters": 10}
    return {**shared, "new": new, "old": old}


ROWS = [
    row("lora", [4.0, 3.0, 2.0], [0.0, 0.2, 0.4]),
    row("pissa", [4.0, 2.0, 1.0], [0.0, 0.6, 1.0]),
    row("dead", [4.0, 3.9, 3.8], [0.0, 0.0, 0.0]),
    row("safe", [4.0, 3.5, 3.0], [0.0, 0.02, 0.04]),
    row("named layers", [4.0, 3.0, 2.0], [0.0, 0.3, 0.4]),
]


def test_the_level_is_half_of_the_least_gain_of_those_who_learned() -> None:
    assert not tables.has_learned(ROWS, "m", "dead")
    assert tables.level(ROWS, "m", 0) == pytest.approx(3.5)
    assert tables.forgetting(ROWS, "m", "lora") == pytest.approx([0.1, 0.101])
    assert tables.forgetting(ROWS, "m", "safe") == pytest.approx([0.02, 0.0202])


def test_claims_hold_and_fail() -> None:
    verdicts = {claim.name: claim.verdict for claim in tables.claims("m", ROWS)}
    assert verdicts["m: safe forgets less than lora"] == "held"
    assert verdicts["m: dead forgets less than lora"] == "failed", "it does not learn"
    assert verdicts["m: named layers forgets less than lora"] == "failed"
    assert verdicts["m: named layers forgets less than pissa"] == "undecided at this size", "they are level"
    assert tables.findings("m", ROWS) == [
        "m: pissa learns most, and safe forgets least at one level of the new text."
    ]


def test_the_table_and_the_figure_have_every_arm() -> None:
    found = tables.table("m", ROWS)
    assert [line[0] for line in found.rows] == ["lora", "pissa", "dead", "safe", "named layers"]
    assert found.rows[2][-1] == "not learned"
    assert [series.name for series in tables.drawing(ROWS, "m").series] == tables.arms_of(ROWS, "m")


def test_seeds_count_where_there_are_several() -> None:
    rows = [row("lora", [4.0, 2.0], [0.0, lost], seed) for seed, lost in enumerate((0.2, 0.4))]
    assert tables.forgetting(rows, "m", "lora") == pytest.approx([0.1005, 0.201])
