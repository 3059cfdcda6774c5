"""`generate --json-schema`: what is written fits the schema, at any depth; bad files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from calls import Call
from topograd.pretrained import REFERENCE

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "maximum": 9}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("depth", ["full", "prefix:1", "speculate"])
def test_what_is_written_fits(call: Call, tmp_path: Path, depth: str) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    answer = call(
        "generate",
        REFERENCE,
        "--prompt",
        "x = ",
        "--json-schema",
        file,
        "--tokens",
        64,
        "--depth",
        depth,
        "--json",
    )
    jsonschema.validate(json.loads(answer.json["text"]), SCHEMA)


def test_a_text_that_ends_too_early_is_said(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    words = ["generate", REFERENCE, "--prompt", "x = ", "--json-schema", file, "--json", "--tokens"]
    assert "--tokens 3 ended the text before its JSON was whole" in call(*words, 3).err
    assert "whole" not in call(*words, 64).err


@pytest.mark.parametrize("content", ["{", "[]", '{"type": "frob"}', '{"a": "' + "x" * 70_000 + '"}', None])
def test_a_file_that_has_no_schema_is_refused(call: Call, tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_text(content)
    answer = call("generate", REFERENCE, "--prompt", "x", "--json-schema", file, "--tokens", 8, "--json")
    assert "schema" in answer.refusal or "grammar" in answer.refusal
