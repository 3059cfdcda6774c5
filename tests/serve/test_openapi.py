"""The OpenAPI document describes what the server does; and nothing that is sent makes it fall over."""

from __future__ import annotations

import http.client
import json
import random
from collections import Counter
from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from topograd.serve import anthropic, openai_responses
from topograd.serve.guard import ROUTES
from topograd.serve.openapi import document, schema
from topograd.serve.request_schema import CHAT, COMPLETION
from topograd.serve.server import Running
from waiting import LIMIT

schemathesis: Any = pytest.importorskip("schemathesis", reason="schemathesis is not installed here")

SCHEMA = schemathesis.openapi.from_dict(document()).exclude(path_regex="messages$|responses$")
"""Without two routes whose bodies take long to make up: they are translated to chats, and fuzzed below."""


@SCHEMA.parametrize()
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_answers_are_as_documented(case: Any, running: Running) -> None:
    if isinstance(case.body, dict):  # short texts, so that the tests end
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] %= 3
        if "messages" in case.body and not case.path.endswith("count_tokens"):
            case.body.setdefault("max_tokens", 2)
        if "input" in case.body and case.path.endswith("responses"):
            case.body.setdefault("max_output_tokens", 2)
        if isinstance(case.body.get("n"), int):
            case.body["n"] = min(case.body["n"], 2)
    answer = case.call(base_url=running.address())
    case.validate_response(answer, checks=[schemathesis.checks.not_a_server_error])
    assert answer.status_code in {200, 400, 404, 405, 413, 429}
    if answer.status_code != 200:
        theirs = case.path.startswith("/v1/messages")
        fields = {"message", "type"} if theirs else {"message", "type", "param", "code"}
        assert set(answer.json()["error"]) == fields


def test_it_names_every_route() -> None:
    assert set(document()["paths"]) - {"/v1/models/{model}"} == set(ROUTES) - {"/", "/openapi.json"}
    assert schema(CHAT)["required"] == ["messages"]
    assert schema(COMPLETION)["additionalProperties"] is False


def _broken(dice: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    """A request with something wrong in it: a method, an address, a header, a body that was damaged."""
    good: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "stream": dice.random() < 0.2}
    chat = {"messages": [{"role": "user", "content": "def "}]}
    good |= dice.choice([{"prompt": "def ", "stop": ["x"]}, {"prompt": "def "}, chat])
    values: list[Any] = [
        None,
        -1,
        1e308,
        "x",
        [],
        {},
        True,
        [[[]]],
        "\x00",
        "é" * 50,
        -(2**70),
        {"a": [1]},
        [None],
    ]
    for _ in range(dice.randint(1, 3)):
        names = [*COMPLETION, *CHAT, *anthropic.FIELDS, *openai_responses.FIELDS, "x" * 50]
        good[dice.choice(names)] = dice.choice(values)
    body = bytearray(json.dumps(good).encode())
    for _ in range(dice.choice([0, 0, 1, 3])):
        body[dice.randrange(len(body))] = dice.randrange(256)
    body = body[: dice.randrange(len(body) + 1)] if dice.random() < 0.2 else body
    texts = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/candidates"] * 6
    texts += ["/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/messages/count_tokens"] * 2
    path = dice.choice([*texts, *ROUTES, "/v1/../etc/passwd", "/%00", "/v1/models/x"])
    headers = dice.choice(
        [{}, {}, {"content-type": "text/plain"}, {"origin": "x"}, {"authorization": "Bearer \xff"}]
    )
    return dice.choice([*["POST"] * 8, "GET", "PUT", "DELETE"]), path, bytes(body), headers


def test_a_thousand_malformed_requests(running: Running) -> None:
    dice = random.Random(0)
    seen: Counter[int] = Counter()
    host, port = running.sock.getsockname()[:2]
    connection = http.client.HTTPConnection(host, port, timeout=LIMIT)
    with closing(connection):
        for _ in range(1000):
            method, path, body, headers = _broken(dice)
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            said = answer.read().decode()
            seen[answer.status] += 1
            assert answer.status < 500, (method, path, body, said)
            if answer.status >= 400:
                message = json.loads(said)["error"]["message"]
                assert message
                assert not any(word in message for word in ("\n", "Traceback", ".py"))
    assert seen[400] > 300
    assert {403, 404, 405} <= set(seen)
    assert running.counters.totals["internal_errors"] == 0
    assert running.worker.alive


@pytest.mark.parametrize("fields", [COMPLETION, CHAT])
def test_defaults_are_documented(fields: Any) -> None:
    """Every default is in the document; the temperature's, which is not the command line's, in words too."""
    described = schema(fields)["properties"]
    for name, field in fields.items():
        empty = field.default is None or field.default in ((), {})
        assert described[name].get("default") == (None if empty else field.default)
    assert described["temperature"]["default"] == 1
    assert "default is 1" in fields["temperature"].schema["description"]
    assert "default temperature is 1" in document()["info"]["description"]
    assert json.loads(json.dumps(document())) == document(), "plain JSON"
