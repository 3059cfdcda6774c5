"""Who may ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from topograd.serve.guard import local
from waiting import LIMIT


@pytest.mark.parametrize(
    ("host", "good"),
    [
        ("localhost", True), ("LOCALHOST:80", True), ("127.0.0.1:8123", True), ("127.9.9.9", True),
        ("[::1]:8123", True), ("[::1]", True), ("evil.example", False), ("evil.example:8123", False),
        ("localhost.evil.example", False), ("", False), ("10.0.0.1", False), ("[::2]:1", False),
        ("localhost:80@evil.com", False), ("[::1]evil.com", False), ("[::1]:80:80", False),
    ],
)  # fmt: skip
def test_names_of_this_machine(host: str, good: bool) -> None:
    assert local(host) is good


def test_pages_and_names_from_elsewhere_are_refused(client: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}):
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["message"]
    own = {"origin": str(client.base_url).rstrip("/")}
    answer = client.post("/v1/completions", json=body, headers=own)
    assert answer.status_code == 200
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.fixture(scope="module")
def locked(start_server: Callable[..., Any]) -> Iterator[httpx.Client]:
    server, stop = start_server(token="open sesame")
    with httpx.Client(base_url=server.address(), timeout=LIMIT, trust_env=False) as client:
        yield client
    stop()


def test_a_token_is_asked_for(locked: httpx.Client) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic open sesame"}):
        answer = locked.get("/v1/models", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
    good = {"authorization": "Bearer open sesame", "host": "my.server.example"}
    assert locked.get("/v1/models", headers=good).status_code == 200
    assert locked.get("/health").status_code == 200
    assert locked.get("/").status_code == 200, "the page asks for the token itself"
