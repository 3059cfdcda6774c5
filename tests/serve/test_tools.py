"""Tools: forced calls fit their schema at every depth, streams add up, an agent's loop closes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from topograd.convert.tool_calls import NAMED
from topograd.data.tokenizer import Tokenizer
from topograd.decode.grammar import GrammarCompiler
from topograd.decode.text import TextStream
from topograd.serve.request_schema import CHAT, RequestError, read
from topograd.serve.server import Running
from topograd.serve.texts import ServedModel
from topograd.serve.tools import Toolbox


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Rome"]
    days: int = pydantic.Field(ge=1, le=9)


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
            "required": ["a", "b"],
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
USER = {"role": "user", "content": "x = "}


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.address() + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def ask(running: Running) -> Iterator[Callable[..., httpx.Response]]:
    with httpx.Client(base_url=running.address(), timeout=60, trust_env=False) as made:

        def ask(**fields: Any) -> httpx.Response:
            body = {"messages": [USER], "temperature": 0, "max_tokens": 90, **fields}
            return made.post("/v1/chat/completions", json=body)

        yield ask


def test_forced_calls_at_every_depth(running: Running, ask: Callable[..., httpx.Response]) -> None:
    made = {}
    for suffix in ("", ":prefix-1", ":wand", ":speculate", ":speculate-lookup", ":path-1,3"):
        body = {"model": running.served.name + suffix, "tools": [ADD, STOP]}
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            answer = ask(**body, tool_choice=choice, parallel_tool_calls=False).json()["choices"][0]
            (call,) = answer["message"]["tool_calls"]
            assert answer["message"]["content"] is None
            assert answer["finish_reason"] == "tool_calls"
            if call["function"]["name"] == "add":
                given = json.loads(call["function"]["arguments"])
                jsonschema.validate(given, ADD["function"]["parameters"])  # type: ignore[index]
                assert set(given) == {"a", "b"}
            else:
                assert choice == "required"
                assert call["function"] == {"name": "stop", "arguments": "{}"}
            made[suffix, str(choice)] = call["function"]
    for choice in {choice for _, choice in made}:
        assert made["", choice] == made[":speculate", choice] == made[":speculate-lookup", choice]


def test_openais_helpers_parse_calls(client: openai.OpenAI, running: Running) -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    asked: dict[str, Any] = {
        "model": running.served.name,
        "messages": [USER],
        "tools": tools,
        "tool_choice": "required",
        "max_completion_tokens": 120,
        "temperature": 0,
        "parallel_tool_calls": False,
    }
    parsed = client.chat.completions.parse(**asked).choices[0].message.tool_calls
    assert parsed
    assert all(isinstance(call.function.parsed_arguments, Weather) for call in parsed)
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed
    assert [c.function.parsed_arguments for c in streamed] == [c.function.parsed_arguments for c in parsed]
    assert kinds.count("tool_calls.function.arguments.delta") > len(parsed)


def test_streams_add_up_to_the_whole(client: Any, running: Running) -> None:
    """Parallel calls, in parts: the same names and arguments, each with an id of its own."""
    asked: dict[str, Any] = {
        "model": running.served.name,
        "messages": [USER],
        "tools": [ADD, STOP],
        "tool_choice": "required",
        "max_tokens": 150,
        "temperature": 1.5,
        "seed": 11,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    calls: dict[int, list[str]] = {}
    ids: dict[int, str] = {}
    reasons = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            reasons.append(choice.finish_reason)
            assert not choice.delta.content
            for part in choice.delta.tool_calls or ():
                assert part.function is not None
                if part.id is not None:
                    ids[part.index] = part.id
                    calls[part.index] = [part.function.name or "", ""]
                calls[part.index][1] += part.function.arguments or ""
    assert whole.message.tool_calls
    assert len(calls) > 1, "the seed was chosen so"
    functions = [[c.function.name, c.function.arguments] for c in whole.message.tool_calls]
    assert functions[: len(calls)] == [calls[k] for k in sorted(calls)]
    assert len(set(ids.values())) == len(calls)
    assert reasons[-1] == whole.finish_reason
    assert set(reasons[:-1]) == {None}


def test_an_agents_loop(client: Any, running: Running) -> None:
    """Ask, call, answer with the result, ask again: the model is told of all of it."""
    messages: list[Any] = [USER]
    prompts = []
    for turn in range(3):
        choice: Any = "none" if turn == 2 else {"type": "function", "function": {"name": "add"}}
        answer = client.chat.completions.create(
            model=running.served.name,
            messages=messages,
            tools=[ADD],
            tool_choice=choice,
            max_tokens=60,
            seed=turn,
        )
        prompts.append(answer.usage.prompt_tokens)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if turn == 2:
            assert message.tool_calls is None
            break
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            result = json.dumps(given["a"] + given["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert prompts[0] < prompts[1]


def test_without_force_the_model_writes_what_it_likes(ask: Callable[..., httpx.Response]) -> None:
    plain = ask(max_tokens=12).json()["choices"][0]
    none = ask(max_tokens=12, tools=[ADD], tool_choice="none").json()["choices"][0]
    assert plain["message"] == none["message"]
    auto = ask(max_tokens=12, tools=[ADD]).json()["choices"][0]
    assert auto["message"]["content"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    either = ask(tools=[ADD], response_format=form).json()["choices"][0]["message"]
    assert either.get("tool_calls") or json.loads(either["content"]) in ("yes", "no")


def test_a_call_that_is_cut_says_so(ask: Callable[..., httpx.Response]) -> None:
    choice = ask(tools=[ADD], tool_choice="required", max_tokens=16).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def with_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a", "parameters": schema}}


def calling(function: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": function}]}


BAD: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [ADD, ADD]}),
    ("tools", {"tools": [{"type": "web_search"}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}),
    ("tools", {"tools": [STOP] * 129}),
    ("tools", {"tools": [with_parameters({"type": "x"})], "tool_choice": "required"}),
    ("tools", {"tools": [with_parameters({"enum": ["x" * 70_000]})], "tool_choice": "required"}),
    ("tool_choice", {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [ADD], "tool_choice": "always"}),
    ("grammar", {"tools": [ADD], "tool_choice": "required", "grammar": {"regex": "a"}}),
    ("messages", {"messages": [USER, calling({"name": "add", "arguments": "{"})]}),
    ("messages", {"messages": [USER, calling({})]}),
]


@pytest.mark.parametrize(("param", "fields"), BAD)
def test_what_cannot_be_done_is_refused(
    ask: Callable[..., httpx.Response], param: str, fields: dict[str, Any]
) -> None:
    answer = ask(**fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert "\n" not in answer.json()["error"]["message"]


class Marked:
    """A tokenizer with two more tokens, which are special."""

    def __init__(self, base: Tokenizer) -> None:
        self.base, self.stop_tokens, self.separator = base, base.stop_tokens, base.separator
        self.special = {"[TOOL_CALLS]": len(base.pieces), "[ARGS]": len(base.pieces) + 1}
        self.pieces = (*base.pieces, b"", b"")

    def encode(self, text: str, kind: str = "document") -> list[int]:
        if kind == "chat" and text in self.special:
            return [self.special[text]]
        return self.base.encode(text)


def test_markers_that_are_special_tokens(served: ServedModel) -> None:
    """The grammar asks for the token, not for its spelling, and the text has it for the parser."""
    tokenizer: Any = Marked(served.tokenizer)
    body = {"messages": [USER], "tools": [ADD], "tool_choice": "required"}
    tools = Toolbox.of(read(CHAT, body), "[TOOL_CALLS] [ARGS]", tokenizer)
    assert tools is not None
    assert tools.form is NAMED
    opening, args = tokenizer.special.values()
    spelled = [opening, *tokenizer.encode("add"), args, *tokenizer.encode('{"a": 1, "b": 2}')]
    grammar = tools.grammar()
    assert grammar is not None
    matcher = GrammarCompiler(tokenizer).compile(grammar).start()
    assert matcher.fits([], spelled) == len(spelled)
    assert matcher.fits([], tokenizer.encode("[TOOL_CALLS]")) == 0
    stream, parser = TextStream(tokenizer, (), tools.shown), tools.parser()
    deltas = [delta for token in spelled for delta in parser.feed(stream.feed(token))]
    assert [delta.name for delta in deltas if delta.name] == ["add"]
    assert "".join(delta.text for delta in deltas) == '{"a": 1, "b": 2}'


def test_a_name_that_is_asked_for_must_be_there(served: ServedModel) -> None:
    body = {
        "messages": [USER],
        "tools": [STOP],
        "tool_choice": {"type": "function", "function": {"name": "x"}},
    }
    with pytest.raises(RequestError) as problem:
        Toolbox.of(read(CHAT, body), None, served.tokenizer)
    assert problem.value.param == "tool_choice"
