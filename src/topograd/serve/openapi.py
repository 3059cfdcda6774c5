"""The OpenAPI document, from the same fields that requests are read by."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from topograd.serve.request_schema import CANDIDATES, CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Field

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
REFUSALS = {
    "400": "Something given cannot be done.",
    "401": "The token is missing or wrong.",
    "403": "The request comes from another site's page.",
    "404": "There is no such model.",
    "405": "The address takes another method.",
    "408": "The body took too long to arrive.",
    "413": "The body is too long.",
    "429": "Too many texts wait already.",
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
            "description": "OpenAI's API, with depth.",
        },
        "paths": {
            "/v1/models": {
                "get": _get("The models, with their depths as ids.", _JSON, {"data": {"type": "array"}})
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
            "/v1/chat/completions": {"post": _post("Answer a conversation.", CHAT, texts, streams=True)},
            "/v1/candidates": {
                "post": _post(
                    "What each stage would have written.", CANDIDATES, {"stages": {"type": "array"}}
                )
            },
            "/tokenize": {"post": _post("A text's tokens.", TOKENIZE, tokens)},
            "/detokenize": {"post": _post("The text of tokens.", DETOKENIZE, {"prompt": {"type": "string"}})},
            "/tokenizer_info": {
                "get": _get("Special tokens and the chat template.", _JSON, {"vocab": {"type": "integer"}})
            },
            "/health": {"get": _get("Whether the server can answer.", _JSON, {"status": {"type": "string"}})},
            "/metrics": {"get": _get("Counters for Prometheus.", "text/plain")},
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _get(words: str, kind: str, properties: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"summary": words, "responses": {"200": _answer(kind, properties), **_refusals()}}


def _post(
    words: str, fields: Mapping[str, Field], properties: Mapping[str, Any], streams: bool = False
) -> dict[str, Any]:
    good = _answer(_JSON, properties)
    if streams:
        good["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    body = {_JSON: {"schema": schema(fields)}}
    return {
        "summary": words,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": good, **_refusals()},
    }


def _answer(kind: str, properties: Mapping[str, Any] | None) -> dict[str, Any]:
    plain = {"type": "string"}
    whole = (
        plain
        if properties is None
        else {"type": "object", "properties": properties, "required": [*properties]}
    )
    return {"description": "Done.", "content": {kind: {"schema": whole}}}


def _refusals() -> dict[str, Any]:
    return {
        status: {"description": words, "content": {_JSON: {"schema": ERROR}}}
        for status, words in REFUSALS.items()
    }


def schema(fields: Mapping[str, Field]) -> dict[str, Any]:
    """The JSON schema of a request; a field that is null is left out."""
    return {
        "type": "object",
        "properties": {
            name: field.schema if field.required else {"anyOf": [field.schema, {"type": "null"}]}
            for name, field in fields.items()
        },
        "required": [name for name, field in fields.items() if field.required],
        "additionalProperties": False,
    }
