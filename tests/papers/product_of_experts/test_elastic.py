"""Stages that come and go: the identity at insertion, and failures by hand."""

import pytest
import torch

from papers.outcome import asked
from papers.product_of_experts.elastic import expected_accuracy
from papers.run import run_study


def test_the_study_in_miniature() -> None:
    pytest.importorskip("sklearn")
    found = run_study(asked("elastic", "tiny", seeds=1))
    assert found["tables"][0]["caption"] == "A stage added during training"
    grown = [row for row in found["rows"] if "unchanged_at_insertion" in row]
    assert grown
    assert all(row["unchanged_at_insertion"] for row in grown)
    paths = {row["path"]: row["accuracy"] for row in found["rows"] if row["question"] == "drop"}
    whole = next(row for row in found["rows"] if row["arm"] == "chain" and row.get("failure") == 0.0)
    assert paths["1,2,3"] == whole["accuracy"]


def test_failures_by_hand() -> None:
    """Three stages of which only the last is right; two classes, so chance is a half."""
    wrong, right = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    alone, labels, p = [wrong, wrong, right], torch.tensor([1]), 0.2
    up = 0.8**3
    assert expected_accuracy("backprop", [right], labels, p, 2) == pytest.approx(up + (1 - up) / 2)
    assert expected_accuracy("chain", alone, labels, p, 2) == pytest.approx(up + 0.2 * 0.5)
    left = 0.8 * (1 - 0.0)  # the third branch outweighs the others, with any of them
    assert expected_accuracy("forest", alone, labels, p, 2) == pytest.approx(left + 0.2**3 * 0.5)
