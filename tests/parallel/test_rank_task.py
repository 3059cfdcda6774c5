"""A run on several ranks is a run like any other: printed once, evaluated, resumed, decoded, killed."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from topograd.decode.model import load
from topograd.files import dump_toml
from topograd.parallel.consolidate import consolidate_run
from topograd.runs.config import TrainConfig
from topograd.runs.delta_store import DeltaStore
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, heldout_text, open_session
from topograd.training.evaluation import evaluate
from topograd.training.runs import resume, start
from waiting import wait_until

TWO = "stages=2,timeout=300"


def _saved(folder: Path) -> list[Path]:
    return list((folder / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def settings(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("settings") / "config.toml"
    file.write_text(dump_toml(replace(config, eval_every=0).as_dict()))
    return file


@pytest.fixture(scope="module")
def train(launch: Any, settings: Path) -> Any:
    def start(folder: Path, *more: str, world: int = 2, parallel: str = TWO, **options: Any) -> Any:
        begin = ["--resume", str(folder)] if (folder / "config.toml").exists() else []
        begin = begin or ["--config", str(settings), "--out", str(folder)]
        argv = ["train", *begin, "--parallel", parallel, "--json", *more]
        return launch("cli", world, argv=argv, **options)

    return start


@pytest.fixture(scope="module")
def whole(train: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run on two ranks that nothing happened to, and its job."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    job = train(folder)
    assert job.results() == [0, 0]
    return folder, job


def losses(folder: Path) -> list[float]:
    return [loss for r in Run.open(folder).metrics() if r["kind"] == "train" for loss in r["loss"]]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return open_session(folder).stack.state_dict()


def test_a_run_on_two_ranks_is_a_run(whole: tuple[Path, Any], straight: Run) -> None:
    folder, job = whole
    printed = json.loads(job.printed(0))
    assert job.printed(1) == ""
    assert printed["finished"]
    assert printed["steps"] == 20
    assert losses(folder) == pytest.approx(losses(straight.folder), abs=1e-4)  # float32, 20 steps
    session = open_session(folder)
    reading = evaluate(session.stack, session.plan, heldout_text(session))
    assert reading.bpb.prediction == pytest.approx(printed["bpb"]["prediction"], rel=1e-12)
    assert session.weights == printed["weights"]
    assert load(folder).generate("stage", 4)


def test_stopped_it_goes_on_in_another_number_of_processes(train: Any, tmp_path: Path, straight: Run) -> None:
    assert train(tmp_path / "two", "--stop-after", "9").results() == [0, 0]
    trainer = resume(tmp_path / "two")
    trainer.train(stop_after=13)
    assert losses(tmp_path / "two") == pytest.approx(losses(straight.folder)[:26], abs=1e-4)
    assert train(tmp_path / "two").results() == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(straight.folder), abs=1e-4)


@pytest.mark.covers("gpt", "resume", "parallel", feature="faults")
def test_a_killed_rank_ends_the_job_and_a_resumed_one_is_bit_identical(
    train: Any, whole: tuple[Path, Any], tmp_path: Path
) -> None:
    expected = weights(whole[0])
    for victim in (0, 1):
        folder, gate = tmp_path / f"killed-{victim}", tmp_path / f"gate-{victim}"
        job = train(folder, gate=(5, str(gate)))
        wait_until(partial(_saved, folder), "the first checkpoint")
        job.kill(victim)
        gate.touch()  # the other one may have come to it already
        found = job.wait()
        assert (found[victim], found[1 - victim]) == (None, 2), job.said()
        assert " is gone: " in job.printed(1 - victim, "err")
        assert train(folder).results() == [0, 0]
        assert losses(folder) == losses(whole[0])
        for name, tensor in weights(folder).items():
            assert torch.equal(tensor, expected[name]), name


EDGES = {
    "thin": ("--grad-bits", "4"),
    "late": ("--grad-delay", "1"),
    "both": ("--grad-delay", "2", "--grad-bits", "8", "--accumulate", "2"),
}


@pytest.mark.parametrize("kind", EDGES)
def test_gradient_between_ranks_has_the_losses_of_one_process_and_resumes_anywhere(
    kind: str, train: Any, settings: Path, config: TrainConfig, tmp_path: Path
) -> None:
    flags = ["--partition", "1,1", "--grad-scale", "1", *EDGES[kind], "--steps", "8", "--save-every", "0"]
    words = {flag.removeprefix("--").replace("-", "_"): int(value) for flag, value in _pairs(EDGES[kind])}
    plain = replace(config, eval_every=0).changed(partition="1,1", grad_scale=1.0, steps=8, **words)
    start(plain, tmp_path / "one").train()
    assert train(tmp_path / "two", *flags).results() == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)  # float32
    parts = tmp_path / "parts"
    assert train(parts, *flags, "--stop-after", "3").results() == [0, 0]
    assert train(parts).results() == [0, 0]
    assert losses(parts) == losses(tmp_path / "two")
    for name, tensor in weights(parts).items():
        assert torch.equal(tensor, weights(tmp_path / "two")[name]), name
    moved = tmp_path / "moved"
    assert train(moved, *flags, "--stop-after", "3").results() == [0, 0]
    resume(moved).train(stop_after=5)
    assert train(moved).results() == [0, 0]
    assert losses(moved) == pytest.approx(losses(tmp_path / "one"), abs=1e-4)


def test_late_batches_of_replicas_are_learned_from_by_fewer_and_by_more(
    train: Any, config: TrainConfig, tmp_path: Path
) -> None:
    """With one batch a step each of two replicas has half of it: their late batches have other sizes and
    numbers than those of a run without replicas."""
    chain: dict[str, Any] = {"partition": "1,1,1,1", "grad_scale": 1.0, "grad_delay": 1, "batch": 4}
    plain = config.changed(model=config.gpt.changed(layers=4), eval_every=0, steps=9, **chain)
    start(plain, tmp_path / "one").train()
    flags = [word for name, value in chain.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--model.layers", "4", "--steps", "9", "--save-every", "0", "--stop-after", "4"]
    four: dict[str, Any] = {"world": 4, "parallel": "stages=2,replicas=2,timeout=300"}
    fewer, more = tmp_path / "fewer", tmp_path / "more"
    assert train(fewer, *flags, **four).results() == [0] * 4
    resume(fewer).train(stop_after=6)
    assert train(fewer).results() == [0, 0]
    assert train(more, *flags).results() == [0, 0]
    assert train(more, **four).results() == [0] * 4
    for folder in (fewer, more):
        assert losses(folder) == pytest.approx(losses(tmp_path / "one"), abs=1e-4)


def _pairs(words: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("kind", EDGES)
def test_a_rank_that_is_killed_while_gradient_is_awaited_ends_the_job(
    kind: str, train: Any, tmp_path: Path
) -> None:
    """Within a step all ranks go on together, late or not: the others end with a line, and resume."""
    flags = ["--partition", "1,1", "--grad-scale", "1", *EDGES[kind], "--steps", "8", "--save-every", "2"]
    assert train(tmp_path / "whole", *flags).results() == [0, 0]
    folder, gate = tmp_path / "killed", tmp_path / "gate"
    job = train(folder, *flags, gate=(5, str(gate)))
    wait_until(partial(_saved, folder), "the first checkpoint")
    job.kill(1)
    gate.touch()
    assert job.wait() == [2, None], job.said()
    assert " is gone: " in job.printed(0, "err")
    assert train(folder).results() == [0, 0]
    assert losses(folder) == losses(tmp_path / "whole")


SCANNED = ["--backward", "scan", "--model.layers", "4", "--partition", "1,1,2", "--interface"]
BAD: dict[str, Any] = {
    "world": ({"world": 3}, "3 processes were started, and --parallel stages=2 needs 2"),
    "stages": ({"parallel": "stages=4", "world": 4}, "stages is 4; it must be at most 2"),
    "geometry": ({"more": ["--geometry-every", "2"]}, "--geometry-every is 2"),
    "partition": ({"more": ["--partition", "2,3"]}, "--partition 2,3 has 5 layers and the model has 2"),
    "ranks": ({"more": [*SCANNED, "residual:r=4/8"]}, "it must be the same at every boundary"),
    "pullback": ({"more": [*SCANNED, "residual:r=4", "--jacobian", "pullback"]}, "it knows segments only"),
    "carried": ({"more": [*SCANNED, "S=4,r=4", "--backward", "hybrid", "--carried", "3"]}, "--carried is 3"),
    "teacher": ({"more": ["--objective", "distillation", "--teacher", "self"]}, "trains in one process"),
    "words": ({"parallel": "stages=2,speed=9"}, "'speed=9'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_from_one_rank(name: str, train: Any, tmp_path: Path) -> None:
    given, line = BAD[name]
    given = dict(given)
    job = train(tmp_path / "run", *given.pop("more", ()), **given)
    results = job.wait()
    said = [job.printed(rank, "err") for rank in job.pids]
    lines = [text for text in said if text.strip()]
    assert len(lines) == 1, said
    assert line in lines[0]
    assert lines[0].count("\n") == 1
    assert all(code in (2, None) for code in results)
    assert not (tmp_path / "run" / "config.toml").exists()


def test_processes_that_were_started_without_parallel_are_one_line(
    launch: Any, settings: Path, tmp_path: Path
) -> None:
    job = launch("cli", 2, argv=["train", "--config", str(settings), "--out", str(tmp_path / "run")])
    assert job.wait() == [2, 2]
    assert job.printed(1, "err") == ""
    assert "2 processes were started, and --parallel is not given; add --parallel" in job.printed(0, "err")
    assert not (tmp_path / "run").exists()


def test_ranks_that_disagree_are_told_which_setting(launch: Any, settings: Path, tmp_path: Path) -> None:
    argv = ["train", "--config", str(settings), "--out", str(tmp_path / "run"), "--parallel", TWO]
    first = launch("cli", 2, ranks=[0], argv=argv)
    port = first.held.getsockname()[1]
    second = launch("cli", 2, ranks=[1], port=port, argv=[*argv, "--seed", "7"])
    assert first.wait() == [2]
    second.wait()
    assert "rank 1 has seed = 7 and rank 0 has 1" in first.printed(0, "err")
    assert second.printed(1, "err") == ""


def test_a_late_rank_does_not_mistake_what_rank_0_tidies_for_another_process(
    train: Any, launch: Any, tmp_path: Path
) -> None:
    """A kill within the save of a step that was there already leaves that one aside; rank 0 puts it back."""
    folder = tmp_path / "run"
    assert train(folder, "--stop-after", "4").results() == [0, 0]
    saved = folder / "checkpoints" / "step-00000004"
    saved.rename(saved.with_name(f".old-{saved.name}"))
    argv = ["train", "--resume", str(folder), "--parallel", TWO, "--stop-after", "4"]
    job = launch("cli_with_a_late_rank", 2, argv=argv, rank=1, gone=".old-*")
    assert job.results() == [0, 0], job.said()
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_full_disk_leaves_the_last_set_whole(train: Any, launch: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(folder, "--stop-after", "4").results() == [0, 0]
    argv = ["train", "--resume", str(folder), "--parallel", TWO, "--json"]
    job = launch("cli_with_small_files", 2, argv=argv, rank=1)
    job.wait()
    assert "cannot save" in job.printed(0, "err")
    assert "make room and resume" in job.printed(0, "err")
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-00000004"]
    assert open_session(folder).step == 4


@pytest.mark.covers("gpt", "parallel", feature="interfaces")
def test_regions_on_replicas_have_the_losses_of_one_process(
    train: Any, config: TrainConfig, tmp_path: Path
) -> None:
    """With the settings of Jacobians and of recomputation, which reach every rank; resumed bit for bit."""
    flags = ["--model.layers", "4", "--partition", "1,1,1,1", "--interface", "S=4,r=4", "--accumulate", "2"]
    flags += ["--steps", "6", "--save-every", "0"]
    scan = [*flags, "--backward", "scan", "--jacobian", "pullback", "--jacobian-chunk", "2", "--recompute"]
    parallel = {"world": 4, "parallel": "stages=2,replicas=2,timeout=300"}
    plain = config.changed(model=config.gpt.changed(layers=4), partition="1,1,1,1", interface="S=4,r=4")
    start(plain.changed(accumulate=2, steps=6, eval_every=0), tmp_path / "one").train()
    assert train(tmp_path / "four", *scan, **parallel).results() == [0] * 4
    assert train(tmp_path / "parts", *scan, "--stop-after", "2", **parallel).results() == [0] * 4
    assert train(tmp_path / "parts", **parallel).results() == [0] * 4
    assert losses(tmp_path / "parts") == losses(tmp_path / "four")
    assert len(losses(tmp_path / "four")) == 6
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)  # float32


TUNED: dict[str, dict[str, Any]] = {
    "cut": {},
    "thin": {"grad_scale": 1.0, "grad_bits": 4, "weights": (0.0, 1.0)},
    "late": {"grad_scale": 1.0, "grad_delay": 1, "weights": (0.0, 1.0)},
}


@pytest.mark.covers("imported", "parallel", feature="lora")
@pytest.mark.parametrize("edge", TUNED)
def test_a_part_of_a_model_learns_on_two_ranks(
    edge: str, imported: LoadedTextRun, corpus: Path, launch: Any, tmp_path: Path
) -> None:
    """LoRA on a frozen model: losses, checkpoints, evaluation and resumption of one process."""
    config = imported.config.changed(init=str(imported.run.folder), data=str(corpus), partition="2,2")
    config = config.changed(steps=4, batch=2, accumulate=2, eval_every=0, eval_bytes=300, **TUNED[edge])
    config = replace(config, tune=replace(config.tune, lora_rank=2))
    results = start(config, tmp_path / "one").train()
    file = tmp_path / "config.toml"
    file.write_text(dump_toml(config.as_dict()))
    ways = {"two": ["--config", str(file)], "again": ["--config", str(file), "--stop-after", "2"]}
    for name, words in ways.items():
        argv = ["train", *words, "--out", str(tmp_path / name), "--parallel", TWO, "--json"]
        job = launch("cli", 2, argv=argv)
        assert job.results() == [0, 0], job.said()
        printed = json.loads(job.printed(0))
        if name == "two":
            assert printed["bpb"]["prediction"] == pytest.approx(results["bpb"]["prediction"], rel=1e-5)
    argv = ["train", "--resume", str(tmp_path / "again"), "--parallel", TWO, "--json"]
    assert launch("cli", 2, argv=argv).results() == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4, nan_ok=True)
    stores = {name: Run.open(tmp_path / name).store for name in ("one", "two", "again")}
    assert all(isinstance(store, DeltaStore) for store in stores.values())
    own = {name: store.own_tensors(store.names()[-1]) for name, store in stores.items()}  # type: ignore[attr-defined]
    assert own["one"].keys() == own["two"].keys()
    assert all("lora" in name for name in own["two"])
    for name, tensor in own["two"].items():
        assert torch.allclose(tensor, own["one"][name], rtol=1e-3, atol=1e-6), name
        assert torch.equal(tensor, own["again"][name]), name
    consolidate_run(tmp_path / "two")
    assert weights(tmp_path / "two").keys() == weights(tmp_path / "again").keys()
    for name, tensor in weights(tmp_path / "two").items():
        assert torch.equal(tensor, weights(tmp_path / "again")[name]), name


def test_old_text_is_read_in_one_process(
    imported: LoadedTextRun, corpus: Path, launch: Any, tmp_path: Path
) -> None:
    argv = ["train", "--init", str(imported.run.folder), "--data", str(corpus), "--lora-rank", "2"]
    argv += ["--old-text", str(corpus), "--partition", "2,2", "--steps", "2", "--parallel", TWO]
    job = launch("cli", 2, argv=[*argv, "--out", str(tmp_path / "run")])
    assert job.results() == [2, 2]
    assert "--old-text is" in job.said()
    assert not (tmp_path / "run").exists()
