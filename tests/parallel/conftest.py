"""Ranks for tests: forked from one process that has loaded torch, so that a job costs no import."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SERVER = Path(__file__).with_name("rank_server.py")
LIMIT = 60.0
"""Seconds after which a job counts as hung."""


@dataclass
class RunningJob:
    """A job under way."""

    folder: Path
    pids: dict[int, int]
    done: set[int] = field(default_factory=set)

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)

    def alive(self, rank: int) -> bool:
        return Path(f"/proc/{self.pids[rank]}").exists()

    def wait(self, ranks: list[int] | None = None, limit: float = LIMIT) -> list[Any]:
        """The results by rank, None where one failed; a job that hangs is killed and fails the test."""
        wanted = list(self.pids) if ranks is None else ranks
        end = time.monotonic() + limit
        while any(self.alive(rank) for rank in wanted):
            if time.monotonic() > end:
                hung = [rank for rank in wanted if self.alive(rank)]
                for rank in hung:
                    self.kill(rank)
                pytest.fail(f"ranks {hung} hang\n{self.said()}")
            time.sleep(0.01)
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
    source = os.pathsep.join(str(root / name) for name in ("src", "benchmarks"))
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
    server.wait(20)


@pytest.fixture(scope="session")
def launch(_server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Start a job: `launch("steps", 2, parallel="stages=2", ...)`; `ranks` starts only some of them."""

    def start(
        job: str, world: int, *, ranks: list[int] | None = None, port: int | None = None, **arguments: Any
    ) -> RunningJob:
        folder = tmp_path_factory.mktemp(job)
        own = list(range(world)) if ranks is None else ranks
        order = {
            "job": job,
            "ranks": own,
            "world": world,
            "port": port or free_port(),
            "folder": str(folder),
            "arguments": arguments,
        }
        assert _server.stdin is not None
        assert _server.stdout is not None
        _server.stdin.write(json.dumps(order) + "\n")
        _server.stdin.flush()
        return RunningJob(folder, dict(zip(own, json.loads(_server.stdout.readline()), strict=True)))

    return start


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


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
