"""OpenAPI document of the server, made from the request fields."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from topograd.serve import anthropic, openai_responses
from topograd.serve.request_schema import (
    CANDIDATES,
    CHAT,
    COMPLETION,
    DETOKENIZE,
    EMBEDDING,
    TOKENIZE,
    Field,
)

_JSON = "application/json"
_TEXT, _NUMBER, _LIST, _OBJECT = ({"type": kind} for kind in ("string", "integer", "array", "object"))
_TEXT_OR_NULL = {"type": ["string", "null"]}


def _all(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


ERROR = _all(
    {"error": _all({"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL})}
)
THEIR_ERROR = _all({"type": {"const": "error"}, "error": _all({"type": _TEXT, "message": _TEXT})})
"""As Anthropic has it."""
REFUSALS = {
    "400": "A field is wrong or not supported.",
    "401": "The token is missing or wrong.",
    "403": "The request comes from another site's page.",
    "404": "There is no such model.",
    "405": "The route takes another method.",
    "408": "The body took too long to arrive.",
    "413": "The body is too long.",
    "429": "The queue is full.",
    "500": "A bug of the server.",
    "503": "The server is stopping.",
    "504": "It took longer than the server allows.",
}


def document() -> dict[str, Any]:
    """The whole document."""
    texts = {"choices": _LIST, "usage": _OBJECT, "timings": _OBJECT}
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    got: dict[str, Any] = {
        "/v1/models": _get("The models, and an id for each depth.", {"data": _LIST}),
        "/v1/models/{model}": {**_get("One model.", {"id": _TEXT}), "parameters": [model]},
        "/tokenizer_info": _get("Special tokens and the chat template.", {"vocab": _NUMBER}),
        "/health": _get("Whether the server is alive.", {"status": _TEXT}),
        "/metrics": _get("Counters for Prometheus.", None),
    }
    posted = {
        "/v1/completions": _post("Continue a text.", COMPLETION, texts, streams=True),
        "/v1/chat/completions": _post("Continue a conversation.", CHAT, texts, streams=True),
        "/v1/responses": _post(
            "Continue a conversation: OpenAI's newer interface.",
            openai_responses.FIELDS,
            {"output": _LIST, "usage": _OBJECT},
            streams=True,
        ),
        "/v1/messages": _post(
            "Continue a conversation: Anthropic's interface.",
            anthropic.FIELDS,
            {"content": _LIST, "usage": _OBJECT},
            streams=True,
            error=THEIR_ERROR,
        ),
        "/v1/messages/count_tokens": _post(
            "The tokens of a conversation.", anthropic.COUNTED, {"input_tokens": _NUMBER}, error=THEIR_ERROR
        ),
        "/v1/candidates": _post(
            "The likeliest tokens of each stage at each position.", CANDIDATES, {"stages": _LIST}
        ),
        "/v1/embeddings": _post("Embeddings of texts by the states of an exit.", EMBEDDING, {"data": _LIST}),
        "/tokenize": _post(
            "A text's tokens.", TOKENIZE, {"tokens": {"type": "array", "items": _NUMBER}, "count": _NUMBER}
        ),
        "/detokenize": _post("The text of tokens.", DETOKENIZE, {"prompt": _TEXT}),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "topograd",
            "version": version("topograd"),
            "description": (
                "OpenAI's and Anthropic's interfaces with a decode strategy for each request (`depth`). As "
                "there, the default temperature is 1; 0 is greedy."
            ),
        },
        "paths": {path: {"get": each} for path, each in got.items()}
        | {path: {"post": each} for path, each in posted.items()},
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _get(summary: str, properties: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": _response(properties), **_refusals()}}


def _post(
    summary: str,
    fields: Mapping[str, Field],
    properties: Mapping[str, Any],
    streams: bool = False,
    error: Mapping[str, Any] = ERROR,
) -> dict[str, Any]:
    good = _response(properties)
    if streams:
        good["content"]["text/event-stream"] = {"schema": _TEXT}
    body = {_JSON: {"schema": schema(fields)}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": good, **_refusals(error)},
    }


def _response(properties: Mapping[str, Any] | None) -> dict[str, Any]:
    """A good response: JSON with these properties, or plain text."""
    kind, whole = ("text/plain", _TEXT) if properties is None else (_JSON, _all(properties))
    return {"description": "Done.", "content": {kind: {"schema": whole}}}


def _refusals(error: Mapping[str, Any] = ERROR) -> dict[str, Any]:
    return {
        status: {"description": words, "content": {_JSON: {"schema": error}}}
        for status, words in REFUSALS.items()
    }


def schema(fields: Mapping[str, Field]) -> dict[str, Any]:
    """The JSON schema of a request; null is the default of a field that is not required."""

    def optional(field: Field) -> dict[str, Any]:
        default = {} if field.default in (None, (), {}) else {"default": field.default}
        return {"anyOf": [field.schema, {"type": "null"}], **default}

    return {
        "type": "object",
        "properties": {
            name: field.schema if field.required else optional(field) for name, field in fields.items()
        },
        "required": [name for name, field in fields.items() if field.required],
        "additionalProperties": False,
    }
