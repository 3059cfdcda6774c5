"""The rule that scores fifty prompts."""

from __future__ import annotations

from papers.product_of_experts.fifty_prompts import PROMPTS, is_degenerate, score, table_of


def test_fifty_prompts() -> None:
    assert sum(len(prompts) for prompts in PROMPTS.values()) == 50
    assert is_degenerate("")
    assert is_degenerate("the same words here " * 9)
    assert not is_degenerate("The capital of France is Paris.")
    assert score("It is Paris.", "paris", "france") == "PASS"
    assert score("A town in France.", "paris", "france") == "PARTIAL"
    assert score("I do not know.", "paris", "france") == "FAIL"
    rows = table_of(lambda prompts: ["Paris" for _ in prompts])
    assert sum(rows[-1][name] for name in ("PASS", "PARTIAL", "FAIL", "DEGENERATE")) == 50
    assert next(row for row in rows if row["category"] == "factual")["PASS"] == 1
