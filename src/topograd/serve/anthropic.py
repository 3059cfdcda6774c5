"""/v1/messages and count_tokens: Anthropic's interface, as far as it is a chat of texts and tools.

A request becomes the parameters of a chat (`to_chat`), and what the chat writes becomes blocks: texts and
`tool_use`. `usage.input_tokens` are those that were computed, `cache_read_input_tokens` those that were not.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from topograd.serve.jobs import Job, Progress
from topograd.serve.request_schema import (
    CONVERTED,
    IGNORED,
    MAX_TOKENS,
    MAX_TOOLS,
    SCHEMA,
    SHARED,
    STOPS,
    TOOL_FIELDS,
    TOOL_NAME,
    Field,
    RequestError,
    choice,
    many,
    one_of,
    record,
    switch,
    text,
    to_function,
    unsupported,
    whole,
)
from topograd.serve.responses import Call, Choice, counts, error_body, event
from topograd.serve.texts import ServedModel
from topograd.serve.tools import Toolbox

BLOCKS = many({"type": "object"}, "Blocks.", 0, 10_000)
MESSAGE = record(
    {
        "role": choice("user", "assistant", "system"),
        "content": one_of("A text, or blocks.", text("A text.", 2**20), BLOCKS),
    },
    "role",
    "content",
)
TOOL = record(
    {
        "type": choice("custom"),
        "name": TOOL_NAME,
        "description": TOOL_FIELDS["description"],
        "input_schema": SCHEMA,
        "cache_control": IGNORED,
        "strict": TOOL_FIELDS["strict"],
    },
    "name",
    "input_schema",
    others=True,
)
CHOICE = record(
    {
        "type": choice("auto", "any", "tool", "none"),
        "name": TOOL_NAME,
        "disable_parallel_tool_use": switch("At most one call."),
    },
    "type",
    description="Whether tools are called.",
)
FORMAT = record({"type": choice("json_schema"), "schema": SCHEMA}, "type", "schema", others=True)
COUNTED: dict[str, Field] = {
    "model": SHARED["model"],
    "messages": Field(many(MESSAGE, "The conversation.", 1, 10_000), required=True),
    "system": Field(one_of("The system's message.", text("A text.", 2**20), BLOCKS)),
    "tools": Field(many(TOOL, "Functions that the model may call.", 0, MAX_TOOLS), ()),
    "tool_choice": Field(CHOICE),
    "thinking": Field(record({"type": choice("disabled", "adaptive")}, "type", others=True), only="disabled"),
    "cache_control": Field(IGNORED),
    "output_config": Field(
        record(
            {"format": FORMAT, "effort": text("Ignored.", 100)},
            others=True,
            description="What the text must be.",
        ),
        {},
    ),
}
FIELDS = (
    COUNTED
    | {name: SHARED[name] for name in (*CONVERTED, "metadata", "service_tier")}
    | {
        "max_tokens": Field(whole("Maximum number of tokens.", 0, MAX_TOKENS), required=True),
        "stop_sequences": Field(STOPS, ()),
    }
)


def to_chat(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the chat."""
    messages: list[dict[str, Any]] = []
    if given["system"]:
        messages.append({"role": "system", "content": _text(given["system"])})
    for message in given["messages"]:
        messages += _messages(message)
    if not messages:
        raise RequestError("messages has no text", "messages")
    called = given["tool_choice"] or {"type": "auto"}
    if called["type"] == "tool" and not called.get("name"):
        raise RequestError("tool_choice has no 'name'; it is required of type tool", "tool_choice")
    choices: dict[str, Any] = {"auto": "auto", "none": "none", "any": "required"}
    named = {"type": "function", "function": {"name": called.get("name")}}
    made: dict[str, Any] = {name: given[name] for name in CONVERTED if name in given}
    made |= {
        "messages": messages,
        "max_tokens": given.get("max_tokens"),
        "stop": list(given.get("stop_sequences", ())),
        "tools": [
            to_function(tool["name"], tool["input_schema"], tool.get("description"))
            for tool in given["tools"]
        ],
        "tool_choice": choices.get(called["type"], named),
        "parallel_tool_calls": not called.get("disable_parallel_tool_use"),
    }
    if (form := given["output_config"].get("format")) is not None:
        schema = {"name": "x", "schema": form["schema"]}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {name: value for name, value in made.items() if value not in (None, ())}


