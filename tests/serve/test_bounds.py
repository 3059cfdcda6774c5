"""Bounds: schemas that explode, arguments of megabytes, and tenants who learn nothing of one another."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from topograd.decode import grammar
from topograd.decode.grammar import Grammar, GrammarCompiler
from topograd.serve.server import Running
from topograd.serve.texts import ServedModel
from waiting import LIMIT

USER = {"role": "user", "content": "x = "}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}, "required": ["a", "b"]}
    return schema


EXPLODING: list[dict[str, Any]] = [
    {"$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(60)}
     | {"60": {"type": "null"}}, "$ref": "#/$defs/0"},
    {"type": "string", "pattern": "^((a{500}){500}){500}$"},
    {"type": "string", "pattern": "^(([a-z]+)*)*[0-9]{900}$"},
    {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
    {"type": "integer", "multipleOf": 987654321, "minimum": 10**15},
    {"enum": [f"word{i}" for i in range(4000)]},
    {"allOf": [{"pattern": f"[a-z]{{{i},}}"} for i in range(1, 60)]},
    nested(9),
    {"$ref": "#"},
    {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object", "additionalProperties": False},
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(EXPLODING)))
def test_schemas_that_explode(client: httpx.Client, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused or done, as a format and as a tool; and the server goes on."""
    monkeypatch.setattr(grammar, "SECONDS", 1)
    schema = EXPLODING[place]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for fields in ({"response_format": form}, {"tools": [tool], "tool_choice": "required"}):
        body = {"messages": [USER], "max_tokens": 4, **fields}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["message"]
        if "allOf" in schema and "response_format" in fields:
            assert answer.status_code == 400, "it would take minutes"
    assert client.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize(
    "arguments", ["x" * 3_000_000, json.dumps({"a": "x" * 3_000_000}), "[" * 100_000, '{"a":' * 50_000]
)
def test_arguments_of_megabytes(client: httpx.Client, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 400, answer.text[:200]
    assert len(answer.text) < 1000


def test_bodies_beyond_the_limit(client: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 9_000_000}}]
    answer = client.post("/v1/chat/completions", json={"messages": [USER], "tools": tools})
    assert answer.status_code == 413


def cached(running: Running, token: str, route: str = "/v1/completions") -> int:
    prompt = "def read(self, size=-1):\n    return self._readline() or None  # comment\n"
    body: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
    body |= (
        {"prompt": prompt}
        if route == "/v1/completions"
        else {"messages": [{"role": "user", "content": prompt}]}
    )
    key = {"authorization": f"Bearer {token}"} if route != "/v1/messages" else {"x-api-key": token}
    answer = httpx.post(running.address() + route, json=body, headers=key, timeout=LIMIT, trust_env=False)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if route == "/v1/messages":
        return int(usage["cache_read_input_tokens"])
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_tokens_prompts_are_not_anothers_hits(start_server: Callable[..., Any]) -> None:
    running, stop = start_server("first, second", rows=4)
    try:
        assert cached(running, "first") == 0
        assert cached(running, "first") > 8
        assert cached(running, "second") == 0
        assert cached(running, "second", "/v1/messages") > 8
        assert cached(running, "first", "/v1/chat/completions") > 8
        for wrong in ("first, second", "fir", "none"):
            answer = httpx.get(
                running.address() + "/v1/models",
                headers={"authorization": f"Bearer {wrong}"},
                trust_env=False,
            )
            assert answer.status_code == 401
    finally:
        stop()


def test_they_may_be_shared(start_server: Callable[..., Any]) -> None:
    running, stop = start_server("first,second", rows=4, share_prompts=True)
    try:
        assert cached(running, "first") == 0
        assert cached(running, "second") > 8
    finally:
        stop()


def test_compiled_grammars_are_a_tenants_own(served: ServedModel) -> None:
    """Else the time that compiling takes would tell what others asked for."""
    compiler, letters = GrammarCompiler(served.tokenizer), Grammar.regex("[a-z]+")
    mine = compiler.compile(letters, "me")
    assert compiler.compile(letters, "me") is mine
    assert compiler.compile(letters, "you") is not mine


def test_a_text_does_not_wait_for_anothers_prompt(make_desk: Callable[..., Any]) -> None:
    """Texts of one tenant wait for a common prefix; another's is read at the same time."""
    prompt = [(5 * i) % 40 for i in range(12)]
    for tenants, together in ((("a", "a"), 1), (("a", "b"), 2)):
        desk = make_desk(chunk=1)
        desk.scheduler.add([desk.job([*prompt, k], 2, tenant=tenant) for k, tenant in enumerate(tenants)])
        desk.scheduler.step()
        assert len(desk.scheduler.active) == together
        desk.run()
