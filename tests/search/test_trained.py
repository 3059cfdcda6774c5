from dataclasses import replace
from pathlib import Path

import pytest

from topograd.errors import ConfigError
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.search.candidates import Candidate
from topograd.search.trained import OBJECTIVES, as_runs, named_objectives
from topograd.topology.composition import Composition


def test_a_candidate_is_a_run_that_goes_on(config: TrainConfig, tmp_path: Path) -> None:
    candidate = Candidate(Composition.parse("2,2"), {"stage_heads": "per-stage"})
    train = as_runs(replace(config, steps=8))
    train(candidate, 4, tmp_path / "halves")
    assert Run.open(tmp_path / "halves").metrics()[-1]["step"] == 4
    resumed = train(candidate, 8, tmp_path / "halves")
    assert resumed == train(candidate, 8, tmp_path / "whole")
    steps = [r["step"] for r in Run.open(tmp_path / "halves").metrics() if r["kind"] == "train"]
    assert steps == list(range(1, 9))
    assert set(resumed) == set(OBJECTIVES)
    assert (resumed["gradient_depth"], resumed["pipeline_granularity"], resumed["capability"]) == (2, 2, 1.0)
    assert 0 < resumed["bpb"] < 9
    settings = Run.open(tmp_path / "whole").read_config()
    assert (settings["partition"], settings["stage_heads"]) == ("2,2", "per-stage")


def test_objectives_by_name() -> None:
    assert named_objectives(["bpb", "capability"]) == {"bpb": "minimize", "capability": "maximize"}
    with pytest.raises(ConfigError, match="objective 'speed' is unknown; choose among bpb"):
        named_objectives(["speed"])
    with pytest.raises(ConfigError, match="each once"):
        named_objectives(["bpb", "bpb"])
