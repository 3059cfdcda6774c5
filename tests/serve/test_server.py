"""A server's life as a process: ready, asked, killed, stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from topograd.errors import ConfigError
from topograd.serve.server import bind, is_loopback

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


def test_a_stop_lets_running_texts_finish_and_a_kill_loses_nothing_else() -> None:
    body = {"prompt": "def ", "max_tokens": 120, "temperature": 0, "stream": True}
    short = {**body, "max_tokens": 4, "stream": False}
    with (
        started() as (process, address),
        httpx.Client(base_url=address, timeout=60, trust_env=False) as client,
    ):
        text = client.post("/v1/completions", json=short).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]", "it was told to stop in the middle, and went on to the end"
        assert process.wait(60) == 0
    with (
        started() as (process, address),
        httpx.Client(base_url=address, timeout=60, trust_env=False) as client,
    ):
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)
        assert process.wait(60) == -signal.SIGKILL
    with started() as (process, address):
        again = httpx.post(f"{address}/v1/completions", json=short, timeout=60, trust_env=False).json()
        assert again["choices"][0]["text"] == text
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_ports_and_hosts() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} cannot be listened on"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot be listened on"):
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
        with socket.create_connection(server.sock.getsockname()[:2], timeout=20) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
            )
            began = time.monotonic()
            answer = client.recv(2000)
            while not answer.endswith(b"}}"):
                answer += client.recv(2000)
        assert answer.startswith(b"HTTP/1.1 408")
        assert time.monotonic() - began < 15
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    finally:
        stop()
