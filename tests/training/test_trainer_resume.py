"""A run can be stopped anywhere, in any way, and goes on as if nothing had happened."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raising import refused
from topograd.errors import CheckpointError, ConfigError, RunError
from topograd.runs import checkpoint
from topograd.runs.checkpoint import Checkpoint
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import open_session
from topograd.runs.workspace import Workspace
from topograd.training.runs import resume, start
from topograd.training.trainer import OnStep, Reading, Schedule, StepRecord, Task, Trainer, train_task

STEPS = 20


class Crash(Exception):
    """Stands for a kill between two steps: nothing is saved on the way out."""


def crash_at(step: int) -> OnStep:
    def on_step(now: int, steps: int, losses: list[float], reading: Reading | None) -> None:
        if now == step:
            raise Crash

    return on_step


def losses(run: Run) -> list[tuple[int, list[float]]]:
    return [(r["step"], r["loss"]) for r in run.metrics() if r["kind"] == "train"]


def readings(run: Run) -> list[tuple[int, dict[str, Any]]]:
    return [(r["step"], r["bpb"]) for r in run.metrics() if r["kind"] == "eval"]


def weights(run: Run, step: int = STEPS) -> str:
    file = run.checkpoints / f"step-{step:08d}" / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def assert_same(run: Run, expected: Run) -> None:
    """Every loss and every reading bit for bit, each step once, and the same weights."""
    assert losses(run) == losses(expected)
    assert [step for step, _ in losses(run)] == list(range(1, STEPS + 1))
    assert readings(run) == readings(expected)
    assert weights(run) == weights(expected)
    results = [json.loads(one.results_file.read_text()) for one in (run, expected)]
    assert results[0]["bpb"] == results[1]["bpb"]


@pytest.mark.parametrize("stop", [1, 9, 16, 19])
def test_stopped_and_resumed(stop: int, config: TrainConfig, straight: Run, tmp_path: Path) -> None:
    result = start(config, tmp_path / "run").train(stop_after=stop)
    assert (result["steps"], result["finished"]) == (stop, False)
    result = resume(tmp_path / "run").train()
    assert (result["steps"], result["finished"]) == (STEPS, True)
    assert_same(Run.open(tmp_path / "run"), straight)


@pytest.mark.parametrize("crashes", [(2,), (4, 5), (10, 11, 9, 18), (20,)])
def test_crashed_and_resumed(
    crashes: tuple[int, ...], config: TrainConfig, straight: Run, tmp_path: Path
) -> None:
    trainer = start(config, tmp_path / "run")
    for step in crashes:
        with pytest.raises(Crash):
            trainer.train(on_step=crash_at(step))
        with open(trainer.task.run.metrics_file, "a") as file:
            file.write('{"kind": "train", "st')  # as a kill within a write leaves it
        trainer = resume(tmp_path / "run")
    trainer.train()
    assert_same(trainer.task.run, straight)


def test_checkpoints_by_the_clock_change_nothing(config: TrainConfig, straight: Run, tmp_path: Path) -> None:
    """A step takes longer than a nanosecond, so each is saved; the hour of `straight` never comes."""
    trainer = start(replace(config, save_seconds=1e-9), tmp_path / "run")
    with pytest.raises(Crash):
        trainer.train(on_step=crash_at(11))
    trainer = resume(tmp_path / "run")
    assert trainer.step == 11
    steps = [int(name.rpartition("-")[2]) for name in trainer.task.run.store.names()]
    assert steps == [4, 8, 11], "those of the clock take no other one's place"
    trainer.train()
    assert_same(trainer.task.run, straight)
    assert trainer.task.run.store.names() == straight.store.names()
    with refused(ConfigError, setting="save_seconds", given=-1.0):
        replace(config, save_seconds=-1.0)


class Sum(Task):
    """One number that learns, with noise from torch's generator; `told` is the state beside it."""

    def __init__(self, steps: int = 6) -> None:
        super().__init__(Schedule(steps, save_every=2))
        torch.manual_seed(0)
        self.model = self.layer = torch.nn.Linear(1, 1)
        self.optimizers = {"sgd": torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)}
        self.key = {"steps": steps}
        self.told: list[int] = []

    def step(self, step: int) -> StepRecord:
        self.told.append(step)
        self.optimizers["sgd"].zero_grad()
        loss = (self.model(torch.randn(4, 1)) - 1).square().mean()
        loss.backward()
        self.optimizers["sgd"].step()
        return StepRecord([loss.item()])

    def extra_state(self) -> dict[str, Any]:
        return {"told": self.told}

    def load_extra(self, loaded: Checkpoint) -> None:
        self.told = loaded.extra["told"]


