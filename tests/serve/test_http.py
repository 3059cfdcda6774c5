"""Bounds of a connection: long heads, slow heads, many connections; other clients are answered."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from topograd.serve import http
from waiting import LIMIT, wait_until

START = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Iterator[Any]:
    """With a token, which no head below has: bounds come before it."""
    running, stop = start_server(token="open sesame")
    yield running
    stop()


def connected(server: Any) -> socket.socket:
    return socket.create_connection(server.sock.getsockname()[:2], timeout=LIMIT)


def answer(client: socket.socket) -> tuple[int, bytes]:
    """The status and body that came before the connection was closed; 0 if it was only closed."""
    received = b""
    try:
        while piece := client.recv(2**16):
            received += piece
    except ConnectionError:
        pass
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


def flood(server: Any, pieces: Iterator[bytes], most: int) -> tuple[int, int]:
    """Send until the server closes; the bytes that it took, and the status that it answered."""
    sent = 0
    with connected(server) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
                sent += len(piece)
                if sent > most:
                    break
        except ConnectionError:
            pass
        return sent, answer(client)[0]


def test_a_head_of_any_length_is_read_to_its_bound_and_no_further(server: Any) -> None:
    def lines() -> Iterator[bytes]:
        yield START
        for i in range(10**7):
            yield b"".join(b"x-%d: %d\r\n" % (i, j) for j in range(1000))

    def value() -> Iterator[bytes]:
        yield START + b"x-long: "
        while True:
            yield b"a" * 2**16

    def path() -> Iterator[bytes]:
        yield b"GET /"
        while True:
            yield b"a" * 2**16

    for pieces in (lines, value, path):
        sent, status = flood(server, pieces(), 2**26)
        assert sent < 2**25, "the kernel's buffers hold some megabytes; the rest is not taken"
        assert status in (0, 400, 431)  # 0 where what was not read resets the connection


def test_the_answer_to_a_long_head_is_one_line(server: Any) -> None:
    with connected(server) as client:
        client.sendall(START + b"x-long: " + b"a" * (http.MAX_HEAD_BYTES + 2 * http._PIECE))
        status, body = answer(client)
    assert status == 431
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_head_within_the_bound_is_answered(server: Any) -> None:
    with connected(server) as client:
        client.sendall(START + b"x-long: " + b"a" * 2**15 + b"\r\nConnection: close\r\n\r\n")
        assert answer(client)[0] == 200


def test_many_headers_and_endless_trailers(server: Any) -> None:
    with connected(server) as client:
        client.sendall(START + b"".join(b"x-%d: 1\r\n" % i for i in range(http.MAX_HEADERS + 1)) + b"\r\n")
        status, body = answer(client)
    assert status == 400
    assert json.loads(body)["error"]["message"]

    def trailers() -> Iterator[bytes]:
        yield b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
        while True:
            yield b"x-trailer: " + b"a" * 2**16 + b"\r\n"

    assert flood(server, trailers(), 2**26)[0] < 2**25


def test_a_head_that_does_not_come_is_given_up(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.2)
    for begin in (b"", START):
        with connected(server) as client:
            client.sendall(begin)
            status, body = answer(client)
        assert status == 408
        assert json.loads(body)["error"]["message"]
    with connected(server) as client:  # the second request of a connection too
        client.sendall(START + b"\r\n")
        client.recv(2**16)
        client.sendall(START)
        assert answer(client)[0] == 408


def test_half_open_connections_close_the_oldest_and_others_are_answered(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_HALF_OPEN", 4)
    with ExitStack() as held:
        half_open = [held.enter_context(connected(server)) for _ in range(20)]
        for client in half_open:
            try:
                client.sendall(START)
            except ConnectionError:
                continue
        assert httpx.get(f"{server.address()}/health", trust_env=False, timeout=LIMIT).status_code == 200
        assert answer(half_open[0])[0] == 0
        half_open[-1].sendall(b"Connection: close\r\n\r\n")
        assert answer(half_open[-1])[0] == 200, "the newest are kept"


def test_too_many_connections_of_one_client(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until(
        lambda: not server.server.server_state.connections, "the connections of other tests are closed"
    )
    monkeypatch.setattr(http, "MAX_PER_CLIENT", 2)
    with ExitStack() as held:
        for _ in range(2):
            client = held.enter_context(connected(server))
            client.sendall(START + b"\r\n")
            assert client.recv(2**16).startswith(b"HTTP/1.1 200")
        status, body = answer(held.enter_context(connected(server)))
    assert status == 503
    assert json.loads(body)["error"]["type"] == "service_unavailable_error"


def test_two_host_headers_are_refused(server: Any) -> None:
    with connected(server) as client:
        client.sendall(START + b"Host: evil.example\r\nConnection: close\r\n\r\n")
        assert answer(client)[0] == 400
