"""Tools of a request: what the template is told of them, when a call is forced, and by which grammar.

    tool_choice    auto (with tools)    content or calls, as the model likes; calls are parsed
                   none                 the model is not told of the tools
                   required             one call or more, whose arguments fit their schema
                   a name               one call of that tool

A call that is forced is the only text that the model may write, at every depth. Arguments that the schema
does not name are not written, unless it says `additionalProperties`. With `response_format`, a text is either
JSON of that schema or calls.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topograd.convert.tool_calls import CallFormat, CallParser
from topograd.data.tokenizer import Tokenizer
from topograd.decode.grammar import Grammar
from topograd.serve.request_schema import RequestError

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Toolbox:
    """The tools that a text may call."""

    tools: list[dict[str, Any]]
    """As OpenAI's API has them."""
    form: CallFormat
    forced: tuple[str, ...]
    """The tools of which one must be called; none where the model may write what it likes."""
    several: bool
    tokens: dict[str, int]
    """The markers of calls that are special tokens."""

    @classmethod
    def of(cls, params: Mapping[str, Any], template: str | None, tokenizer: Tokenizer) -> Toolbox | None:
        """The tools of a chat's parameters; None where nothing may be called."""
        tools, choice = list(params["tools"]), params["tool_choice"]
        names = [tool["function"]["name"] for tool in tools]
        if len(set(names)) < len(names):
            raise RequestError("tools has two functions of one name; rename one", "tools")
        named = None if choice is None or isinstance(choice, str) else choice["function"]["name"]
        if (choice == "required" and not names) or (named is not None and named not in names):
            known = ", ".join(names) or "none"
            raise RequestError(
                f"tool_choice asks for a function that tools does not have; tools has: {known}", "tool_choice"
            )
        if not tools or choice == "none":
            return None
        form = CallFormat.of(template)
        forced = (named,) if named is not None else tuple(names) if choice == "required" else ()
        several = bool(params["parallel_tool_calls"]) and named is None
        return cls(tools, form, forced, several, _special(tokenizer, form))

    def parser(self) -> CallParser:
        """What finds the calls of one text."""
        return CallParser(self.form, [tool["function"]["name"] for tool in self.tools])

    @property
    def shown(self) -> dict[int, bytes]:
        """The special tokens that the parser must see."""
        return {token: text.encode() for text, token in self.tokens.items()}

    def grammar(self, content: Mapping[str, Any] | None = None) -> Grammar | None:
        """What a text must be; `content` is the schema of what may be written instead of calls."""
        if not self.forced and content is None:
            return None
        schemas = {
            tool["function"]["name"]: _arguments(tool["function"].get("parameters"))
            for tool in self.tools
            if not self.forced or tool["function"]["name"] in self.forced
        }
        return Grammar.calls(
            self.form.lark(schemas, self.several, self.tokens, None if self.forced else content)
        )


def _special(tokenizer: Tokenizer, form: CallFormat) -> dict[str, int]:
    found = {}
    for marker in (form.opening, form.closing, "[ARGS]"):
        spelled = tokenizer.encode(marker, "chat") if marker else []
        if len(spelled) == 1 and not tokenizer.pieces[spelled[0]]:
            found[marker] = spelled[0]
    return found


def _arguments(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if not schema:
        return NO_PARAMETERS
    open_ = "additionalProperties" in schema or "properties" not in schema or "$ref" in schema
    return (
        {"type": "object", **schema} if open_ else {"type": "object", **schema, "additionalProperties": False}
    )


def call_id() -> str:
    """The id of a call: nine letters and digits, since Mistral's templates take no others."""
    return secrets.token_hex(5)[:9]
