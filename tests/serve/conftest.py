"""A server of the reference model in this process, on a free port; and a float64 model for what is exact."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from topograd.decode.engine import Engine
from topograd.decode.model import Model
from topograd.decode.sampling import Sampling
from topograd.decode.text import TextStream
from topograd.pretrained import REFERENCE
from topograd.runs.session import LoadedTextRun
from topograd.serve.disk_cache import PromptCache
from topograd.serve.jobs import Job, Progress
from topograd.serve.metrics import Counters
from topograd.serve.scheduler import Scheduler
from topograd.serve.server import Running, bind, open_served
from topograd.serve.settings import Limits
from topograd.serve.texts import ServedModel
from waiting import LIMIT

STAGES = 4


@pytest.fixture(scope="session")
def served() -> ServedModel:
    return open_served(REFERENCE, None, Limits(rows=6, waiting=12, chunk=16, seconds=60, grace=2))


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    """Starts a server in a thread; returns it and how to stop it."""

    def start(served: ServedModel, token: str | None = None) -> tuple[Running, Callable[[], None]]:
        running = Running(served, bind("127.0.0.1", 0), token)
        return running, _run(running)

    return start


@pytest.fixture(scope="session")
def run_server() -> Callable[[Running], Callable[[], None]]:
    """Starts a server that was made; returns how to stop it."""
    return _run


def _run(running: Running) -> Callable[[], None]:
    ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(running.run(ready.set)))
    thread.start()
    assert ready.wait(LIMIT)

    def stop() -> None:
        running.stop()
        thread.join(LIMIT)
        assert not thread.is_alive()

    return stop


@pytest.fixture(scope="session")
def start_server(served: ServedModel, serve: Callable[..., Any]) -> Callable[..., Any]:
    """The same with the reference model, and other limits if there are any."""
    return lambda token=None, **limits: serve(
        ServedModel(served.model, Limits(**limits)) if limits else served, token
    )


@pytest.fixture(scope="session")
def running(start_server: Callable[..., Any]) -> Iterator[Running]:
    server, stop = start_server()
    yield server
    stop()


@pytest.fixture(scope="session")
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.address(), timeout=LIMIT, trust_env=False) as client:
        yield client


@pytest.fixture(scope="session")
def ask(client: httpx.Client) -> Callable[..., dict[str, Any]]:
    """A completion that must succeed; greedy unless told otherwise."""

    def ask(**fields: Any) -> dict[str, Any]:
        answer = client.post("/v1/completions", json={"prompt": "def read(", "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    return ask


@pytest.fixture(scope="module")
def double(make_session: Callable[..., LoadedTextRun]) -> LoadedTextRun:
    """A session in float64 whose stages disagree."""
    session = make_session(STAGES)
    session.stack.double()
    return session


class Desk:
    """A scheduler without a thread, and what its jobs were told."""

    def __init__(self, session: LoadedTextRun, disk: PromptCache | None = None, **limits: Any) -> None:
        self.session = session
        self.model = Model(session)
        engine: Engine = self.model.engine
        self.scheduler = Scheduler(session, engine, Limits(**limits), Counters(), disk=disk)
        self.told: dict[int, list[Progress]] = {}

    def job(self, prompt: list[int], tokens: int, depth: str = "full", **more: Any) -> Job:
        told: list[Progress] = []
        sampling = more.pop("sampling", Sampling())
        stream = TextStream(self.session.tokenizer, more.pop("stop", ()))
        job = Job(prompt, tokens, depth, sampling, stream, told.append, **more)
        self.told[job.number] = told
        return job

    def run(self, steps: int = 1000) -> None:
        """Step until nothing is left."""
        for _ in range(steps):
            if not self.scheduler.step():
                return
        raise AssertionError("it never ends")

    def tokens(self, job: Job) -> list[int]:
        return [written.token for progress in self.told[job.number] for written in progress.written]

    def finish(self, job: Job) -> str | None:
        return self.told[job.number][-1].finish


@pytest.fixture
def make_desk(double: LoadedTextRun) -> Callable[..., Desk]:
    return lambda **limits: Desk(double, **limits)
