"""OpenAPI document of the server, made from the request fields."""

from __future__ import annotations

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
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
THEIR_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
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
    texts = {"choices": {"type": "array"}, "usage": {"type": "object"}, "timings": {"type": "object"}}
    tokens = {"tokens": {"type": "array", "items": {"type": "integer"}}, "count": {"type": "integer"}}
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
        "paths": {
            "/v1/models": {
                "get": _get("The models, and an id for each depth.", _JSON, {"data": {"type": "array"}})
            },
            "/v1/models/{model}": {
                "get": {
                    **_get("One model.", _JSON, {"id": {"type": "string"}}),
                    "parameters": [
                        {
                            "name": "model",
                            "in": "path",
                            "required": True,
                            "schema": {"type": "string", "minLength": 1},
                        }
                    ],
                }
            },
            "/v1/completions": {"post": _post("Continue a text.", COMPLETION, texts, streams=True)},
            "/v1/chat/completions": {"post": _post("Continue a conversation.", CHAT, texts, streams=True)},
            "/v1/responses": {
                "post": _post(
                    "Continue a conversation: OpenAI's newer interface.",
                    openai_responses.FIELDS,
                    {"output": {"type": "array"}, "usage": {"type": "object"}},
                    streams=True,
                )
            },
            "/v1/messages": {
                "post": _post(
                    "Continue a conversation: Anthropic's interface.",
                    anthropic.FIELDS,
                    {"content": {"type": "array"}, "usage": {"type": "object"}},
                    streams=True,
                    error=THEIR_ERROR,
                )
            },
            "/v1/messages/count_tokens": {
                "post": _post(
                    "The tokens of a conversation.",
                    anthropic.COUNTED,
                    {"input_tokens": {"type": "integer"}},
                    error=THEIR_ERROR,
                )
            },
            "/v1/candidates": {
                "post": _post(
                    "The likeliest tokens of each stage at each position.",
                    CANDIDATES,
                    {"stages": {"type": "array"}},
                )
            },
            "/v1/embeddings": {
                "post": _post(
                    "Embeddings of texts by the states of an exit.", EMBEDDING, {"data": {"type": "array"}}
                )
            },
            "/tokenize": {"post": _post("A text's tokens.", TOKENIZE, tokens)},
            "/detokenize": {"post": _post("The text of tokens.", DETOKENIZE, {"prompt": {"type": "string"}})},
            "/tokenizer_info": {
                "get": _get("Special tokens and the chat template.", _JSON, {"vocab": {"type": "integer"}})
            },
            "/health": {"get": _get("Whether the server is alive.", _JSON, {"status": {"type": "string"}})},
            "/metrics": {"get": _get("Counters for Prometheus.", "text/plain")},
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _get(summary: str, kind: str, properties: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": _response(kind, properties), **_refusals()}}


def _post(
    summary: str,
    fields: Mapping[str, Field],
    properties: Mapping[str, Any],
    streams: bool = False,
    error: Mapping[str, Any] = ERROR,
) -> dict[str, Any]:
    good = _response(_JSON, properties)
    if streams:
        good["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    body = {_JSON: {"schema": schema(fields)}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": good, **_refusals(error)},
    }


def _response(kind: str, properties: Mapping[str, Any] | None) -> dict[str, Any]:
    plain = {"type": "string"}
    whole = (
        plain
        if properties is None
        else {"type": "object", "properties": properties, "required": [*properties]}
    )
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
