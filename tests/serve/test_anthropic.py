"""Anthropic's interface, by its own client: texts, streams, tools, counts and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from topograd.serve.server import Running

ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
        "required": ["a", "b"],
    },
}
GREEDY: Any = {"extra_body": {"temperature": 0}}
USER: Any = {"role": "user", "content": "def read("}


@pytest.fixture(scope="module")
def claude(running: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=running.address(), api_key="none", max_retries=0) as made:
        yield made


def test_texts_whole_and_in_parts(claude: Any, running: Running, ask: Callable[..., dict[str, Any]]) -> None:
    asked: Any = {
        "model": running.served.name,
        "max_tokens": 12,
        "messages": [USER],
        "extra_body": {"temperature": 0},
    }
    message = claude.messages.create(**asked)
    assert message.content[0].text == ask(max_tokens=12)["choices"][0]["text"]
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 12
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == message.content[0].text
    assert final.stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(model=running.served.name, messages=[USER]).input_tokens
    for usage in (message.usage, final.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted


def test_stop_sequences_and_systems(claude: Any, running: Running) -> None:
    asked: Any = {
        "model": running.served.name,
        "max_tokens": 20,
        "messages": [USER],
        "extra_body": {"temperature": 0},
    }
    whole = claude.messages.create(**asked).content[0].text
    stop = whole[4:6]
    message = claude.messages.create(**asked, stop_sequences=["zzzz", stop])
    assert message.content[0].text == whole[: whole.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    told = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    longer = claude.messages.count_tokens(model=running.served.name, messages=[USER], system=told)
    assert (
        longer.input_tokens
        > claude.messages.count_tokens(model=running.served.name, messages=[USER]).input_tokens
    )


def test_tools_and_their_results(claude: Any, running: Running) -> None:
    asked: Any = {
        "model": running.served.name,
        "max_tokens": 90,
        "tools": [ADD],
        "extra_body": {"temperature": 0},
    }
    asked["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    message = claude.messages.create(**asked, messages=[USER])
    (block,) = message.content
    assert message.stop_reason == "tool_use"
    assert block.type == "tool_use"
    assert set(block.input) == {"a", "b"}
    with claude.messages.stream(**asked, messages=[USER]) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input == block.input
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "7"}
    again = claude.messages.create(
        **(asked | {"tool_choice": {"type": "tool", "name": "add"}}),
        messages=[
            USER,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result, {"type": "text", "text": "And again?"}]},
        ],
    )
    assert again.content[0].type == "tool_use"
    assert again.usage.input_tokens + (again.usage.cache_read_input_tokens or 0) > message.usage.input_tokens


def test_a_schema(claude: Any, running: Running) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}}
    message = claude.messages.create(
        model=running.served.name, max_tokens=9, messages=[USER], output_config=config
    )
    assert message.content[0].text in ('"yes"', '"no"')


BAD: list[dict[str, Any]] = [
    {"max_tokens": None},
    {"messages": []},
    {"messages": [{"role": "tool", "content": "a"}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [5]}]}
        ]
    },
    {"messages": [{"role": "user", "content": []}]},
    {"tools": [{"type": "bash_20250124", "name": "bash"}]},
    {"tool_choice": {"type": "tool"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
]


@pytest.mark.parametrize("fields", BAD)
def test_errors_have_anthropics_shape(running: Running, fields: dict[str, Any]) -> None:
    body = {"messages": [USER], "max_tokens": 2} | fields
    answer = httpx.post(running.address() + "/v1/messages", json=body, trust_env=False)
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_the_client_knows_the_errors(claude: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=2, messages=[USER])
