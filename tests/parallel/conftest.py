"""Ranks for tests: forked from one process that has loaded torch, so that a job costs no import."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from waiting import LIMIT

SERVER = Path(__file__).with_name("rank_server.py")


@dataclass
class RunningJob:
    """A job under way."""

    folder: Path
    pids: dict[int, int]
    held: socket.socket
    """Keeps the job's port from others until a rank listens there."""

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)

    def alive(self, rank: int) -> bool:
        return Path(f"/proc/{self.pids[rank]}").exists()

    def wait(self, ranks: list[int] | None = None) -> list[Any]:
        """The results by rank, None where one failed; a job that hangs is killed and fails the test."""
        wanted = list(self.pids) if ranks is None else ranks
        end = time.monotonic() + LIMIT
        while any(self.alive(rank) for rank in wanted):
            if time.monotonic() > end:
                hung = [rank for rank in wanted if self.alive(rank)]
                for rank in hung:
                    self.kill(rank)
                pytest.fail(f"ranks {hung} hang\n{self.said()}")
            time.sleep(0.01)
        self.held.close()
        files = [self.folder / f"{rank}.json" for rank in wanted]
        return [json.loads(file.read_text()) if file.exists() else None for file in files]

    def results(self) -> list[Any]:
        """The results of a job in which nothing went wrong."""
        found = self.wait()
        assert None not in found, self.said()
        return found

    def error(self, rank: int) -> str:
        file = self.folder / f"{rank}.error"
        return file.read_text() if file.exists() else ""

    def printed(self, rank: int, stream: str = "out") -> str:
        return (self.folder / f"{rank}.{stream}").read_text()

    def said(self) -> str:
        return "\n".join(f"rank {r}: {self.printed(r, 'err')[-3000:]}" for r in self.pids)


Launch = Callable[..., RunningJob]


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    root = Path(__file__).parents[2]
    source = os.pathsep.join(str(root / name) for name in ("src", "benchmarks", ""))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(SERVER)]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert server.stdout is not None
    assert server.stdout.readline().strip() == "ready"
    yield server
    assert server.stdin is not None
    server.stdin.close()
    server.stdout.close()
    server.wait(LIMIT)


@pytest.fixture(scope="session")
def launch(_server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Start a job: `launch("steps", 2, parallel="stages=2", ...)`; `ranks` starts only some of them."""
    jobs: list[RunningJob] = []

    def start(
        job: str, world: int, *, ranks: list[int] | None = None, port: int | None = None, **arguments: Any
    ) -> RunningJob:
        folder, held = tmp_path_factory.mktemp(job), take_port()
        own = list(range(world)) if ranks is None else ranks
        order = {
            "job": job,
            "ranks": own,
            "world": world,
            "port": port or held.getsockname()[1],
            "folder": str(folder),
            "arguments": arguments,
        }
        assert _server.stdin is not None
        assert _server.stdout is not None
        _server.stdin.write(json.dumps(order) + "\n")
        _server.stdin.flush()
        pids = json.loads(_server.stdout.readline())
        jobs.append(RunningJob(folder, dict(zip(own, pids, strict=True)), held))
        return jobs[-1]

    yield start
    for job in jobs:
        job.held.close()


@pytest.fixture(scope="session")
def free_port() -> Callable[[], socket.socket]:
    return take_port


def take_port() -> socket.socket:
    """A socket on a port that nobody else is given while it is open; a store may listen there too."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as stores do: then both may bind it
    found.bind(("127.0.0.1", 0))
    return found


@pytest.fixture(scope="session")
def server() -> ModuleType:
    """What the ranks run, for the one process that they are compared with."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("rank_server", SERVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_server"] = module
    spec.loader.exec_module(module)
    return module
