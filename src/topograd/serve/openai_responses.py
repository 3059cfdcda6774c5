"""/v1/responses: OpenAI's newer interface, as far as it is a chat.

A request becomes the parameters of a chat (`to_chat`), and what the chat writes becomes items: a message, and
a function call for each call. Nothing is stored, so `previous_response_id` is not supported: send the items.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from topograd.convert.tool_calls import Delta
from topograd.serve import request_schema as schema
from topograd.serve.jobs import Job
from topograd.serve.request_schema import Field, RequestError
from topograd.serve.responses import BlockResponse, Call, Choice, counts, timings
from topograd.serve.texts import ServedModel
from topograd.serve.tools import Toolbox

TOOL = schema.record({"type": schema.choice("function"), **schema.TOOL_FIELDS}, "type", "name")
FORMAT = schema.record({"type": schema.FORMATS, "schema": schema.SCHEMA}, "type", others=True)
_KEPT = ("user", "metadata", "store", "service_tier")
FIELDS: dict[str, Field] = {name: schema.SHARED[name] for name in (*schema.CONVERTED, *_KEPT)} | {
    "input": Field(
        schema.one_of(
            "A text, or items.",
            schema.text("A text.", 2**20),
            schema.many({"type": "object"}, "Items.", 1, 10_000),
        ),
        required=True,
    ),
    "instructions": Field(schema.text("The system's message.", 2**20)),
    "max_output_tokens": Field(schema.whole("Maximum number of tokens.", 0, schema.MAX_TOKENS)),
    "tools": Field(schema.many(TOOL, "Functions that the model may call.", 0, schema.MAX_TOOLS), ()),
    "tool_choice": Field(
        schema.one_of(
            "none, auto, required, or a function by its name.",
            schema.choice("none", "auto", "required"),
            schema.record({"type": schema.choice("function"), "name": schema.TOOL_NAME}, "type", "name"),
        ),
        "auto",
    ),
    "parallel_tool_calls": Field(schema.switch("Whether there may be several calls."), True),
    "text": Field(
        schema.record(
            {"format": FORMAT, "verbosity": schema.text("Ignored.", 100)},
            description="What the text must be.",
        ),
        {},
    ),
    "truncation": Field(schema.choice("disabled"), "disabled", only="disabled"),
    "previous_response_id": Field({"type": "null"}, only="null: nothing is stored, send the items"),
    "include": Field(schema.many(schema.text("Ignored.", 100), "Ignored.", 0, 100)),
    "reasoning": Field(schema.IGNORED),
    "prompt_cache_key": Field(schema.text("Ignored.", 1000)),
    "safety_identifier": Field(schema.text("Ignored.", 1000)),
}


def to_chat(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the chat."""
    items = given["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    if given["instructions"]:
        messages.append({"role": "system", "content": given["instructions"]})
    for item in items:
        _add(messages, item)
    if not messages:
        raise RequestError("input has no message", "input")
    made: dict[str, Any] = {"messages": messages, "max_completion_tokens": given["max_output_tokens"]}
    made["parallel_tool_calls"] = given["parallel_tool_calls"]
    made["tools"] = [
        schema.to_function(tool["name"], tool.get("parameters"), tool.get("description"))
        for tool in given["tools"]
    ]
    called = given["tool_choice"]
    made["tool_choice"] = (
        called if isinstance(called, str) else schema.to_function(called["name"], None, None)
    )
    form = given["text"].get("format") or {"type": "text"}
    made["response_format"] = {"type": form["type"]}
    if form["type"] == "json_schema":
        made["response_format"]["json_schema"] = {"name": "x", "schema": form.get("schema") or {}}
    return schema.to_params(given, made)


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Add an item to the messages of a chat."""
    kind = item.get("type", "message")
    try:
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _text(item["content"])})
        elif kind == "function_call":
            called = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": called}
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])}
            messages.append(result)
        elif kind != "reasoning":  # what a model thought is not told to it again
            raise schema.unsupported("input", "items of type message, function_call and function_call_output")
    except (KeyError, TypeError, AttributeError):
        raise RequestError(
            f"input has an item of type {str(kind)[:40]!r} that is not whole", "input"
        ) from None


def _text(content: Any) -> str:
    return schema.joined(content, "input", ("input_text", "output_text", "text"), "parts of text")


class ResponsesResponse(BlockResponse):
    """The response to one request."""

    def __init__(
        self,
        given: Mapping[str, Any],
        served: ServedModel,
        params: Mapping[str, Any],
        jobs: Sequence[Job],
        tools: Toolbox | None,
    ) -> None:
        head = {"id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time())}
        super().__init__(params, jobs, tools, head | {"model": params["model"] or served.name})
        self.given = given
        self._ids: list[str] = []
        self._number = 0

    def whole(self) -> dict[str, Any]:
        """The response to a request that does not stream."""
        (choice,) = self.choices
        cut = choice.finish == "length"
        output = [self._item(i, block, True) for i, block in enumerate(choice.blocks or [""])]
        read, made, cached = counts(self.choices)
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + made,
        }
        details = {"incomplete_details": {"reason": "max_output_tokens"} if cut else None, "usage": usage}
        body = self._body("incomplete" if cut else "completed", output)
        return {**body, **details, "timings": timings([choice.job])}

    def _body(self, status: str, output: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        told = ("instructions", "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls")
        more = ("max_output_tokens", "truncation", "previous_response_id")
        same = {name: self.given[name] for name in (*told, *more)}
        form = self.given["text"] or {"format": {"type": "text"}}
        rest = {"error": None, "incomplete_details": None, "metadata": self.given["metadata"] or {}}
        same |= {"tools": list(self.given["tools"]), "text": form, "usage": None}
        return {**self.head, **rest, **same, "status": status, "output": list(output)}

    def _item(self, index: int, block: str | Call, done: bool) -> dict[str, Any]:
        status = "completed" if done else "in_progress"
        while len(self._ids) <= index:
            self._ids.append(secrets.token_hex(12))
        if isinstance(block, Call):
            spelled = {"call_id": block.id, "name": block.name, "arguments": block.arguments if done else ""}
            return {"type": "function_call", "id": f"fc_{self._ids[index]}", "status": status, **spelled}
        content = [_part(block)] if done else []
        message = {"type": "message", "id": f"msg_{self._ids[index]}", "role": "assistant"}
        return {**message, "status": status, "content": content}

    def _created(self) -> Iterator[str]:
        yield self._event("response.created", {"response": self._body("in_progress")})
        yield self._event("response.in_progress", {"response": self._body("in_progress")})

    def _delta(self, choice: Choice, delta: Delta) -> str:
        kind, more = "output_text", dict[str, Any](logprobs=[])
        if delta.call is not None:
            kind, more = "function_call_arguments", {}
        return self._event(f"response.{kind}.delta", self._where(choice) | {"delta": delta.text} | more)

    def _finish(self, choice: Choice) -> Iterator[str]:
        if not choice.blocks:
            choice.blocks.append("")
            self._open = 0
            yield from self._begin(choice)
        yield from self._close(choice)

    def _where(self, choice: Choice) -> dict[str, Any]:
        called = isinstance(choice.blocks[self._open], Call)
        item = self._item(self._open, choice.blocks[self._open], False)["id"]
        return {"item_id": item, "output_index": self._open} | ({} if called else {"content_index": 0})

    def _begin(self, choice: Choice) -> Iterator[str]:
        item = self._item(self._open, choice.blocks[self._open], False)
        yield self._event("response.output_item.added", {"output_index": self._open, "item": item})
        if item["type"] == "message":
            yield self._event("response.content_part.added", self._where(choice) | {"part": _part("")})

    def _end(self, choice: Choice) -> Iterator[str]:
        block = choice.blocks[self._open]
        where, item = self._where(choice), self._item(self._open, block, True)
        if isinstance(block, Call):
            done = {"arguments": block.arguments, "name": block.name}
            yield self._event("response.function_call_arguments.done", where | done)
        else:
            yield self._event("response.output_text.done", where | {"text": block, "logprobs": []})
            yield self._event("response.content_part.done", where | {"part": _part(block)})
        yield self._event("response.output_item.done", {"output_index": self._open, "item": item})

    def _event(self, kind: str, words: Mapping[str, Any]) -> str:
        self._number += 1
        return super()._event(kind, {"sequence_number": self._number - 1, **words})

    def error(self, error: RequestError) -> str:
        """An error in the middle of a stream."""
        told = {"code": error.code or "server_error", "message": error.message, "param": error.param}
        return self._event("error", told)

    def end(self) -> str:
        """The end of a stream."""
        body = self.whole()
        return self._event(f"response.{body['status']}", {"response": body})


def _part(words: str) -> dict[str, Any]:
    return {"type": "output_text", "text": words, "annotations": [], "logprobs": []}