def test_any_task_is_trained_in_memory_or_resumed_in_a_folder(tmp_path: Path) -> None:
    memory, seen = Sum(), list[float]()
    train_task(memory, None, lambda step, of, losses, _: seen.extend(losses))
    with pytest.raises(Crash):
        train_task(Sum(), tmp_path, crash_at(5))
    resumed = Sum()
    train_task(resumed, tmp_path)
    assert [r["loss"][0] for r in Workspace(tmp_path).metrics()] == seen
    assert resumed.told == memory.told == list(range(6))
    assert torch.equal(resumed.layer.weight, memory.layer.weight)
    other = Sum(7)
    train_task(other, tmp_path)
    assert other.told == list(range(7)), "another key begins anew"
    with pytest.raises(RunError, match="belongs to a training with other settings or other data"):
        Trainer(Sum(), Workspace(tmp_path)).load("step-00000007")
    with pytest.raises(RunError, match="in use by another process"), Workspace(tmp_path).lock():
        train_task(Sum(7), tmp_path)


NURSERY = """
import os, signal, sys
from topograd.runs import checkpoint
from topograd.training.runs import resume

def train(after):
    sync = checkpoint.sync
    def stop_half_way(path):
        sync(path)
        if path.parent.name.startswith(".tmp-") and int(path.parent.name.split("-")[1]) > after:
            os.kill(os.getpid(), signal.SIGSTOP)
    checkpoint.sync = stop_half_way
    resume(sys.argv[1]).train()

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        train(int(line))
        os._exit(0)
    stopped = os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    print(stopped, flush=True)
    sys.stdin.readline()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
"""A process that has loaded torch once. For each line, a step, it forks one that trains; this one stops when
a checkpoint beyond that step has one of its files, and is killed there with the next line."""


def half_written(run: Run, after: int) -> bool:
    names = (name.split("-") for name in os.listdir(run.checkpoints) if name.startswith(".tmp-"))
    return any(int(parts[1]) > after for parts in names)


def test_killed_in_the_middle_of_a_save_and_resumed(
    config: TrainConfig, straight: Run, tmp_path: Path
) -> None:
    run = start(replace(config, save_every=1), tmp_path / "run").task.run
    command = [sys.executable, "-c", NURSERY, str(run.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for after in (1, 9):
            print(after, file=nursery.stdin, flush=True)
            assert nursery.stdout.readline() == "True\n", "it ended"
            assert half_written(run, after)
            assert losses(run)[-1][0] == after + 1
            print("kill", file=nursery.stdin, flush=True)
    resume(run.folder).train()
    assert not list(run.checkpoints.glob(".*")), "what the kills left is gone"
    assert_same(run, straight)


def test_an_interrupt_saves_and_the_handlers_come_back(
    config: TrainConfig, straight: Run, tmp_path: Path
) -> None:
    def interrupt(step: int, steps: int, losses: list[float], reading: Reading | None) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        if step == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    trainer = start(config, tmp_path / "run")
    for expected in (6, 13):
        result = trainer.train(on_step=interrupt)
        assert (result["steps"], result["finished"]) == (expected, False)
        assert (trainer.task.run.checkpoints / f"step-{expected:08d}").is_dir()
        trainer = resume(tmp_path / "run")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    trainer.train()
    assert_same(trainer.task.run, straight)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_stays_ignored(
    number: signal.Signals, config: TrainConfig, tmp_path: Path
) -> None:
    """As nohup and shells have it for jobs in the background: a Ctrl-C is meant for somebody else."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        trainer = start(replace(config, steps=3), tmp_path / "run")
        result = trainer.train(on_step=lambda *_: os.kill(os.getpid(), number))
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert (result["steps"], result["finished"]) == (3, True)


class Hammer:
    """Ctrl-C again and again: the first within step 6, the second within the save that follows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
        self.pressed = 0
        self.before = getattr(checkpoint, at)
        monkeypatch.setattr(checkpoint, at, self.during)

    def on_step(self, step: int, *_: object) -> None:
        if step == 6:
            self.press()

    def press(self) -> None:
        self.pressed += 1
        os.kill(os.getpid(), signal.SIGINT)

    def during(self, *arguments: Any) -> Any:
        result = self.before(*arguments)
        if self.pressed == 1:
            self.press()
        return result


@pytest.mark.parametrize("at", ["tensors_of", "_write", "put_in_place"])
def test_a_second_interrupt_ends_the_last_save_and_the_checkpoint_before_it_loads(
    at: str, config: TrainConfig, straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is impatient waits for no disk, and loses what was not saved, and nothing else."""
    trainer = start(config, tmp_path / "run")
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        hammer = Hammer(patch, at)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(on_step=hammer.on_step)
    assert hammer.pressed == 2
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    stands = 6 if at == "put_in_place" else 4
    assert open_session(tmp_path / "run").step == stands
    again = resume(tmp_path / "run")
    assert again.step == stands
    again.train()
    assert_same(again.task.run, straight)
    assert not list(again.task.run.checkpoints.glob(".*"))


def test_a_run_that_somebody_trained_on_meanwhile_is_not_taken_back(
    config: TrainConfig, straight: Run, tmp_path: Path
) -> None:
    """The checkpoint that was read is still there, so only a look at the others can tell (R11)."""
    start(replace(config, keep=9), tmp_path / "run").train(stop_after=5)
    slow, quick = resume(tmp_path / "run"), resume(tmp_path / "run")
    quick.train(stop_after=11)
    with pytest.raises(
        RunError, match=r"was trained on by another process while it was being opened; resume"
    ):
        slow.train()
    assert quick.task.run.store.names()[-1] == "step-00000011", "nothing was lost"
    quick.train(stop_after=13)
    resume(tmp_path / "run").train()
    assert losses(quick.task.run) == losses(straight)
    assert weights(quick.task.run) == weights(straight)


