"""Run as a script, this file is the process that the kill test forks its victims from."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD

from raising import refused
from topograd.errors import RunError
from topograd.runs import checkpoint
from topograd.runs.folder import Run

CONFIG = {"steps": 80, "model": {"layers": 4, "window": None}}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.create(tmp_path / "runs" / "x")
    run.write_config(CONFIG)
    return run


def test_a_created_run_can_be_opened_and_read(run: Run) -> None:
    opened = Run.open(str(run.folder))
    assert opened == run
    assert opened.read_config() == {"steps": 80, "model": {"layers": 4}}
    assert opened.metrics() == []
    assert sorted(os.listdir(run.folder)) == ["checkpoints", "config.toml", "figures", "manifest.json"]


def test_create_refuses_a_run_and_says_how_to_continue_it(run: Run) -> None:
    with refused(RunError, setting="folder"):
        Run.create(run.folder)


def test_create_refuses_a_folder_of_something_else_and_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with refused(RunError, setting="folder"):
        Run.create(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_create_refuses_a_file_and_a_place_below_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with refused(RunError, setting="folder"):
            Run.create(folder)


def test_create_accepts_what_a_killed_creation_left(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    with run.lock():
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "figures").mkdir()
        (tmp_path / ".config.toml.0a1b.tmp").write_text("steps = ")
    Run.create(tmp_path).write_config(CONFIG)
    assert Run.open(tmp_path).read_config()["steps"] == 80


def test_create_refuses_checkpoints_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000040").mkdir(parents=True)
    with refused(RunError, setting="folder"):
        Run.create(tmp_path)


def test_open_refuses_what_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in ("none", "file", "."):
        with refused(RunError, setting="folder", given=str(tmp_path / folder)):
            Run.open(tmp_path / folder)


@pytest.mark.parametrize("content", [b"steps = ", b"\xff", b"a = 1\na = 2\n"])
@pytest.mark.parametrize("bound", [True, False], ids=["manifest", "version-0.1"])
def test_a_damaged_config_is_one_clear_line(run: Run, content: bytes, bound: bool) -> None:
    run.config_file.write_bytes(content)
    words = r"config\.toml is not the file that this run wrote; it cannot be read; restore it"
    if not bound:
        run.manifest.path.unlink()
        words = r"config\.toml is damaged"
    with pytest.raises(RunError, match=words) as caught:
        run.read_config()
    assert "\n" not in str(caught.value)


def test_metrics_come_back_in_order_as_they_were_logged(run: Run) -> None:
    records: list[dict[str, Any]] = [
        {"step": 1, "loss": [0.1, 1 / 3]},
        {"note": "a\nb ü"},
        {"step": 2, "loss": math.inf},
    ]
    for record in records:
        run.log(record)
    assert run.metrics() == records
    assert run.metrics_file.read_bytes().count(b"\n") == 3


def test_every_torn_end_is_skipped_by_readers_and_cut_by_the_next_log(run: Run) -> None:
    records = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    for record in records:
        run.log(record)
    whole = run.metrics_file.read_bytes()
    for size in range(len(whole)):
        run.metrics_file.write_bytes(whole[:size])
        complete = records[: whole[:size].count(b"\n")]
        assert run.metrics() == complete
        run.log({"step": 9})
        assert run.metrics() == [*complete, {"step": 9}]


def test_damage_in_the_middle_is_not_hidden(run: Run) -> None:
    run.metrics_file.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match="line 2 is no JSON object"):
        run.metrics()


def test_a_record_that_is_not_json_leaves_the_metrics_alone(run: Run) -> None:
    run.log({"step": 1})
    with pytest.raises(RunError, match="cannot be written as JSON"):
        run.log({"step": 2, "loss": object()})
    assert run.metrics() == [{"step": 1}]


def test_rewind_drops_later_steps_and_the_torn_line_and_keeps_the_bytes_of_the_rest(run: Run) -> None:
    for step in (1, 2, 3, 4):
        run.log({"step": step, "loss": 1 / step})
    run.log({"note": "no step"})
    lines = run.metrics_file.read_bytes().splitlines(keepends=True)
    with open(run.metrics_file, "ab") as file:
        file.write(b'{"step": 5, "lo')
    run.rewind_metrics(2)
    assert run.metrics_file.read_bytes() == lines[0] + lines[1] + lines[4]
    run.rewind_metrics(0)
    assert run.metrics() == [{"note": "no step"}]


def test_rewind_of_a_run_without_metrics_makes_none(run: Run) -> None:
    run.rewind_metrics(3)
    assert not run.metrics_file.exists()


def test_the_lock_admits_one_holder_and_can_be_taken_again(run: Run) -> None:
    with run.lock():
        with pytest.raises(RunError, match="in use"), run.lock():
            pass
        with pytest.raises(RunError, match="in use"), Run.open(run.folder).lock():  # still held
            pass
    with run.lock():
        pass


def test_the_lock_ends_with_an_exception_and_clears_a_killed_rewind(run: Run) -> None:
    leftover = run.folder / ".metrics.jsonl.0a1b.tmp"
    leftover.write_text("{")
    with pytest.raises(KeyError), run.lock():
        raise KeyError
    assert not leftover.exists()
    with run.lock():
        pass


HOLDER = """
import sys
from topograd.runs.folder import Run
with Run.open(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_is_refused_until_the_holder_is_killed(run: Run) -> None:
    command = [sys.executable, "-c", HOLDER, str(run.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(RunError, match="in use by another process"), run.lock():
                pass
        finally:
            holder.send_signal(signal.SIGKILL)
    assert holder.returncode == -signal.SIGKILL
    with run.lock():
        pass


# A run killed at any instant, by SIGKILL. What follows runs in a child process of its own. It forks workers
# (quicker than to load torch in each), which write what a trainer writes, and kills them.


def numbered(step: int) -> tuple[nn.Linear, SGD]:
    """A model, optimizer and generator whose every number says which step it is of."""
    model = nn.Linear(64, 64)
    optimizer = SGD(model.parameters(), lr=float(step), momentum=0.9)
    for parameter in model.parameters():
        nn.init.constant_(parameter, step)
        optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, step)}
    torch.manual_seed(step)
    return model, optimizer


def write_step(run: Run, step: int) -> None:
    """What a trainer writes: the config, a line of metrics and a checkpoint, the only one that is kept."""
    model, optimizer = numbered(step)
    with run.lock():
        run.write_config({"step": step})
        run.rewind_metrics(step - 1)
        run.log({"step": step})
        extra = {"step": step}
        checkpoint.save(
            run.checkpoints, step=step, model=model, optimizers={"sgd": optimizer}, extra=extra, keep=1
        )


def surviving_step(run: Run) -> int:
    """The step of the latest checkpoint. All that count must load; the rest of the run must fit it."""
    with Run.open(run.folder).lock():
        paths = checkpoint.available(run.checkpoints)
        assert paths[-1] == checkpoint.latest(run.checkpoints)
        step = [verified_step(path) for path in paths][-1]
        assert step <= run.read_config()["step"] <= step + 1
        steps = [record["step"] for record in run.metrics()]
        assert steps == list(range(1, len(steps) + 1))
        assert step - 1 <= len(steps) <= step + 1
    return step


def verified_step(path: Path) -> int:
    """The step of a checkpoint that loads, with all its numbers of that step."""
    model, optimizer = numbered(0)
    step = checkpoint.load(path, model, {"sgd": optimizer}).step
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(step).get_state())
    assert optimizer.param_groups[0]["lr"] == step
    for parameter in model.parameters():
        assert (parameter == step).all()
        assert (optimizer.state[parameter]["momentum_buffer"] == step).all()
    return step


