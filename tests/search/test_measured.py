from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import heldout_text, open_session
from topograd.search import property_probes
from topograd.search.candidates import Candidate
from topograd.search.measured import Trained, as_runs, worth
from topograd.search.properties import read_numbers
from topograd.search.utility import DEPLOYMENTS, Weights, utility
from topograd.topology.composition import Composition
from topograd.training.runs import start


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


@pytest.fixture(scope="module")
def trained(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder: Path = tmp_path_factory.mktemp("choice") / "run"
    start(config.changed(partition="2,2", heads="per-stage", objective="residual"), folder).train()
    session = open_session(folder)
    return Trained.of(session, heldout_text(session))


def test_the_worth_of_a_run_is_weighed_from_what_is_measured(trained: Trained) -> None:
    found = worth(trained, DEPLOYMENTS["on-device"], ["wand", "gradient_depth"])
    assert asdict(found.terms) == read_numbers(trained, asdict(found.terms))
    assert found.terms.bpb == trained.evaluation.bpb.prediction != trained.evaluation.bpb.last
    assert found.utility == utility(found.terms, DEPLOYMENTS["on-device"])
    assert sum(found.shares.values()) == pytest.approx(found.utility)
    assert found.shares["capability"] == -0.3 * found.terms.capability < 0
    assert found.properties == {"wand": found.properties["wand"], "gradient_depth": 2}


def test_without_weights_bits_per_byte_are_left(trained: Trained) -> None:
    found = worth(trained, Weights())
    assert found.utility == found.terms.bpb
    assert set(found.shares.values()) == {found.terms.bpb, 0.0}
