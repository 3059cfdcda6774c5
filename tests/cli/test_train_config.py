"""`train --config FILE.toml`: laid over the preset, flags over both; and the commands of the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from topograd.runs.config import TrainConfig, preset
from topograd.runs.folder import Run
from topograd.runs.session import open_session

FOREST = '[topology]\ngraph = "forest"\nbranches = ["2", "2"]\n'
STAGES = """
[topology]
graph = "stages"
heads = "per-stage"

[[topology.stages]]
start = 0
stop = 2
sources = [{source = -1, grad_scale = 1.0}]

[[topology.stages]]
start = 2
stop = 4
objective = "residual"
sources = [{source = 0, layer = 1, relay = "pre-norm"}]

[[optimizer.stages]]
stage = 2
rate = 0.5
name = "adamw"
"""
SMALL = ["--model.width", "16", "--batch", "2", "--eval-bytes", "300", "--model.context", "16"]


@pytest.fixture
def tiny(corpus: Path) -> list[str]:
    return ["--preset", "tiny", *SMALL, "--data", str(corpus), "--steps", "2"]


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    return file


def settings(folder: Path) -> TrainConfig:
    return TrainConfig.from_dict(Run.open(folder).read_config())


def test_a_forest_from_a_file(tiny: list[str], call: Any, tmp_path: Path) -> None:
    file = written(tmp_path, FOREST)
    results = call("train", *tiny, "--config", file, "--out", tmp_path / "run", "--json").json
    assert results["finished"]
    bpb = results["bpb"]
    assert len(bpb["prefix"]) == len(bpb["stages"]) == 2
    assert bpb["prediction"] == bpb["prefix"][-1] == pytest.approx(bpb["mean"], rel=1e-6)
    assert bpb["prediction"] != bpb["last"]
    table = settings(tmp_path / "run").topology
    assert (table.graph, table.branches) == ("forest", ("2", "2"))
    assert open_session(tmp_path / "run").plan.prediction.full == ((0, 0.5), (1, 0.5))
    assert call("eval", tmp_path / "run", "--json").json["bpb"] == bpb
    shown = call("train", "--resume", tmp_path / "run").out
    assert "model: a pool of stages 1-2" in shown


def test_every_stage_and_edge_from_a_file(tiny: list[str], call: Any, tmp_path: Path) -> None:
    file = written(tmp_path, STAGES)
    assert call("train", *tiny, f"--config={file}", "--out", tmp_path / "run", "--json").json["finished"]
    session = open_session(tmp_path / "run")
    first, second = session.plan.topology.stages
    assert (first.start, first.stop, second.objective) == (0, 2, "residual")
    assert (second.sources[0].layer, second.sources[0].relay) == (1, "pre-norm")
    assert session.stack.has_head(0)
    assert session.stack.has_head(1)
    own = session.config.optimizer.stages[0]
    assert (own.stage, own.name, own.rate) == (2, "adamw", 0.5)
    assert session.plan.prediction.kind == "sum", "the last stage corrects the sum"


def test_flags_win_over_the_file_and_the_file_over_the_preset(
    corpus: Path, call: Any, tmp_path: Path
) -> None:
    text = f"""
    steps = 3
    batch = 2
    eval_bytes = 300
    data = "{corpus}"
    [model]
    width = 16
    context = 16
    [optimizer]
    clip = 2.0
    betas = [0.7, 0.9]
    """
    words = ["--preset", "tiny", "--config", written(tmp_path, text), "--out", tmp_path / "run"]
    results = call("train", *words, "--steps", "1", "--optimizer.clip", "1.5", "--json").json
    assert results["steps"] == 1
    found, base = settings(tmp_path / "run"), preset("tiny")
    assert (found.steps, found.optimizer.clip) == (1, 1.5), "flags"
    assert (found.batch, found.model.width, found.optimizer.betas) == (2, 16, (0.7, 0.9)), "the file"
    assert (found.model.layers, found.save_every) == (base.model.layers, base.save_every), "the preset"
    assert found.optimizer.warmdown == base.optimizer.warmdown, "a table is laid over, not replaced"


@pytest.mark.parametrize(
    ("text", "flags", "layers", "partition"),
    [
        ("[model]\nlayers = 3\n", "--partition 1,2", 3, "1,2"),
        ('[topology]\npartition = "1,1"\n', "--model.layers 2", 2, "1,1"),
        ('[topology]\npartition = "1,1"\n[model]\nlayers = 4\n', "--model.layers 2", 2, "1,1"),
        ('steps = 9\n[topology]\npartition = "3,3"\n', "--partition 2,2", 4, "2,2"),
        ("[model]\nsmear = true\nheads = 3\n", "--model.heads 4 --model.no-smear", 4, "L"),
    ],
    ids=["the file has the layers", "the flag has them", "both", "a partition that a flag corrects", "no-"],
)
def test_file_and_flags_need_fit_only_together(
    tiny: list[str], call: Any, tmp_path: Path, text: str, flags: str, layers: int, partition: str
) -> None:
    file = written(tmp_path, text)
    answer = call("train", *tiny, "--config", file, *flags.split(), "--out", tmp_path / "run", "--json")
    assert answer.json["steps"] == 2
    found = settings(tmp_path / "run")
    assert (found.model.layers, found.topology.partition) == (layers, partition)
    assert found.gpt.smear == ("--model.no-smear" not in flags)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("stpes = 3", "unknown setting stpes; known are"),
        ("[model]\nwdith = 3", "unknown setting model.wdith; known are"),
        ("[mdoel]\nwidth = 3", "unknown setting mdoel"),
        ("[[topology.stages]]\nstrat = 0", "unknown setting topology.stages[0].strat"),
        ('keep = "many"', "setting keep is 'many'; it must be a whole number"),
        ("keep = 2.5", "setting keep is 2.5"),
        ("[model]\nheads = 3", "it must be a multiple of twice the 3 heads"),
        ("model = 3", "model is 3; it must be a table"),
        ("[model]\nwindows = ['a']", "setting model.windows"),
        ("[topology]\ngraph = 'ring'", "setting topology.graph is 'ring'; it must be one of chain, forest"),
        ("[topology]\ngraph = 'forest'", "branches"),
        ("[topology]\nbranches = ['2', '2']", "graph is chain, which does not use it"),
        (FOREST.replace('"2", "2"', '"3", "3"'), "has 6 layers and the model has 4"),
        ("[optimizer]\nname = 'nope'", "optimizer 'nope' is unknown; choose one of muon+adamw"),
        ("[optimizer]\nlr_matrix = inf", "lr_matrix is inf"),
        ("version = 7", "version is 7"),
        ("[topology]\nobjective = 'distillation'", "needs a teacher"),
        ("[topology]\npartition = '2,2'\nprediction = 'path:2'", "begins with stage 2"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line_that_names_it(
    tiny: list[str], call: Any, tmp_path: Path, text: str, why: str
) -> None:
    file = written(tmp_path, text)
    refusal = call("train", *tiny, "--config", file, "--out", tmp_path / "run").refusal
    assert refusal.startswith(f"topograd: --config {file}: ")
    assert why in refusal
    assert not (tmp_path / "run").exists()


def test_files_that_cannot_be_read(tiny: list[str], call: Any, tmp_path: Path) -> None:
    def refusal(*words: object) -> str:
        said: str = call("train", *tiny, "--out", tmp_path / "run", *words).refusal
        return said

    missing = tmp_path / "nowhere.toml"
    assert f"{missing} cannot be read (No such file or directory)" in refusal("--config", missing)
    assert f"{tmp_path} cannot be read (" in refusal("--config", tmp_path)
    assert "is not TOML (" in refusal("--config", written(tmp_path, "steps = ["))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "is not TOML (" in refusal("--config", tmp_path / "binary.toml")
    assert "--config was given nothing" in refusal("--config", "")
    assert "--config was given nothing" in refusal("--config=")
    assert "--config has no value" in refusal("--config")
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_takes_no_file(staged: Path, call: Any, tmp_path: Path) -> None:
    refusal = call("train", "--resume", staged, "--config", written(tmp_path, FOREST)).refusal
    assert "--config cannot be given with --resume" in refusal


def test_a_run_is_taught_by_another(tiny: list[str], staged: Path, call: Any, tmp_path: Path) -> None:
    """Its own settings stay: the teacher has two layers, the student four."""
    words = ["--partition", "2,2", "--objective", "distillation"]
    results = call("train", *tiny, *words, "--teacher", staged, "--out", tmp_path / "run", "--json").json
    assert results["finished"]
    assert settings(tmp_path / "run").topology.teacher == str(staged)
    refusal = call("train", *tiny, *words, "--out", tmp_path / "other").refusal
    assert "needs a teacher; give the folder of a run" in refusal
    refusal = call("train", *tiny, *words, "--teacher", tmp_path, "--out", tmp_path / "other").refusal
    assert "is not a run" in refusal


# The contract.


def test_a_residual_run_predicts_by_its_sum(tiny: list[str], call: Any, tmp_path: Path) -> None:
    words = ["--partition", "2,2", "--objective", "residual", "--stage-heads", "per-stage", "--seed", "1"]
    bpb = call("train", *tiny, *words, "--out", tmp_path / "run", "--json").json["bpb"]
    assert bpb["prediction"] == bpb["sum"] == bpb["prefix"][-1]
    assert bpb["prediction"] != bpb["last"] == bpb["stages"][-1], "D1"


@pytest.mark.parametrize("name", ["ddc-adam", "ddc-muon", "adamw", "sgd"])
def test_an_optimizer_by_name(name: str, tiny: list[str], call: Any, tmp_path: Path) -> None:
    words = ["--partition", "2,2", "--optimizer.name", name, "--out", tmp_path / "run", "--json"]
    assert call("train", *tiny, *words).json["finished"]
    assert settings(tmp_path / "run").optimizer.name == name


def test_flags_for_a_forest(tiny: list[str], call: Any, tmp_path: Path) -> None:
    words = ["--graph", "forest", "--branches", "2", "1,1", "--out", tmp_path / "run", "--json"]
    results = call("train", *tiny, *words).json
    assert len(results["bpb"]["prefix"]) == 3
    refusal = call("train", *tiny, "--graph", "forest", "--partition", "2,2").refusal
    assert "--partition is '2,2' and graph is forest, which does not use it" in refusal
