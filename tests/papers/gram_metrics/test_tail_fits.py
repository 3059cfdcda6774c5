"""Two fits of a tail: what one rule changes, and a study that works without the other program."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from papers.gram_metrics import tail_fits as study
from papers.gram_metrics.tails import fit_tail
from papers.outcome import asked
from raising import refused
from topograd.errors import ConfigError


class OneSided:
    """A fit that is chosen by the distance below each step, written as its loops."""

    def __init__(self, values: Any) -> None:
        x = sorted(float(value) for value in values)
        best = np.inf
        for i, xmin in enumerate(x[:-1]):
            tail = x[i:]
            alpha = 1 + len(tail) / sum(np.log(value / xmin) for value in tail)
            distance = max(abs(1 - (v / xmin) ** (1 - alpha) - j / len(tail)) for j, v in enumerate(tail))
            if distance < best:
                best, self.alpha, self.data = distance, alpha, tail


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "weightwatcher", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "weightwatcher.WW_powerlaw", SimpleNamespace(WWFit=OneSided))


def spectrum(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.svdvals(torch.randn(30, 30, generator=generator, dtype=torch.float64)).square()


def test_the_rule_is_all_that_differs(installed: None) -> None:
    theirs, others = study.their_fit(), 0
    for seed in range(8):
        values = spectrum(seed)
        alpha, count = theirs(values)
        assert study.one_sided(values) == (pytest.approx(alpha), count)
        ours = fit_tail(values)
        others += ours.count != count
        if ours.count == count:
            assert ours.alpha == pytest.approx(alpha), "at one threshold there is one exponent"
    assert others, "the two-sided distance chooses other thresholds"


def test_the_study_counts_where_they_agree(installed: None) -> None:
    told: list[tuple[int, int]] = []
    found = study.run(asked("tail-fits", "tiny", on_more=lambda *done: told.append(done)))
    assert told == [(1, 2), (2, 2)]
    assert [(row["when"], row["seed"], row["layer"]) for row in found.rows[:6]] == [
        (when, 0, layer) for when in ("before", "after") for layer in (2, 3, 4)
    ]
    assert found.findings[0].endswith("exponent for 12 of 12 matrices.")
    same = sum(row["ours_count"] == row["theirs_count"] for row in found.rows)
    assert found.findings[1].endswith(f"the same for {same} of 12.")
    (table,) = found.tables
    assert [row[1] for row in table.rows] == ["6", "6"]
    spoiled = [{**row, "one_sided_alpha": row["theirs_alpha"] * 1.1} for row in found.rows]
    assert study.findings(spoiled)[0].endswith("exponent for 0 of 12 matrices.")


def test_without_the_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "weightwatcher", None)
    with refused(ConfigError, setting="package", given="weightwatcher"):
        study.run(asked("tail-fits", "tiny"))
