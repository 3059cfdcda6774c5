"""Malformed requests to a running server: an error in OpenAI's shape, never a 5xx, and the server lives."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from topograd.pretrained import REFERENCE
from topograd.serve import anthropic, openai_responses
from topograd.serve.request_schema import CHAT, COMPLETION, DETOKENIZE, EMBEDDING, TOKENIZE
from topograd.serve.server import Running, bind, open_served
from topograd.serve.settings import Limits
from waiting import LIMIT

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "def ",
        "max_tokens": 1,
        "temperature": 0,
        "n": 1,
        "stop": ["x"],
        "seed": 1,
    },
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/embeddings": {"input": ["def "], "pooling": "last", "depth": "prefix:1"},
    "/v1/responses": {
        "input": [{"role": "user", "content": "hi"}],
        "max_output_tokens": 1,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_tokens": 1,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "system": "x",
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "def "},
    "/detokenize": {"tokens": [5, 6]},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, 2**70, "", "x" * 3000, "\ud800", [], [[]], [None], {}, {"a": {}}, [2**40],
    ["", 5], {"role": 3}, [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}], "NaN",
    -0.0, [[1] * 400], [TOOL], [TOOL, TOOL], "required", {"type": "tool", "name": "f"}, {"type": "function"},
    {"type": "json_schema", "json_schema": {"schema": {"allOf": [{"$ref": "#"}]}}}, {"regex": "(a*)*b"},
    {"format": {"type": "json_schema", "schema": {"not": {}}}}, {"1": 3}, {"x": 3}, "prefix:9",
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 2000}}]}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}], [{"type": "function_call_output"}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{}]}]}],
)  # fmt: skip
FIELDS = ("zzz", "tools", "logprobs", "input", "system")
KNOWN: dict[str, Any] = {
    "/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/v1/embeddings": EMBEDDING,
    "/v1/responses": openai_responses.FIELDS, "/v1/messages": anthropic.FIELDS,
    "/v1/messages/count_tokens": anthropic.COUNTED, "/tokenize": TOKENIZE, "/detokenize": DETOKENIZE,
}  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    running = Running(
        open_served(REFERENCE, None, Limits(rows=4, waiting=8, seconds=60, grace=1)), bind("127.0.0.1", 0)
    )
    ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(running.run(ready.set)))
    thread.start()
    assert ready.wait(LIMIT)
    with httpx.Client(base_url=running.address(), timeout=LIMIT, trust_env=False) as made:
        yield made
    running.stop()
    thread.join(LIMIT)
    assert not thread.is_alive()


def broken(chance: random.Random) -> tuple[str, bytes]:
    """A path and a body that was valid before something in it was changed."""
    path = chance.choice(list(BODIES))
    body = dict(BODIES[path])
    for _ in range(chance.randint(1, 3)):
        names = FIELDS if chance.random() < 0.1 else [*KNOWN[path]]
        body[chance.choice(names)] = chance.choice(VALUES)
    content = json.dumps(body).encode()
    if chance.random() < 0.25:
        place = chance.randrange(len(content))
        content = content[:place] + chance.randbytes(chance.randint(0, 3)) + content[place + 1 :]
    return path, content


def test_malformed_bodies(client: httpx.Client, count: Callable[[str, str], None], times: int) -> None:
    chance = random.Random(0)
    for _ in range(400 * times):
        path, content = broken(chance)
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code < 500, (path, content, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"], (path, content)
        count("request", "answered" if answer.status_code < 400 else "refused")
    assert client.get("/health").status_code == 200
