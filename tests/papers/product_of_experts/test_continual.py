"""The study of continual learning in miniature, through its door."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from papers.outcome import asked
from papers.product_of_experts import continual, continual_methods
from papers.product_of_experts.continual import NAMES, Scale
from papers.run import run_study
from raising import refused
from topograd.errors import ConfigError


@pytest.fixture
def miniature(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setitem(continual.PRESETS, "tiny", Scale(batch=8, pictures=8, rates=(0.003,)))
    monkeypatch.setattr(continual_methods, "FISHER_ROWS", 2)


@pytest.mark.usefixtures("miniature")
def test_the_contract(tmp_path: Path, call: Any) -> None:
    sizes = ("--steps", 2, "--width", 6, "--seeds", 1)
    found = call("run", "continual", "--preset", "tiny", *sizes, "--json", "--out", tmp_path).json
    assert {row["method"] for row in found["rows"]} == set(NAMES)
    assert {row["scenario"] for row in found["rows"]} == {"class", "domain"}
    for row in found["rows"]:
        assert {"method", "accuracy", "forgetting", "seed"} <= row.keys()
        matrix = np.array(row["matrix"])  # after each task, the accuracy on every task
        assert matrix.shape == (5, 5)
        assert len(np.unique(matrix)) > 1, "it learned something"
        assert row["accuracy"] == pytest.approx(matrix[-1].mean())
        best = np.array([matrix[j:4, j].max() for j in range(4)])
        assert row["forgetting"] == pytest.approx((best - matrix[-1, :4]).mean())
    assert found["verdict"]
    assert found["scale"]["widths"] == [6, 6]
    assert [table["caption"] for table in found["tables"]] == ["class-incremental", "domain-incremental"]


@pytest.mark.usefixtures("miniature")
def test_rates_are_tuned_on_another_seed_and_other_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(continual.PRESETS, "tiny", Scale(batch=8, pictures=8, rates=(0.0, 0.01), tuned=True))
    seeds, judged = [], []
    real = continual.learn
    monkeypatch.setattr(continual, "METHODS", {"finetune": continual.METHODS["finetune"]})
    monkeypatch.setattr(continual, "SCENARIOS", ("class",))
    monkeypatch.setattr(continual, "_claims", lambda rows: ())
    monkeypatch.setattr(continual, "_findings", lambda rows: ())

    def watched(*args: object) -> object:
        seeds.append(args[-1])
        judged.append(args[2][0].test)  # type: ignore[index]
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(continual, "learn", watched)
    continual.run(asked("continual", "tiny", steps=1, width=6, seeds=1))
    assert seeds == [continual.TUNING_SEED, continual.TUNING_SEED, 0]
    assert [len(pictures) for pictures in judged] == [1, 1, 4]


def test_studies_with_data_of_their_own_refuse_other(capsys: pytest.CaptureFixture[str]) -> None:
    with refused(ConfigError, setting="data", given="somewhere"):
        run_study(asked("leak", "tiny", data="somewhere"))
