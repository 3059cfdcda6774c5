"""An exported run: bfloat16 on the disk, float32 once loaded, the same measurements, and no more training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from papers.export_run import export
from raising import refused
from topograd.cli.main import main
from topograd.errors import CheckpointError, RunError
from topograd.runs.folder import Run
from topograd.runs.session import heldout_text, open_session
from topograd.training.evaluation import evaluate
from topograd.training.runs import resume

STEP = "step-00000020"


@pytest.fixture(scope="module")
def exported(straight: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(straight.folder, tmp_path_factory.mktemp("export") / "deep" / "run")


def test_the_weights_are_bfloat16_and_there_is_no_optimizer(straight: Run, exported: Path) -> None:
    weights = load_file(exported / "checkpoints" / STEP / "model.safetensors")
    before = load_file(straight.checkpoints / STEP / "model.safetensors")
    assert weights.keys() == before.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, before[name].to(torch.bfloat16)), name
    assert load_file(exported / "checkpoints" / STEP / "optimizer.safetensors").keys() == {"rng"}
    state = json.loads((exported / "checkpoints" / STEP / "state.json").read_text())
    assert (state["step"], state["optimizers"]) == (20, {})
    assert [path.name for path in (exported / "checkpoints").iterdir()] == [STEP]


def test_the_rest_is_as_it_was(straight: Run, exported: Path) -> None:
    for name in ("config.toml", "metrics.jsonl", "tokenizer.json"):
        assert (exported / name).read_bytes() == (straight.folder / name).read_bytes()
    found, before = Run.open(exported).read_results(), straight.read_results()
    assert found is not None
    assert before is not None
    assert found.pop("weights") == Run.open(exported).store.weights(STEP) != before.pop("weights")
    assert found == before
    kinds = {tensor.dtype for tensor in load_file(straight.checkpoints / STEP / "model.safetensors").values()}
    assert kinds == {torch.float32}, "the run itself is not changed"


def test_once_loaded_it_is_float32_rounded_to_bfloat16(straight: Run, exported: Path) -> None:
    session, before = open_session(exported), open_session(straight.folder)
    assert session.step == before.step == 20
    changed = 0
    for (name, one), two in zip(session.stack.named_parameters(), before.stack.parameters(), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, two.to(torch.bfloat16).float()), name
        changed += int((one != two).sum())
    assert changed > 0, "weights that are bfloat16 anyhow would show nothing"


def test_it_measures_almost_the_same(straight: Run, exported: Path) -> None:
    found, before = (
        evaluate(session.stack, session.plan, heldout_text(session)).bpb
        for session in map(open_session, (exported, straight.folder))
    )
    assert found.prefix == pytest.approx(before.prefix, rel=0.01)
    assert found != before


def test_an_export_of_an_export_is_the_same(exported: Path, tmp_path: Path) -> None:
    again = export(exported, tmp_path / "again")
    first, second = (load_file(f / "checkpoints" / STEP / "model.safetensors") for f in (exported, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_it_cannot_be_trained_further(exported: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        resume(exported)
    said = str(caught.value)
    assert "\n" not in said
    assert STEP in said
    assert "bfloat16" in said
    assert "train again in another folder" in said


def test_what_the_command_line_says_of_training_it(
    exported: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(exported, tmp_path / "run")
    assert main(["train", "--resume", str(folder), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["steps"] == 20, "it is finished: there is nothing to train"
    for words in (["--from", STEP], []):
        (folder / "results.json").unlink(missing_ok=True)
        assert main(["train", "--resume", str(folder), *words]) == 2
        said = capfd.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        assert "bfloat16" in said.err


@pytest.mark.parametrize("kind", ["folder", "run", "file"])
def test_a_target_that_exists_is_refused(straight: Run, exported: Path, tmp_path: Path, kind: str) -> None:
    target = {"folder": tmp_path, "run": exported, "file": tmp_path / "file"}[kind]
    (tmp_path / "file").write_text("kept")
    with refused(RunError, setting="target"):
        export(straight.folder, target)
    assert (tmp_path / "file").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_no_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with refused(RunError, setting="folder"):
        export(tmp_path / "nowhere", tmp_path / "target")
    assert not any(tmp_path.iterdir())
