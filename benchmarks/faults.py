"""Stages and ranks that are killed at random instants, for each of them and over many seeds.

    python benchmarks/faults.py --out FOLDER [--seeds 10] [--first-seed 0] [--minutes 10]

Two kinds of trial on a small model of three stages, each with a checkpoint every two steps:

    lone    three stages as processes of their own, sharing nothing (`parallel/independent_stage.py`). One is
            killed with SIGKILL at an instant that is uniform over the time of a run without a fault, from
            before its folder exists to its last step, and started again up to half a second later.
    job     three ranks of one job with a shared head. One is killed, the others must end by themselves;
            then the job is resumed.

What must hold, else the trial is printed and the exit code is 1: nothing hangs (60 s); every set of files
that is there after the kill, and at the end, is whole to its SHA-256; all losses of all stages (lone) and all
weights (job) are bit for bit those of the run without a fault. Two trials at a time, some seconds each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

STAGES = 3
LIMIT = 60.0
"""Seconds after which a process counts as hung."""
MODEL = ["--partition", "1,1,1", "--tokenizer", "bytes", "--batch", "3", "--steps", "24", "--seed", "1"]
MODEL += ["--model.layers", "3", "--model.width", "16", "--model.heads", "2", "--model.context", "16"]
MODEL += ["--accumulate", "2", "--save-every", "2", "--eval-every", "0", "--eval-bytes", "300"]
ALONE = ["--stage-heads", "own", "--bus", "detached", "--model.no-x0-blend"]
LOADED = ["topograd.cli.train_on_ranks", "topograd.parallel.independent_stage", "topograd.parallel.rank_task"]


def rank_process(argv: list[str], environment: dict[str, str], log: str) -> None:
    """What a process does: a command of the program; never returns."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= environment
    from topograd.cli.main import main as program

    code = program(argv)
    sys.stdout.flush()
    os._exit(code)


