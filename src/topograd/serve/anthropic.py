"""/v1/messages and count_tokens: Anthropic's interface, as far as it is a chat of texts and tools.

A request becomes the parameters of a chat (`to_chat`), and what the chat writes becomes blocks: texts and
`tool_use`. `usage.input_tokens` are those that were computed, `cache_read_input_tokens` those that were not.
"""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from topograd.convert.tool_calls import Delta
from topograd.serve import request_schema as schema
from topograd.serve.jobs import Job
from topograd.serve.request_schema import Field, RequestError
from topograd.serve.responses import BlockResponse, Call, Choice, counts, error_body, event
from topograd.serve.texts import ServedModel
from topograd.serve.tools import Toolbox

BLOCKS = schema.many({"type": "object"}, "Blocks.", 0, 10_000)
MESSAGE = schema.record(
    {
        "role": schema.choice("user", "assistant", "system"),
        "content": schema.one_of("A text, or blocks.", schema.text("A text.", 2**20), BLOCKS),
    },
    "role",
    "content",
)
TOOL = schema.record(
    {
        "type": schema.choice("custom"),
        "name": schema.TOOL_NAME,
        "description": schema.TOOL_FIELDS["description"],
        "input_schema": schema.SCHEMA,
        "cache_control": schema.IGNORED,
        "strict": schema.TOOL_FIELDS["strict"],
    },
    "name",
    "input_schema",
    others=True,
)
CHOICE = schema.record(
    {
        "type": schema.choice("auto", "any", "tool", "none"),
        "name": schema.TOOL_NAME,
        "disable_parallel_tool_use": schema.switch("At most one call."),
    },
    "type",
    description="Whether tools are called.",
)
FORMAT = schema.record(
    {"type": schema.choice("json_schema"), "schema": schema.SCHEMA}, "type", "schema", others=True
)
COUNTED: dict[str, Field] = {
    "model": schema.SHARED["model"],
    "messages": Field(schema.many(MESSAGE, "The conversation.", 1, 10_000), required=True),
    "system": Field(schema.one_of("The system's message.", schema.text("A text.", 2**20), BLOCKS)),
    "tools": Field(schema.many(TOOL, "Functions that the model may call.", 0, schema.MAX_TOOLS), ()),
    "tool_choice": Field(CHOICE),
    "thinking": Field(
        schema.record({"type": schema.choice("disabled", "adaptive")}, "type", others=True), only="disabled"
    ),
    "cache_control": Field(schema.IGNORED),
    "output_config": Field(
        schema.record(
            {"format": FORMAT, "effort": schema.text("Ignored.", 100)},
            others=True,
            description="What the text must be.",
        ),
        {},
    ),
}
FIELDS = (
    COUNTED
    | {name: schema.SHARED[name] for name in (*schema.CONVERTED, "metadata", "service_tier")}
    | {
        "max_tokens": Field(schema.whole("Maximum number of tokens.", 0, schema.MAX_TOKENS), required=True),
        "stop_sequences": Field(schema.STOPS, ()),
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
    made: dict[str, Any] = {
        "messages": messages,
        "max_tokens": given.get("max_tokens"),
        "stop": list(given.get("stop_sequences", ())),
        "tools": [
            schema.to_function(tool["name"], tool["input_schema"], tool.get("description"))
            for tool in given["tools"]
        ],
        "tool_choice": choices.get(called["type"], named),
        "parallel_tool_calls": not called.get("disable_parallel_tool_use"),
    }
    if (form := given["output_config"].get("format")) is not None:
        named_schema = {"name": "x", "schema": form["schema"]}
        made["response_format"] = {"type": "json_schema", "json_schema": named_schema}
    return schema.to_params(given, made)


def _messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A message as those of a chat: results of tools are messages of their own."""
    if isinstance(message["content"], str):
        yield {"role": message["role"], "content": message["content"]}
        return
    words, calls = [], []
    try:
        for block in message["content"]:
            if block["type"] == "text":
                words.append(block["text"])
            elif block["type"] == "tool_use":
                called = {"name": block["name"], "arguments": json.dumps(block["input"])}
                calls.append({"id": block["id"], "type": "function", "function": called})
            elif block["type"] == "tool_result":
                content = _text(block.get("content") or "")
                yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
            elif block["type"] not in ("thinking", "redacted_thinking"):
                raise schema.unsupported("messages", "blocks of type text, tool_use and tool_result")
        content = "".join(words)
    except (KeyError, TypeError):
        raise RequestError("messages has a block that is not whole", "messages") from None
    if words or calls:
        more = {"tool_calls": calls} if calls else {}
        yield {"role": message["role"], "content": content, **more}


def _text(content: Any) -> str:
    try:
        return schema.joined(content, "messages", ("text",), "blocks of text here")
    except (KeyError, TypeError):
        raise RequestError("messages has a block that is not whole", "messages") from None


class MessagesResponse(BlockResponse):
    """The response to one request."""

    def __init__(
        self, served: ServedModel, params: Mapping[str, Any], jobs: Sequence[Job], tools: Toolbox | None
    ) -> None:
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        super().__init__(params, jobs, tools, head | {"model": params["model"] or served.name})

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

    def _created(self) -> Iterator[str]:
        begun: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        yield self._event("message_start", {"message": {**self.head, **begun}})

    def _begin(self, choice: Choice) -> Iterator[str]:
        block = choice.blocks[self._open]
        empty = Call(block.name, "{}", block.id) if isinstance(block, Call) else ""
        words = {"index": self._open, "content_block": _block(empty)}
        yield self._event("content_block_start", words)

    def _delta(self, choice: Choice, delta: Delta) -> str:
        kind = ("text_delta", "text") if delta.call is None else ("input_json_delta", "partial_json")
        words = {"type": kind[0], kind[1]: delta.text}
        return self._event("content_block_delta", {"index": self._open, "delta": words})

    def _end(self, choice: Choice) -> Iterator[str]:
        yield self._event("content_block_stop", {"index": self._open})

    def error(self, error: RequestError) -> str:
        """An error in the middle of a stream."""
        return "event: error\n" + event(error_body(error.message, error.status, path="/v1/messages"))

    def end(self) -> str:
        """The end of a stream."""
        last = {"delta": self._ending(), "usage": self._usage()}
        return self._event("message_delta", last) + self._event("message_stop", {})


def _block(block: str | Call) -> dict[str, Any]:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    try:
        given = json.loads(block.arguments)
    except (ValueError, RecursionError):
        given = {}  # cut, or no JSON
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}