def fork(work: Callable[[], None]) -> int:
    worker = os.fork()
    if worker == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return worker


def kill_at_random_instants(run: Run, wanted: int) -> None:
    """Kill until so many kills left an unfinished checkpoint there, which says that they fell into a save."""
    chance = random.Random(0)
    step, unfinished = 1, 0
    write_step(run, step)
    start = time.perf_counter()
    write_step(run, step)
    duration = time.perf_counter() - start

    def work() -> None:
        for number in range(2 * step + 1, 10**9):  # each step twice: half of the saves replace a checkpoint
            write_step(run, number // 2)

    while unfinished < wanted:
        worker = fork(work)
        time.sleep(chance.uniform(0.0, 5 * duration))
        os.kill(worker, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(worker, 0)[1]) == signal.SIGKILL
        unfinished += any(name.startswith(".") for name in os.listdir(run.checkpoints))
        before, step = step, surviving_step(run)
        assert step >= before, f"step {before} was there, now {step} is the latest"


def snapshot_before_every_operation(run: Run, step: int, place: Path) -> list[Run]:
    """Copies of the run before each operation on a file as it writes `step`: what a kill there leaves."""
    names = ("mkdir", "rename", "remove", "rmdir", "truncate", "scandir", "listdir")
    audited = {"open", *(f"os.{name}" for name in names)}
    copies: list[Run] = []
    busy = False

    def hook(event: str, _: tuple[Any, ...]) -> None:
        nonlocal busy
        if event in audited and not busy:
            busy = True  # the copy's own operations do not count
            copies.append(Run(Path(shutil.copytree(run.folder, place / str(len(copies))))))
            busy = False

    sys.addaudithook(hook)
    write_step(run, step)
    busy = True  # for good: a hook cannot be removed
    return copies


def kill_before_every_operation(run: Run, new: int, place: Path, again: bool = True) -> int:
    """How many operations writing step `new` after step 2 takes. From before each, the run must go on.

    Where only an old checkpoint that was set aside is left, the run is killed `again` as it goes on.
    """
    copies = snapshot_before_every_operation(run, new, place)
    for copy in copies:
        assert surviving_step(copy) in (2, new)
        if again and not any(copy.checkpoints.glob("step-*")):
            kill_before_every_operation(copy, new, place / f"{copy.folder.name}-again", again=False)
        else:
            write_step(copy, new)
        assert surviving_step(copy) == new
        assert os.listdir(copy.checkpoints) == [f"step-{new:08d}"], "leftovers of killed saves stay behind"
    return len(copies)


def test_a_run_killed_at_any_instant_keeps_its_latest_checkpoint_whole(tmp_path: Path) -> None:
    """Kills at random, and what one would leave before each operation of a new and a repeated step."""
    command = [sys.executable, __file__, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    adding, replacing = json.loads(done.stdout)
    assert adding >= 20
    assert replacing >= 20


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    kill_at_random_instants(Run.create(place / "random"), wanted=3)
    counts = []
    for new in (3, 2):
        victim = Run.create(place / f"to-{new}")
        with mock.patch.object(os, "fsync"):  # slow, and only a power cut could tell the difference
            for step in (1, 2):
                write_step(victim, step)
            counts.append(kill_before_every_operation(victim, new, place / f"kills-{new}"))
    print(json.dumps(counts))