def test_a_new_run_that_somebody_trained_meanwhile_is_not_begun_again(
    config: TrainConfig, tmp_path: Path
) -> None:
    trainer = start(config, tmp_path / "run")
    resume(tmp_path / "run").train(stop_after=3)
    with pytest.raises(RunError, match="was trained on by another process"):
        trainer.train()


def test_a_run_that_begins_with_anothers_weights_begins_so_again(
    config: TrainConfig, straight: Run, tmp_path: Path
) -> None:
    """Killed before its first checkpoint, it is begun again from them and not from its seed."""
    chosen = replace(config, init=str(straight.folder), seed=5)
    trainer = start(chosen, tmp_path / "run")
    with pytest.raises(Crash):
        trainer.train(on_step=crash_at(2))
    again = resume(tmp_path / "run")
    assert again.step == 0
    given = open_session(straight.folder).stack.state_dict()
    assert all(torch.equal(tensor, given[name]) for name, tensor in again.task.stack.state_dict().items())


def test_a_finished_run_has_nothing_left_to_train(straight: Run, tmp_path: Path) -> None:
    copy = Run(shutil.copytree(straight.folder, tmp_path / "run"))
    calls: list[int] = []
    result = resume(copy.folder).train(on_step=lambda step, *_: calls.append(step))
    assert calls == []
    assert result["finished"]
    assert_same(copy, straight)


def test_a_damaged_checkpoint_names_the_good_one_before_it(straight: Run, tmp_path: Path) -> None:
    copy = Run(shutil.copytree(straight.folder, tmp_path / "run"))
    os.truncate(copy.checkpoints / f"step-{STEPS:08d}" / "optimizer.safetensors", 1000)
    with pytest.raises(CheckpointError, match=r"damaged.*resume with --from step-00000016"):
        resume(copy.folder)
    resume(copy.folder, "step-00000016").train()
    assert_same(copy, straight)


def test_going_back_gives_up_what_came_later_even_if_killed_at_once(straight: Run, tmp_path: Path) -> None:
    copy = Run(shutil.copytree(straight.folder, tmp_path / "run"))
    with pytest.raises(Crash):
        resume(copy.folder, "step-00000016").train(on_step=crash_at(17))
    assert [path.name for path in copy.checkpoints.iterdir()] == ["step-00000016"]
    trainer = resume(copy.folder)
    assert trainer.step == 16
    trainer.train()
    assert_same(copy, straight)


def test_a_checkpoint_or_a_step_that_is_not_there(straight: Run) -> None:
    with refused(ConfigError, setting="stop_after", given=0):
        resume(straight.folder).train(stop_after=0)
    with refused(CheckpointError, setting="name", given="step-3"):
        resume(straight.folder, "step-3")


def test_a_changed_corpus_is_refused_and_nothing_is_lost(
    config: TrainConfig, straight: Run, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    shutil.copy(str(config.data), corpus)
    start(replace(config, data=str(corpus)), tmp_path / "run").train(stop_after=5)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    text = corpus.read_text()
    corpus.write_text(text + " more")
    with refused(CheckpointError, setting="data"):
        resume(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    corpus.write_text(text)
    resume(tmp_path / "run").train()
    assert_same(Run.open(tmp_path / "run"), straight)


def test_a_relative_data_path_is_found_again_from_elsewhere(
    config: TrainConfig, straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(str(config.data)).parent)
    start(replace(config, data="corpus.txt"), tmp_path / "run").train(stop_after=5)
    monkeypatch.chdir(tmp_path)
    resume(tmp_path / "run").train()
    assert_same(Run.open(tmp_path / "run"), straight)


@pytest.mark.parametrize(
    "change",
    [
        {"heads": "per-stage", "objective": "residual"},
        {"grad_scale": 1.0, "bus": "detached", "reduction": "sum"},
        {"partition": "L", "tokenizer": "bpe"},
        {"partition": "1,1", "grad_scale": 1.0, "grad_bits": 4},
        {"partition": "1,1", "grad_scale": 1.0, "grad_delay": 2, "grad_bits": 8, "accumulate": 2},
    ],
)
def test_other_topologies_and_tokenizers_resume_too(
    change: dict[str, Any], config: TrainConfig, tmp_path: Path
) -> None:
    model = config.model.changed(vocab=270, head_rank=4)
    config = config.changed(steps=6, save_every=2, model=model, **change)
    whole = start(config, tmp_path / "whole")
    whole.train()
    with pytest.raises(Crash):
        start(config, tmp_path / "parts").train(on_step=crash_at(5))
    resume(tmp_path / "parts").train()
    assert losses(Run.open(tmp_path / "parts")) == losses(whole.task.run)
    assert weights(Run.open(tmp_path / "parts"), 6) == weights(whole.task.run, 6)
