from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import open_session
from topograd.search import property_probes
from topograd.search.candidate_runs import as_runs
from topograd.search.candidates import Candidate
from topograd.topology.composition import Composition


@pytest.fixture(autouse=True)
def _short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(property_probes, "STEPS", 2)


SIX = ("bpb", "coupling", "head", "capability", "bandwidth", "calibration")
OTHERS = ("gradient_depth", "pipeline_granularity", "structural_capability")


def test_a_candidate_is_a_run_that_goes_on(config: TrainConfig, tmp_path: Path) -> None:
    candidate = Candidate(Composition.parse("2,2"), {"heads": "per-stage"})
    train = as_runs(replace(config, steps=8), (*SIX, *OTHERS))
    train(candidate, 4, tmp_path / "halves")
    assert Run.open(tmp_path / "halves").metrics()[-1]["step"] == 4
    resumed = train(candidate, 8, tmp_path / "halves")
    assert resumed == train(candidate, 8, tmp_path / "whole")
    steps = [r["step"] for r in Run.open(tmp_path / "halves").metrics() if r["kind"] == "train"]
    assert steps == list(range(1, 9))
    assert set(resumed) == {*SIX, *OTHERS}
    assert [resumed[name] for name in OTHERS] == [2, 2, 1.0]
    assert (resumed["coupling"], resumed["head"]) == (2 / 3, 2.0)
    assert 0 < resumed["bpb"] < 9
    table = Run.open(tmp_path / "whole").read_config()["topology"]
    assert (table["partition"], table["heads"]) == ("2,2", "per-stage")


@pytest.mark.parametrize(
    "settings",
    [
        {"graph": "forest", "decoder": "1"},
        {"relay": "gate", "source": "embedding", "join": "low-rank"},
        {"objective": "residual", "heads": "low-rank", "source": "layer:1"},
    ],
    ids=["forest-decoder", "relay-bus", "residual-early-layer"],
)
def test_every_kind_of_candidate_is_measured_by_what_it_predicts(
    config: TrainConfig, settings: dict[str, str], tmp_path: Path
) -> None:
    found: Any = as_runs(replace(config, steps=2), SIX)(
        Candidate(Composition.parse("1,1,2"), settings), 2, tmp_path / "run"
    )
    session = open_session(tmp_path / "run")
    reading = Run.open(tmp_path / "run").read_results()
    assert reading is not None
    assert found["bpb"] == reading["bpb"]["prediction"]
    if session.plan.prediction.kind != "last":
        assert found["bpb"] != reading["bpb"]["last"]
    assert 0 <= found["capability"] <= 1
    assert all(value >= 0 for value in found.values())