class Trials:
    """The processes of all trials, and what a run without a fault gave."""

    def __init__(self, out: Path) -> None:
        self.context: ForkServerContext = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(LOADED)
        self.out, self.text = out, out / "corpus.txt"
        words = random.Random(0).choices(["stage", "loss", "relay", "bridge", "rank"], k=2000)
        self.text.write_text(" ".join(words))

    def start(
        self, folder: Path, own: Path, flags: list[str], environment: dict[str, str]
    ) -> ForkServerProcess:
        """A process that goes on where the run in `own` is, or begins it."""
        begin = ["--resume", str(own)] if (own / "config.toml").exists() else ["--out", str(folder)]
        begin += [] if begin[0] == "--resume" else ["--data", str(self.text), *MODEL]
        process = self.context.Process(
            target=rank_process, args=(["train", *begin, *flags, "--json"], environment, str(folder) + ".log")
        )
        process.start()
        return process

    def stage(self, folder: Path, number: int, port: int) -> ForkServerProcess:
        parallel = f"stages={STAGES},stage={number},links=127.0.0.1:{port},timeout=20"
        own = folder / f"stage-{number}"
        flags = [] if (own / "config.toml").exists() else ALONE
        return self.start(folder, own, ["--parallel", parallel, *flags], {})

    def job(self, folder: Path) -> list[ForkServerProcess]:
        more = {"WORLD_SIZE": str(STAGES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        flags = ["--parallel", f"stages={STAGES},timeout=10"]
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(STAGES)]
        return [self.start(folder, folder, flags, more | rank) for rank in ranks]

    def lone_trial(self, folder: Path, victim: int | None, instant: float, pause: float) -> list[str]:
        """Three lone stages, one of them killed; what is wrong."""
        port = free_port()
        stages = {k: self.stage(folder, k, port) for k in range(1, STAGES + 1)}
        problems: list[str] = []
        if victim is not None:
            time.sleep(instant)
            stages[victim].kill()
            stages[victim].join(LIMIT)
            problems += broken_sets(folder / f"stage-{victim}")
            time.sleep(pause)
            stages[victim] = self.stage(folder, victim, port)
        for number, process in stages.items():
            problems += ended(f"stage {number}", process, well=True)
            problems += broken_sets(folder / f"stage-{number}")
        return problems

    def job_trial(self, folder: Path, victim: int | None, instant: float, _: float) -> list[str]:
        """A job of three ranks, one of them killed, then resumed; what is wrong."""
        ranks = self.job(folder)
        problems: list[str] = []
        if victim is not None:
            time.sleep(instant)
            ranks[victim - 1].kill()
            for rank, process in enumerate(ranks):
                problems += ended(f"rank {rank}", process, well=False)
            problems += broken_sets(folder)
            ranks = self.job(folder)
        for rank, process in enumerate(ranks):
            problems += ended(f"rank {rank}", process, well=True)
        return problems + broken_sets(folder)


def ended(name: str, process: ForkServerProcess, *, well: bool) -> list[str]:
    """Wait for a process; what is wrong with its end."""
    process.join(LIMIT)
    if process.exitcode is None:
        process.kill()
        process.join()
        return [f"{name} hung"]
    return [f"{name} ended with {process.exitcode}"] if well and process.exitcode else []


def broken_sets(folder: Path) -> list[str]:
    """The checkpoints in a run's folder that cannot be read byte for byte."""
    from topograd.runs.checkpoint import available, read_state
    from topograd.runs.checkpoint_set import read_set
    from topograd.runs.tensor_files import Unusable

    found = []
    for path in available(folder / "checkpoints"):
        try:
            read_set(path, read_state(path))
        except Unusable as problem:
            found.append(f"{path} {problem}")
    return found


def lone_result(folder: Path) -> object:
    """The loss of every step of every stage."""
    from topograd.runs.folder import Run

    runs = [Run.open(folder / f"stage-{k}") for k in range(1, STAGES + 1)]
    return [{r["step"]: r["loss"] for r in run.metrics() if r["kind"] == "train"} for run in runs]


def job_result(folder: Path) -> object:
    """Every weight, as bytes."""
    from topograd.runs.session import open_session

    state = open_session(folder).stack.state_dict()
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def free_port() -> int:
    """Of which the next two are likely free as well."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port if port < 65_000 else free_port()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0)
    asked = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    asked.out.mkdir(parents=True, exist_ok=True)
    trials = Trials(asked.out)
    kinds: dict[str, tuple[Callable[..., list[str]], Callable[[Path], object]]] = {
        "lone": (trials.lone_trial, lone_result),
        "job": (trials.job_trial, job_result),
    }
    expected, lasted = {}, {}
    for kind, (trial, result) in kinds.items():
        for twin in ("first", "second"):  # the second is timed: the first has loaded everything
            began = time.monotonic()
            problems = trial(asked.out / f"{kind}-{twin}", None, 0.0, 0.0)
            lasted[kind] = time.monotonic() - began
            assert not problems, problems
        expected[kind] = result(asked.out / f"{kind}-first")
        assert expected[kind] == result(asked.out / f"{kind}-second"), "two runs without a fault differ"
    done: Counter[str] = Counter()
    wrong: list[str] = []
    end = time.monotonic() + 60 * asked.minutes

    def fault(seed: int, kind: str, victim: int) -> None:
        if time.monotonic() > end:
            return
        trial, result = kinds[kind]
        draw = random.Random(f"{seed} {kind} {victim}")
        instant, pause = draw.uniform(0, lasted[kind]), draw.uniform(0, 0.5)
        folder = asked.out / f"{kind}-{victim}-{seed}"
        problems = trial(folder, victim, instant, pause)
        if not problems and result(folder) != expected[kind]:
            problems = ["another result than without the fault"]
        done[f"{kind}, {victim} of {STAGES}"] += 1
        wrong.extend(f"{folder}, killed after {instant:.2f} s: {problem}" for problem in problems)
        if not problems:
            shutil.rmtree(folder)
        print(f"{kind} {victim}, seed {seed}, after {instant:.2f} s: {problems}", file=sys.stderr, flush=True)

    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    with ThreadPoolExecutor(2) as pool:  # one waits while the other computes
        list(pool.map(lambda one: fault(*one), itertools.product(seeds, kinds, range(1, STAGES + 1))))
    print(json.dumps({"kills": dict(done), "seconds_without_a_fault": lasted, "problems": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
