"""Damage of what lies beside a run: draft stages, calibrations, int8 weights, routers, sets of ranks, ONNX,
and the work of trainings that were stopped."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from damages import damage, digest, files_of
from retrofits import retrofitted_copy
from topograd.convert.draft_training import DraftTask, DraftTraining
from topograd.convert.export import export_model
from topograd.convert.own_text import OwnTextConfig
from topograd.convert.retrofit import RetrofitConfig, retrofit
from topograd.decode.model import Model
from topograd.errors import RunError
from topograd.files import dump_toml
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, open_session
from topograd.runtime.onnx_runtime import OnnxRuntime
from topograd.runtime.quantize import save_weights, weights_file
from topograd.specialists.attach import Attached, attach, new_specialist
from topograd.specialists.router import RouterTask, open_routed, save_router, train_router
from topograd.training.runs import resume
from topograd.training.trainer import Schedule, StepRecord
from waiting import LIMIT

Count = Callable[[str, str], None]


def stop_at(task: type[Any], last: int, patch: pytest.MonkeyPatch) -> None:
    """From here on, a task is told to end (SIGTERM) at a step: it saves, and its caller has no result."""
    step = task.step

    def stopped(self: Any, number: int) -> StepRecord:
        if number == last:
            signal.raise_signal(signal.SIGTERM)
        found: StepRecord = step(self, number)
        return found

    patch.setattr(task, "step", stopped)


def test_a_draft_stage_and_a_calibration(straight: Run, count: Count, times: int, tmp_path: Path) -> None:
    folder = retrofitted_copy(straight.folder, tmp_path / "run")

    def used(copy: Path) -> Any:
        model = Model(open_session(copy))
        return [str(model.generate([5, 6], 6, depth=depth)) for depth in ("speculate", "wand", "prefix:1")]

    own = [file for file in files_of(folder) if file.parts[0] in ("draft", "calibration.json")]
    assert len(own) == 4
    damage(folder, used, "draft stage and calibration", count, 6 * times, tmp_path, own)


def test_int8_weights(straight: Run, count: Count, times: int, tmp_path: Path) -> None:
    """A flip of one bit of a code would be another model."""
    folder = Path(shutil.copytree(straight.folder, tmp_path / "run"))
    model = Model(open_session(folder), "onnx", weights="int8")
    assert isinstance(model.engine.runtime, OnnxRuntime)
    file = weights_file(folder, "int8")
    model.generate([5, 6], 2)
    save_weights(file, model.engine.runtime.made, "int8", model.session.weights)

    def used(copy: Path) -> Any:
        loaded = Model(open_session(copy), "onnx", weights="int8")
        return loaded.logits([[5, 6]]).tolist()

    damage(folder, used, "int8 weights", count, 30 * times, tmp_path, [file.relative_to(folder)])


def test_an_onnx_export(straight: Run, count: Count, times: int, tmp_path: Path) -> None:
    """Its script needs nothing of topograd; it says itself what is wrong."""
    onnxruntime = pytest.importorskip("onnxruntime")
    export_model(straight.folder, tmp_path / "out", "onnx")
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False  # this process has a pool already
    session = partial(onnxruntime.InferenceSession, sess_options=options)

    def used(copy: Path) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["run.py"])
            patch.setattr(onnxruntime, "InferenceSession", session)
            try:
                made = runpy.run_path(str(copy / "run.py"))
                return made["same"], [*made["Row"]([5, 6]).write(4, [1e9])]
            except SystemExit as problem:
                raise RunError(str(problem)) from None

    files = [file for file in files_of(tmp_path / "out") if file.name not in ("run.py", "README.md")]
    assert len(files) >= 7
    damage(tmp_path / "out", used, "ONNX export", count, 3 * times, tmp_path, files)


@pytest.fixture(scope="module")
def ranks(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that was stopped in the middle: each checkpoint is a set of files."""
    place = tmp_path_factory.mktemp("ranks")
    (place / "config.toml").write_text(dump_toml(replace(config, eval_every=0).as_dict()))
    words = ["--config", place / "config.toml", "--out", place / "run", "--parallel", "stages=2"]
    command = [sys.executable, "-m", "topograd", "train", *map(str, words), "--stop-after", "6"]
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the job's store may listen there too
        held.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
        shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        started = [
            subprocess.Popen(
                command, env=os.environ | shared | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        said = [process.communicate(timeout=LIMIT)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    return place / "run"


def test_a_set_of_ranks(ranks: Path, count: Count, times: int, tmp_path: Path) -> None:
    sets = [file for file in files_of(ranks) if file.parts[0] == "checkpoints"]
    assert sum(file.suffix == ".safetensors" for file in sets) >= 2

    def resumed(folder: Path) -> str:
        trainer = resume(folder)
        trainer.train(stop_after=8)
        return digest(dict(trainer.task.stack.state_dict()))

    damage(ranks, resumed, "set of ranks", count, 6 * times, tmp_path, sets)


DRAFTS = RetrofitConfig(
    tokens=256, vocabulary=64, text=OwnTextConfig(length=16, rows=8), training=DraftTraining(epochs=1)
)


def test_the_work_of_a_stopped_retrofit(gpt: LoadedTextRun, count: Count, times: int, tmp_path: Path) -> None:
    """Own text and the checkpoint of the stage's training."""
    text = tmp_path / "text"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(DraftTask, 4, patch)
        with pytest.raises(KeyboardInterrupt):
            retrofit(gpt, tmp_path / "draft", DRAFTS, text=text)

    def finished(folder: Path) -> Any:
        shutil.rmtree(tmp_path / "draft", ignore_errors=True)
        found = retrofit(gpt, tmp_path / "draft", DRAFTS, text=folder)
        return {key: found[key] for key in ("agreement", "chain", "table", "coverage", "tokens")}

    damage(text, finished, "stopped retrofit", count, 4 * times, tmp_path)


@pytest.fixture(scope="module")
def specialists(gpt: LoadedTextRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Attached, Any]:
    folder = tmp_path_factory.mktemp("specialists") / "s"
    adapters = {"s": new_specialist(folder, gpt, layers=1, head_rank=4)}
    return folder, attach(gpt, adapters), adapters


def rows_to_route() -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randint(0, 256, (12, 12), generator=torch.Generator().manual_seed(0))
    return [(inputs, inputs.roll(-1, 1))]


def test_a_router(
    gpt: LoadedTextRun,
    specialists: tuple[Path, Attached, Any],
    count: Count,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, attached, adapters = specialists
    monkeypatch.setattr("topograd.specialists.router.STEPS", 6)
    router, found = train_router(attached, rows_to_route())
    save_router(tmp_path / "r", attached, adapters, router, found)

    def used(copy: Path) -> Any:
        model = open_routed(gpt.run.folder, str(folder), copy)
        return str(model.generate([5, 6], 4)), digest(dict(model.router.state_dict()))

    damage(tmp_path / "r", used, "router", count, 8 * times, tmp_path)


def test_the_work_of_a_stopped_router(
    specialists: tuple[Path, Attached, Any],
    count: Count,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("topograd.specialists.router.Schedule", partial(Schedule, save_every=2))
    monkeypatch.setattr("topograd.specialists.router.STEPS", 6)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(RouterTask, 4, patch)
        with pytest.raises(KeyboardInterrupt):
            train_router(specialists[1], rows_to_route(), work=tmp_path / "work")

    def finished(copy: Path) -> str:
        return digest(dict(train_router(specialists[1], rows_to_route(), work=copy)[0].state_dict()))

    damage(tmp_path / "work", finished, "stopped router", count, 4 * times, tmp_path)
