import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from topograd.runs.config import PRESETS, VERSION, TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import open_session
from topograd.training.runs import start
from waiting import LIMIT, wait_until

KEYS = {"run", "steps", "bpb", "ece", "reliability", "effective_rank", "usefulness", "tokens", "bytes"}


def losses(folder: Path) -> list[tuple[int, list[float]]]:
    return [(r["step"], r["loss"]) for r in Run.open(folder).metrics() if r["kind"] == "train"]


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """The time and the bytes of each file of a run."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_the_results_are_one_json_object(staged: Path, call: Any) -> None:
    results = json.loads((staged / "results.json").read_text())
    assert results.keys() == KEYS | {"finished", "seconds", "weights"}
    bpb = results["bpb"]
    assert bpb.keys() == {"prediction", "prefix", "stages", "last", "sum", "mean", "shrinkage"}
    assert len(bpb["prefix"]) == len(results["ece"]) == 2
    assert bpb["prediction"] == bpb["last"] == bpb["prefix"][-1] == bpb["stages"][-1]
    assert results["weights"] == open_session(staged).weights
    assert (results["run"], results["steps"], results["finished"]) == (str(staged), 12, True)


def test_stopped_resumed_and_resumed_again(staged: Path, size: list[str], call: Any, tmp_path: Path) -> None:
    words = ["--partition", "1,1", "--steps", "12", "--save-every", "5", "--eval-every", "6", "--seed", "1"]
    stopped = call("train", *size, *words, "--out", tmp_path / "run", "--stop-after", 7, "--json")
    assert (stopped.json["steps"], stopped.json["finished"]) == (7, False)
    assert f"continue with: topograd train --resume {tmp_path / 'run'}" in stopped.err
    resumed = call("train", "--resume", tmp_path / "run", "--json")
    assert resumed.json["finished"]
    assert losses(tmp_path / "run") == losses(staged)
    recorded = json.loads((staged / "results.json").read_text())
    assert resumed.json["bpb"] == recorded["bpb"]
    before = everything(tmp_path / "run")
    again = call("train", "--resume", tmp_path / "run", "--json")
    assert again.json == resumed.json
    assert everything(tmp_path / "run") == before, "a finished run is only read"


@pytest.mark.parametrize("stop_after", [3, 7])
def test_a_run_past_stop_after_says_that_nothing_was_trained(
    staged: Path, size: list[str], call: Any, tmp_path: Path, stop_after: int
) -> None:
    folder = tmp_path / "run"
    words = ["--partition", "1,1", "--steps", "12", "--eval-every", "6"]
    call("train", *size, *words, "--out", folder, "--stop-after", 7, "--json")
    before = losses(folder)
    again = call("train", "--resume", folder, "--stop-after", stop_after, "--json")
    assert (again.code, again.json["steps"], losses(folder)) == (0, 7, before)
    assert (
        f"nothing was trained: it is at step 7 of 12 already, and --stop-after is {stop_after}" in again.err
    )
    assert f"continue with: topograd train --resume {folder}" in again.err
    assert "stopped and saved" not in again.err
    onwards = call("train", "--resume", folder, "--stop-after", 8, "--json")
    assert "stopped and saved at step 8 of 12" in onwards.err


def test_a_run_that_was_moved_knows_its_new_place(staged: Path, call: Any, tmp_path: Path) -> None:
    copy = shutil.copytree(staged, tmp_path / "elsewhere")
    assert call("train", "--resume", copy, "--json").json["run"] == str(copy)


def test_a_finished_run_with_a_damaged_checkpoint_is_refused(staged: Path, call: Any, tmp_path: Path) -> None:
    run = shutil.copytree(staged, tmp_path / "run")
    weights = run / "checkpoints" / "step-00000012" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "step-00000012 is damaged" in call("train", "--resume", run, "--json").refusal


def test_a_finished_run_without_results_is_measured_again(staged: Path, call: Any, tmp_path: Path) -> None:
    copy = shutil.copytree(staged, tmp_path / "run")
    recorded = json.loads((copy / "results.json").read_text())
    (copy / "results.json").write_text("{")
    refusal = call("train", "--resume", copy, "--json").refusal
    assert "results.json is not the file that this run wrote; delete it" in refusal
    (copy / "results.json").unlink()
    results = call("train", "--resume", copy, "--json").json
    assert results["bpb"] == recorded["bpb"]
    assert results["finished"]


def test_from_a_named_checkpoint(staged: Path, call: Any, tmp_path: Path) -> None:
    copy = shutil.copytree(staged, tmp_path / "run")
    os.truncate(copy / "checkpoints" / "step-00000012" / "model.safetensors", 100)
    (copy / "results.json").unlink()
    why = call("train", "--resume", copy).refusal
    assert "step-00000012 is damaged" in why
    assert "resume with --from step-00000010" in why
    assert call("train", "--resume", copy, "--from", "step-00000010", "--json").json["steps"] == 12
    assert losses(copy) == losses(staged)
    part = call("train", "--resume", copy, "--from", "step-00000010", "--stop-after", "11", "--json").json
    assert (part["steps"], part["finished"]) == (11, False)
    assert call("train", "--resume", copy, "--json").json["steps"] == 12, "old results do not count any more"
    assert losses(copy) == losses(staged)


def test_a_table_for_people(staged: Path, call: Any) -> None:
    answer = call("train", "--resume", staged)
    assert answer.code == 0
    for words in ("step 12 of 12", "stages 1..1, 1 layers", "sum of all stages", "BPB", "ECE"):
        assert words in answer.out


def test_without_out_a_fresh_folder_is_named_after_the_run(
    size: list[str], call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--partition", "1,1", "--steps", "1", "--seed", "7", "--json"]
    folders = [call("train", *size, *words).json["run"] for _ in range(2)]
    assert folders == ["runs/tiny-1-1-s7", "runs/tiny-1-1-s7-2"]
    answer = call("train", *size, "--steps", "1", "--json")
    assert answer.json["run"] == "runs/tiny-2-s0"


def test_flags_override_the_preset_and_reach_the_run(size: list[str], call: Any, tmp_path: Path) -> None:
    words = (
        "--steps 1 --partition 1,1 --stage-heads per-stage --objective residual --bus detached "
        "--reduction sum --optimizer.lr-matrix 0.05 --optimizer.clip 1.5 --optimizer.betas 0.7 0.8 "
        "--model.windows 4 0 --model.no-smear --model.mlp swiglu --accumulate 2 --bf16"
    )
    assert call("train", *size, *words.split(), "--out", tmp_path / "run").code == 0
    config = TrainConfig.from_dict(Run.open(tmp_path / "run").read_config())
    table = config.topology
    assert (table.partition, table.heads, table.objective) == ("1,1", "per-stage", "residual")
    assert (table.bus, table.reduction) == ("detached", "sum")
    assert (config.optimizer.lr_matrix, config.optimizer.clip, config.optimizer.betas) == (
        0.05,
        1.5,
        (0.7, 0.8),
    )
    assert (config.gpt.windows, config.gpt.smear, config.gpt.mlp) == ((4, 0), False, "swiglu")
    assert (config.accumulate, config.bf16) == (2, True)
    assert config.save_every == PRESETS["tiny"]().save_every, "the rest is the preset's"


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_sets_the_defaults(name: str, call: Any) -> None:
    help_text = call("train", "--preset", name, "--help").out
    assert f"Length of the schedule. (default: {PRESETS[name]().steps})" in " ".join(
        help_text.replace("│", " ").split()
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--preset huge", "--preset is 'huge'; it must be one of tiny, small, base"),
        ("--preset", "--preset has no value"),
        ("--steps x", "--steps is 'x'; it must be a whole number"),
        ("--steps 0", "--steps is 0; it must be at least 1"),
        ("--stpes 3", "(did you mean --steps?)"),
        ("--lr-matrix 0.1", "(did you mean --optimizer.lr-matrix?)"),
        ("tiny", "Unrecognized options: tiny"),
        ("--partition 3,3", "partition 3,3 has 6 layers and the model has 2; give parts that add up to 2"),
        ("--partition 1,one", "part 2 is 'one'"),
        ("--model.width 15", "it must be a multiple of twice the 2 heads"),
        ("--model.mlp-ratio nan", "--model.mlp-ratio is 'nan'; it must be a finite number"),
        ("--optimizer.betas 2 0.5", "--optimizer.betas is (2.0, 0.5)"),
        ("--optimizer.lr-matrix -1", "--optimizer.lr-matrix is -1.0"),
        ("--optimizer.momentum 2", "--optimizer.momentum is 2.0; it must be in 0 to below 1"),
        ("--seed 99999999999999999999", "below 2^63"),
        ("--device abacus", "device 'abacus' cannot be used"),
        ("--data nowhere.txt", "does not exist"),
        ("--model.context 9000", "too short for one sequence of 9001"),
        ("--tokenizer bpe --model.vocab 20", "a vocabulary of 20 is too small"),
        ("--stop-after 0", "--stop-after is 0"),
        ("--from step-00000001", "--from names a checkpoint of the run to --resume"),
    ],
)
def test_bad_settings_are_one_line_and_leave_no_run(
    words: str, why: str, size: list[str], call: Any, tmp_path: Path
) -> None:
    answer = call("train", *size, *words.split(), "--out", tmp_path / "run")
    assert why in answer.refusal
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize(
    "flag", ["--steps=3", "--out x", "--preset tiny", "--model.width 8", "--stage_heads shared"]
)
def test_a_resumed_run_keeps_its_settings(flag: str, staged: Path, call: Any) -> None:
    why = call("train", "--resume", staged, *flag.split()).refusal
    name = flag.split("=")[0].split()[0].replace("_", "-")
    assert f"{name} cannot be given with --resume" in why


def test_folders_that_are_no_runs(staged: Path, size: list[str], call: Any, tmp_path: Path) -> None:
    assert "already holds a run; --resume it" in call("train", *size, "--out", staged).refusal
    assert "is not a run: it has no config.toml" in call("train", "--resume", tmp_path).refusal
    assert "it does not exist" in call("train", "--resume", tmp_path / "nowhere").refusal
    assert "has no checkpoint 'x'" in call("train", "--resume", staged, "--from", "x").refusal
    (tmp_path / "config.toml").write_text("steps = [")
    assert "is damaged" in call("train", "--resume", tmp_path).refusal


def test_a_changed_corpus_is_refused(corpus: Path, size: list[str], call: Any, tmp_path: Path) -> None:
    own = Path(shutil.copy(corpus, tmp_path / "own.txt"))
    words = ["--data", own, "--steps", "3", "--stop-after", "2", "--out", tmp_path / "run"]
    assert call("train", *size, *words).code == 0
    own.write_text("something else entirely " * 50)
    assert "the corpus has changed" in call("train", "--resume", tmp_path / "run").refusal


def test_files_that_cannot_be_read_are_named(
    corpus: Path, size: list[str], call: Any, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(corpus, tmp_path / "data" / "a.txt")
    (tmp_path / "data" / "b.bin").write_bytes(b"\0\1")
    shutil.copy(corpus, tmp_path / "data" / "c.txt")
    words = ["--data", tmp_path / "data", "--steps", "1", "--out", tmp_path / "run", "--json"]
    answer = call("train", *size, *words)
    assert answer.json["finished"]
    assert "not read: 'b.bin': not text" in answer.err


def test_ctrl_c_saves_and_says_how_to_go_on(size: list[str], tmp_path: Path) -> None:
    config = TrainConfig.from_dict(
        {
            "version": VERSION,
            "steps": 100_000,
            "save_every": 0,
            "tokenizer": "bytes",
            "eval_bytes": 300,
            "eval_every": 0,
            "batch": 2,
            "data": size[-1],
            "model": {"layers": 2, "width": 16, "heads": 2, "context": 16},
        }
    )
    run = start(config, tmp_path / "run").task.run
    command = [sys.executable, "-m", "topograd", "train", "--resume", str(run.folder), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(run.metrics_file.exists, "a step")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, err
    results = json.loads(out)
    assert not results["finished"]
    assert err.strip().splitlines()[-1] == (
        f"topograd: stopped and saved at step {results['steps']} of 100000; "
        f"continue with: topograd train --resume {run.folder}"
    )
    assert [path.name for path in run.checkpoints.iterdir()] == [f"step-{results['steps']:08d}"]
    assert losses(run.folder)[-1][0] == results["steps"]


def test_the_embedded_corpus(call: Any, tmp_path: Path) -> None:
    """The contract's own call, shorter."""
    words = ["--preset", "tiny", "--partition", "2,2", "--steps", "2", "--seed", "1", "--eval-bytes", "2000"]
    results = call("train", *words, "--model.width", "16", "--out", tmp_path / "run", "--json").json
    assert results["steps"] == 2
    assert 6 < results["bpb"]["last"] < 9, "two steps from the uniform distribution over 257 tokens"
    assert len(results["bpb"]["prefix"]) == 2
    assert call("eval", tmp_path / "run", "--json").json["bpb"] == results["bpb"]