def _messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A message as those of a chat: results of tools are messages of their own."""
    if isinstance(message["content"], str):
        yield {"role": message["role"], "content": message["content"]}
        return
    words, calls = [], []
    try:
        for block in message["content"]:
            if block["type"] == "text":
                words.append(_string(block["text"]))
            elif block["type"] == "tool_use":
                called = {"name": block["name"], "arguments": json.dumps(block["input"])}
                calls.append({"id": block["id"], "type": "function", "function": called})
            elif block["type"] == "tool_result":
                content = _text(block.get("content") or "")
                yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
            elif block["type"] not in ("thinking", "redacted_thinking"):
                raise unsupported("messages", "blocks of type text, tool_use and tool_result")
    except (KeyError, TypeError):
        raise RequestError("messages has a block that is not whole", "messages") from None
    if words or calls:
        more = {"tool_calls": calls} if calls else {}
        yield {"role": message["role"], "content": "".join(words), **more}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    try:
        if any(block["type"] != "text" for block in content):
            raise unsupported("messages", "blocks of text here")
        return "".join(_string(block["text"]) for block in content)
    except (KeyError, TypeError):
        raise RequestError("messages has a block that is not whole", "messages") from None


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


class MessagesResponse:
    """The response to one request."""

    def __init__(
        self, served: ServedModel, params: Mapping[str, Any], jobs: Sequence[Job], tools: Toolbox | None
    ) -> None:
        self.params = params
        self.choices = [Choice(job, tools) for job in jobs]
        self.head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": params["model"] or served.name,
        }
        self._open = -1
        self._last: int | None = None

    def whole(self) -> dict[str, Any]:
        """The response to a request that does not stream."""
        (choice,) = self.choices
        content = [_block(block) for block in choice.blocks]
        return {**self.head, "content": content, **self._ending(), "usage": self._usage()}

    def _ending(self) -> dict[str, Any]:
        (choice,) = self.choices
        stop = choice.job.stream.stop
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        reason = reasons.get(choice.finish or "", "end_turn" if stop is None else "stop_sequence")
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        read, made, cached = counts(self.choices)
        computed = {"input_tokens": read - cached, "output_tokens": made}
        return {**computed, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}

    def chunks(self, index: int, progress: Progress) -> Iterator[str]:
        """The events of a stream for some progress."""
        (choice,) = self.choices
        if not choice.begun:
            choice.begun = True
            begun: dict[str, Any] = {
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": self._usage(),
            }
            yield _event("message_start", {"message": self.head | begun})
        for delta in choice.take(progress):
            if self._open < 0 or delta.call != self._last or delta.name:
                yield from self._close()
                self._open, self._last = self._open + 1, delta.call
                called = None if delta.call is None else choice.calls[delta.call]
                block = _block("") if called is None else _block(Call(called.name, "{}", called.id))
                yield _event("content_block_start", {"index": self._open, "content_block": block})
            if delta.text:
                kind = ("text_delta", "text") if delta.call is None else ("input_json_delta", "partial_json")
                words = {"type": kind[0], kind[1]: delta.text}
                yield _event("content_block_delta", {"index": self._open, "delta": words})
        if progress.finish:
            yield from self._close()

    def _close(self) -> Iterator[str]:
        if self._open >= 0:
            yield _event("content_block_stop", {"index": self._open})

    def error(self, error: RequestError) -> str:
        """An error in the middle of a stream."""
        return "event: error\n" + event(error_body(error.message, error.status, path="/v1/messages"))

    def end(self) -> str:
        """The end of a stream."""
        last = {"delta": self._ending(), "usage": self._usage()}
        return _event("message_delta", last) + _event("message_stop", {})


def _block(block: str | Call) -> dict[str, Any]:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    try:
        given = json.loads(block.arguments)
    except (ValueError, RecursionError):
        given = {}  # cut, or no JSON
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}


def _event(kind: str, words: Mapping[str, Any]) -> str:
    return f"event: {kind}\n" + event({"type": kind, **words})
