"""Request fields: one table of JSON schemas, by which requests are read and the OpenAPI document is made.

`read` raises RequestError with the name of a field that does not fit its schema. A parameter of OpenAI's API
that this server does not have is an error ("not supported here: ...") where it would change the response, and
ignored where it would not (`user`, `metadata`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topograd.convert.tool_calls import NAME

Schema = Mapping[str, Any]
MAX_TOKENS = 1_000_000
MAX_TEXT = 8 * 2**20
MAX_STOPS, MAX_STOP = 16, 200
MAX_GRAMMAR = 2**16
MAX_TOOLS = 128


class RequestError(Exception):
    """A bad request: a message, the HTTP status, the field at fault and OpenAI's error code."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


def unsupported(name: str, allowed: str) -> RequestError:
    """The error of a parameter of OpenAI's API that this server does not have."""
    return RequestError(
        f"not supported here: {name}; allowed is {allowed}", name, code="unsupported_parameter"
    )


@dataclass(frozen=True)
class Field:
    """A field: its schema, and its value if it is left out or null."""

    schema: Schema
    default: Any = None
    required: bool = False
    only: str | None = None
    """Of an unsupported parameter: the values that change nothing and are allowed."""


def text(words: str, most: int = MAX_TEXT, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, "description": words, **more}


def number(words: str, low: float, high: float, above: bool = False) -> Schema:
    least = "exclusiveMinimum" if above else "minimum"
    return {"type": "number", least: low, "maximum": high, "description": words}


def whole(words: str, low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, "description": words}


def switch(words: str) -> Schema:
    return {"type": "boolean", "description": words}


def many(items: Schema, words: str, low: int, high: int) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high, "description": words}


def one_of(words: str, *schemas: Schema) -> Schema:
    return {"anyOf": list(schemas), "description": words}


