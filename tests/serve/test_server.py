"""A server's life as a process: ready, asked, killed, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from raising import refused
from topograd.cli.main import INTERRUPTED, main
from topograd.decode.depths import strategy_of
from topograd.decode.model import Model
from topograd.decode.sampling import Sampling
from topograd.decode.strategies import generate_batch
from topograd.decode.text import TextStream
from topograd.errors import ConfigError
from topograd.pretrained import REFERENCE
from topograd.runs.session import LoadedTextRun
from topograd.runtime.choice import preferred
from topograd.serve.guard import is_loopback
from topograd.serve.jobs import Job, Progress
from topograd.serve.metrics import Counters
from topograd.serve.scheduler import Scheduler
from topograd.serve.server import Running, bind, open_served
from topograd.serve.settings import Limits
from topograd.serve.texts import ServedModel
from waiting import LIMIT

COMMAND = [sys.executable, "-m", "topograd", "serve", "--port", "0", "--grace", "60"]


@contextmanager
def started() -> Iterator[tuple[subprocess.Popen[str], str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving reference at (http://127\.0\.0\.1:\d+) .*\n", line)
        assert found, line + (process.stderr.read() if process.stderr and not line else "")
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def test_a_kill_loses_nothing_else_and_a_stop_lets_running_texts_finish() -> None:
    body = {"prompt": "def ", "max_tokens": 200, "n": 6, "temperature": 0, "stream": True}
    short = {**body, "max_tokens": 4, "n": 1, "stream": False}
    with (
        started() as (process, address),
        httpx.Client(base_url=address, timeout=LIMIT, trust_env=False) as client,
    ):
        text = client.post("/v1/completions", json=short).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)
        assert process.wait(LIMIT) == -signal.SIGKILL
    with (
        started() as (process, address),
        httpx.Client(base_url=address, timeout=LIMIT, trust_env=False) as client,
    ):
        again = client.post("/v1/completions", json=short).json()
        assert again["choices"][0]["text"] == text
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]", "it was told to stop in the middle, and went on to the end"
        assert process.wait(LIMIT) == 0
        assert process.stderr is not None
        assert (
            process.stderr.read() == f"topograd: runtime {preferred()}, weights float32\ntopograd: stopped\n"
        )


@pytest.mark.parametrize(("ignored", "last"), [(False, signal.SIGINT), (True, signal.SIGTERM)])
def test_the_signal_that_ends_it_and_one_that_is_ignored(
    ignored: bool, last: signal.Signals, served: ServedModel
) -> None:
    """Ctrl-C ends it, but where it is ignored, as under nohup: it is meant for somebody else then."""

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        if ignored:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        ended = asyncio.run(Running(served, bind("127.0.0.1", 0)).run(stop))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == last


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, 0)])
def test_the_exit_code_says_which_signal_it_was(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended(*_: object) -> int:
        return number

    monkeypatch.setattr(Running, "run", ended)
    assert main(["serve", "--port", "0"]) == code


def _written(served: ServedModel, prompts: list[list[int]]) -> list[list[int]]:
    """What a scheduler writes behind prompts, side by side."""
    scheduler = Scheduler(served.model.session, served.model.engine, Limits(rows=8), Counters())
    texts: list[list[int]] = [[] for _ in prompts]
    for text, prompt in zip(texts, prompts, strict=True):

        def tell(progress: Progress, text: list[int] = text) -> None:
            text += [written.token for written in progress.written]

        scheduler.add([Job(prompt, 12, "full", Sampling(), TextStream(served.tokenizer), tell)])
    while scheduler.step():
        pass
    return texts


def test_runtimes(served: ServedModel, double: LoadedTextRun) -> None:
    """The faster runtime where it can, and torch, write the same texts; int8 is another model."""
    assert served.model.engine.runtime.name == preferred()
    assert Model(double).engine.runtime.name == "torch", "others have no float64 here"
    torch_alone = open_served(REFERENCE, None, Limits(), runtime="torch")
    prompts = [served.encode(text) for text in ("def ", "import ", "class A", "for i in", "x = ", "return ")]
    several = _written(served, prompts)
    assert several == _written(torch_alone, prompts), "no two of these texts' logits are near a tie"
    assert several == [text for prompt in prompts for text in _written(served, [prompt])]
    small = open_served(REFERENCE, None, Limits(), weights="int8")
    engine = small.model.engine
    assert (engine.runtime.name, engine.runtime.precision) == (preferred(), "int8")
    alone = generate_batch(strategy_of("full", small.model.session, engine), prompts[:1], 12)[0]
    assert _written(small, prompts)[0] == [emitted.token for emitted in alone]
    with refused(ConfigError, setting="runtime", given="fast"):
        open_served(REFERENCE, None, Limits(), runtime="fast")


def test_ports_and_hosts() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with refused(ConfigError, setting="port", given=port):
            bind("127.0.0.1", port)
    with refused(ConfigError, setting="port", given=0):
        bind("no.such.host.invalid", 0)
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "example.org")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_slow_body_is_given_up(start_server: object) -> None:
    server, stop = start_server(body_seconds=0.2, grace=1)  # type: ignore[operator]
    try:
        with socket.create_connection(server.sock.getsockname()[:2], timeout=LIMIT) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
            )
            answer = client.recv(2000)
            while not answer.endswith(b"}}"):
                answer += client.recv(2000)
        assert answer.startswith(b"HTTP/1.1 408")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    finally:
        stop()