def choice(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def record(properties: Mapping[str, Schema], *required: str, others: bool = False, **more: Any) -> Schema:
    needed = {"required": list(required)} if required else {}
    closed = {} if others else {"additionalProperties": False}
    return {"type": "object", "properties": properties, **needed, **closed, **more}


TOKEN = whole("A token.", 0, 2**31 - 1)
TOKENS = many(TOKEN, "Tokens.", 1, MAX_TOKENS)
STOPS = many(text("A text.", MAX_STOP, minLength=1), "End before any of these.", 0, MAX_STOPS)
STOP = one_of("End before this text, or any of these.", text("A text.", MAX_STOP, minLength=1), STOPS)
LOGIT_BIAS = {
    "type": "object",
    "maxProperties": 1024,
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": number("What is added to the token's logit.", -100, 100),
    "description": "By token, what is added to its logit.",
}
IGNORED = {"type": "object", "description": "Ignored."}
SCHEMA = {"type": "object", "description": "A JSON schema."}
GRAMMAR = record(
    {
        "lark": text("A grammar as Lark has them.", MAX_GRAMMAR, minLength=1),
        "regex": text("A regular expression that the whole text matches.", MAX_GRAMMAR, minLength=1),
        "choice": many(text("A text.", MAX_GRAMMAR, minLength=1), "Texts of which one is written.", 1, 1000),
        "json_schema": SCHEMA,
    },
    minProperties=1,
    maxProperties=1,
    description="What the text must be: one of lark, regex, choice and json_schema.",
)
FORMATS = choice("text", "json_object", "json_schema")
NAMED_SCHEMA = {
    "name": text("A name.", 100),
    "description": text("A description.", MAX_GRAMMAR),
    "schema": SCHEMA,
    "strict": {"type": "boolean"},
}
RESPONSE_FORMAT = record(
    {"type": FORMATS, "json_schema": record(NAMED_SCHEMA)},
    "type",
    description="Text, any JSON object, or JSON of a schema.",
)
SHARED: dict[str, Field] = {
    "model": Field(text("A model id: a name, or name:depth.", 300)),
    "temperature": Field(
        number("0 is greedy: the likeliest token each time. The default is 1, as in OpenAI's API.", 0, 100),
        1.0,
    ),
    "top_p": Field(
        number("Sample from the likeliest tokens of this total probability.", 0, 1, above=True), 1.0
    ),
    "top_k": Field(whole("Sample from this many likeliest tokens; 0 or -1 is all.", -1, 2**31 - 1)),
    "min_p": Field(number("Sample from tokens with this share of the largest probability.", 0, 1)),
    "n": Field(whole("Number of texts for each prompt.", 1, 128), 1),
    "stop": Field(STOP, ()),
    "seed": Field(whole("Seed of the sampling; random if left out.", -(2**63), 2**63 - 1)),
    "stream": Field(switch("Respond with server-sent events."), False),
    "stream_options": Field(
        record({"include_usage": {"type": "boolean"}, "include_obfuscation": {"type": "boolean"}}), {}
    ),
    "depth": Field(text("Decode strategy: full, prefix:1, speculate, wand:flip-rate:0.001.", 300)),
    "specialists": Field(many(text("A name.", 300), "Specialists to compose with the base.", 0, 16), ()),
    "weights": Field(many(number("A weight.", 0, 1e6, above=True), "One for each specialist.", 0, 16)),
    "stages": Field(
        switch("Add `tokens` to each choice: the exit of each token, and whether it was drafted."), False
    ),
    "ignore_eos": Field(switch("Continue after a stop token."), False),
    "user": Field(text("Ignored.", 2**16)),
    "metadata": Field(IGNORED),
    "store": Field(switch("Ignored: nothing is stored.")),
    "service_tier": Field(text("Ignored.", 100)),
    "presence_penalty": Field(number("Taken off the logits of tokens that the text has.", -2, 2), 0.0),
    "frequency_penalty": Field(number("The same, for each time that the text has a token.", -2, 2), 0.0),
    "repetition_penalty": Field(
        number("Divides the logits of tokens that prompt or text have.", 0, 10, above=True), 1.0
    ),
    "logit_bias": Field(LOGIT_BIAS, {}),
    "grammar": Field(GRAMMAR),
    "stop_token_ids": Field(many(TOKEN, "End before any of these tokens.", 0, 1024), ()),
}
COMPLETION = SHARED | {
    "prompt": Field(
        one_of(
            "A text or its tokens, or several.",
            text("A text."),
            many(text("A text."), "Texts.", 1, 128),
            TOKENS,
            many(TOKENS, "Texts as tokens.", 1, 128),
        ),
        "",
    ),
    "max_tokens": Field(whole("Maximum number of tokens.", 0, MAX_TOKENS), 16),
    "echo": Field(switch("Return the prompt before the text."), False),
    "logprobs": Field(whole("Log-probabilities, with this many alternatives.", 0, 20)),
    "best_of": Field(whole("Not supported: only the value of n.", 1, 128)),
    "suffix": Field({"type": "null", "description": "Not supported."}, only="null"),
}
TOOL_NAME = text("The function's name.", 128, minLength=1, pattern=f"^{NAME}$")
TOOL_FIELDS = {
    "name": TOOL_NAME,
    "description": text("What it does.", MAX_GRAMMAR),
    "parameters": SCHEMA,
    "strict": switch("Ignored: arguments of forced calls always fit."),
}
TOOL = record({"type": choice("function"), "function": record(TOOL_FIELDS, "name")}, "type", "function")
TOOL_CHOICE = one_of(
    "none, auto, required, or a function by its name.",
    choice("none", "auto", "required"),
    record({"type": choice("function"), "function": record({"name": TOOL_NAME}, "name")}, "type", "function"),
)
TOOL_CALL = record(
    {
        "id": text("An id.", 200),
        "type": choice("function"),
        "function": record({"name": TOOL_NAME, "arguments": text("JSON.")}, "name", others=True),
    },
    "function",
    others=True,
)
TEXT_PART = record({"type": choice("text"), "text": text("A text.")}, "type", "text")
MESSAGE = record(
    {
        "role": text("Role of the author.", 100, minLength=1),
        "content": one_of(
            "Content of the message.",
            text("A text."),
            {"type": "null"},
            many(TEXT_PART, "Parts of text.", 0, 1000),
        ),
        "name": text("Name of the author.", 100),
        "tool_calls": many(TOOL_CALL, "Calls that the assistant made.", 0, 128),
        "tool_call_id": text("The call that this is the result of.", 200),
    },
    "role",
    others=True,
)
CONVERTED = ("model", "temperature", "top_p", "top_k", "seed", "depth", "specialists", "weights", "stream")
"""Fields that /v1/responses and /v1/messages hand to the chat as they are."""
CHAT = SHARED | {
    "messages": Field(many(MESSAGE, "The conversation.", 1, 10_000), required=True),
    "max_tokens": Field(whole("Maximum number of tokens.", 0, MAX_TOKENS)),
    "max_completion_tokens": Field(whole("Maximum number of tokens.", 0, MAX_TOKENS)),
    "logprobs": Field(switch("Log-probabilities of the tokens."), False),
    "top_logprobs": Field(whole("With this many alternatives.", 0, 20)),
    "response_format": Field(RESPONSE_FORMAT),
    "tools": Field(many(TOOL, "Functions that the model may call.", 0, MAX_TOOLS), ()),
    "tool_choice": Field(TOOL_CHOICE),
    "parallel_tool_calls": Field(switch("Whether a text may have several calls."), True),
    "reasoning_effort": Field(text("Ignored.", 100)),
}
EMBEDDING = {
    "model": SHARED["model"],
    "input": Field(
        one_of(
            "A text or its tokens, or several.",
            text("A text.", minLength=1),
            many(text("A text.", minLength=1), "Texts.", 1, 128),
            TOKENS,
            many(TOKENS, "Texts as tokens.", 1, 128),
        ),
        required=True,
    ),
    "encoding_format": Field(choice("float", "base64"), "float"),
    "pooling": Field(choice("mean", "last"), "mean"),
    "dimensions": Field(whole("Not supported.", 1, 2**20)),
    "depth": Field(text("full or prefix:J.", 300)),
    "user": SHARED["user"],
}
TOKENIZE = {
    "model": Field(text("A model id.", 300)),
    "prompt": Field(text("A text.")),
    "content": Field(text("A text: another name for prompt.")),
    "add_special_tokens": Field(switch("With the special tokens of a prompt."), True),
}
DETOKENIZE = {
    "model": Field(text("A model id.", 300)),
    "tokens": Field(many(TOKEN, "Tokens.", 0, MAX_TOKENS), required=True),
}
CANDIDATES = {
    "model": Field(text("A model id.", 300)),
    "tokens": Field(TOKENS, required=True),
    "top": Field(whole("Number of candidates of each stage.", 1, 20), 5),
}


def to_function(name: str, parameters: Schema | None, description: str | None) -> dict[str, Any]:
    """A tool of another interface as the chat has them."""
    given = {"name": name, "parameters": parameters, "description": description}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


def joined(content: str | Sequence[Mapping[str, Any]], field: str, kinds: Sequence[str], allowed: str) -> str:
    """The text of a content, or of its parts of text; KeyError or TypeError where one is not whole."""
    if isinstance(content, str):
        return content
    if any(part["type"] not in kinds for part in content):
        raise unsupported(field, allowed)
    return "".join(part["text"] for part in content)


def to_params(given: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a chat: what another interface hands over as it is, and what was made of the rest."""
    whole = {name: given[name] for name in CONVERTED if name in given} | dict(made)
    return {name: value for name, value in whole.items() if value not in (None, ())}


def read(fields: Mapping[str, Field], given: object) -> dict[str, Any]:
    """The fields of a request's JSON, with defaults; RequestError where one does not fit."""
    if not isinstance(given, dict):
        raise RequestError('the body is not a JSON object; send one, such as {"prompt": "def "}')
    for name in given:
        if name not in fields:
            raise RequestError(
                f"the field {str(name)[:100]!r} is unknown here; known are {', '.join(fields)}",
                str(name)[:100],
                code="unknown_parameter",
            )
    params = {}
    for name, field in fields.items():
        value = given.get(name)
        if value is None:
            if field.required:
                raise RequestError(
                    f"the field {name!r} is missing; it is required", name, code="missing_required_parameter"
                )
            value = field.default
        elif (problem := fault(field.schema, value)) is not None:
            if field.only is not None:
                raise unsupported(name, field.only)
            raise RequestError(f"{name} {problem}", name, code="invalid_value")
        params[name] = value
    return params


def fault(schema: Schema, value: object) -> str | None:
    """The fault of a value, as the end of a sentence; None if it has none."""
    if "anyOf" in schema:
        faults = [fault(each, value) for each in schema["anyOf"]]
        if None in faults:
            return None
        kinds = [_kind(each) for each in schema["anyOf"]]
        fitting = [each for kind, each in zip(kinds, faults, strict=True) if isinstance(value, kind)]
        return fitting[0] if len(fitting) == 1 else f"is none of what is allowed: {schema['description']}"
    if not isinstance(value, _kind(schema)) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return f"is {_shown(value)}; it must be of type {schema['type']}"
    check = {"string": _text_fault, "number": _number_fault, "integer": _number_fault, "array": _array_fault}
    return check.get(schema["type"], _object_fault)(schema, value)


def _kind(schema: Schema) -> type | tuple[type, ...]:
    kinds: dict[str, type | tuple[type, ...]] = {
        "string": str, "number": (int, float), "integer": int, "boolean": bool,
        "array": list, "object": dict, "null": type(None),
    }  # fmt: skip
    return kinds[schema["type"]]


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _text_fault(schema: Schema, value: Any) -> str | None:
    least, most = schema.get("minLength", 0), schema.get("maxLength", MAX_TEXT)
    if not least <= len(value) <= most:
        return f"has {len(value)} characters; it must have {least} to {most}"
    if "enum" in schema and value not in schema["enum"]:
        return f"is {_shown(value)}; it must be one of {', '.join(schema['enum'])}"
    if not re.search(schema.get("pattern", ""), value):
        return f"is {_shown(value)}; it must be like {schema['pattern']}"
    if any("\ud800" <= character <= "\udfff" for character in value):
        return "has half of a surrogate pair, which is no text; send UTF-8"
    return None


def _number_fault(schema: Schema, value: Any) -> str | None:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema["maximum"]
    if "exclusiveMinimum" in schema and value == low:
        return f"is {value}; it must be above {low} and at most {high}"
    if isinstance(value, float) and not math.isfinite(value):
        return "is not finite; give a number"
    return None if low <= value <= high else f"is {_shown(value)}; it must be from {low} to {high}"


def _array_fault(schema: Schema, value: Sequence[object]) -> str | None:
    low, high = schema.get("minItems", 0), schema["maxItems"]
    if not low <= len(value) <= high:
        return f"has {len(value)} items; it must have {low} to {high}"
    for place, item in enumerate(value):
        if (problem := fault(schema["items"], item)) is not None:
            return f"[{place}] {problem}"
    return None


def _object_fault(schema: Schema, value: Any) -> str | None:
    if schema["type"] != "object":
        return None
    least, most = schema.get("minProperties", 0), schema.get("maxProperties", 1000)
    if not least <= len(value) <= most:
        return f"has {len(value)} entries; it must have {least} to {most}"
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    pattern = schema.get("propertyNames", {}).get("pattern", "")
    for name in schema.get("required", ()):
        if name not in value:
            return f"has no {name!r}; it is required"
    for name, item in value.items():
        absent = item is None and name not in schema.get("required", ())
        if name in known and not absent and (problem := fault(known[name], item)) is not None:
            return f".{name} {problem}"
        if name not in known and others is False:
            return f"has {str(name)[:60]!r}; it may have {', '.join(known)}"
        if not re.search(pattern, name):
            return f"has {str(name)[:60]!r}; names must be like {pattern}"
        if name not in known and isinstance(others, Mapping) and (problem := fault(others, item)) is not None:
            return f".{name} {problem}"
    return None
