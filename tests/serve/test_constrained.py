"""Requests with a schema, a grammar or a choice: what comes back fits, at every depth, and others go on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from topograd.decode.grammar import Grammar
from topograd.decode.sampling import Sampling
from topograd.serve.server import Running

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["read", "write"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 64},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["kind", "size", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
DEPTHS = ("", ":full", ":prefix-1", ":wand", ":speculate", ":speculate-4", ":speculate-lookup")


@pytest.fixture(scope="module")
def chat(running: Running, client: httpx.Client) -> Callable[..., dict[str, Any]]:
    def ask(suffix: str = "", **fields: Any) -> dict[str, Any]:
        body = {"model": running.served.name + suffix, "messages": [{"role": "user", "content": "x = "}]}
        answer = client.post("/v1/chat/completions", json=body | {"temperature": 0} | fields)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    return ask


def test_a_schema_at_every_depth(chat: Callable[..., dict[str, Any]]) -> None:
    texts = {}
    for suffix in DEPTHS:
        choice = chat(suffix, response_format=FORMAT, max_tokens=90)
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert choice["finish_reason"] == "stop"
        texts[suffix] = choice["message"]["content"]
    assert len({texts[s] for s in ("", ":full", ":speculate", ":speculate-4", ":speculate-lookup")}) == 1


def test_openais_client_parses_what_it_asked_for(running: Running) -> None:
    with openai.OpenAI(base_url=running.address() + "/v1", api_key="none", max_retries=0) as client:
        for stream in (False, True):
            asked: dict[str, Any] = {
                "model": running.served.name,
                "messages": [{"role": "user", "content": "x = "}],
                "response_format": FORMAT,
                "max_completion_tokens": 90,
                "seed": 4,
            }
            if stream:
                chunks = client.chat.completions.create(**asked, stream=True)
                content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            else:
                content = client.chat.completions.create(**asked).choices[0].message.content or ""
            jsonschema.validate(json.loads(content), SCHEMA)


@pytest.mark.parametrize("depth", ["full", "prefix:1", "speculate:lookup", "speculate:3"])
def test_grammars_of_completions(ask: Callable[..., dict[str, Any]], depth: str) -> None:
    fields = {"max_tokens": 40, "depth": depth, "temperature": 1, "seed": 1, "n": 3}
    for grammar, fits in (
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdecimal()),
        ({"lark": 'start: "(" /[a-z]{1,3}/ ")"'}, lambda text: text[0] + text[-1] == "()"),
        ({"json_schema": {"type": "boolean"}}, lambda text: isinstance(json.loads(text), bool)),
    ):
        for choice in ask(grammar=grammar, **fields)["choices"]:
            assert fits(choice["text"]), (grammar, choice["text"])
            assert choice["finish_reason"] == "stop"


def test_json_mode_and_a_text_that_is_cut(chat: Callable[..., dict[str, Any]]) -> None:
    assert isinstance(
        json.loads(chat(response_format={"type": "json_object"}, max_tokens=64)["message"]["content"]), dict
    )
    choice = chat(response_format=FORMAT, max_tokens=3)
    assert choice["message"]["content"].startswith('{"')
    assert choice["finish_reason"] == "length"
    assert chat(response_format={"type": "text"}, max_tokens=3) == chat(max_tokens=3)


def test_scores_and_stages_of_constrained_drafts(ask: Callable[..., dict[str, Any]]) -> None:
    """One entry for each token, also where a draft ends the text; the scores are the model's own."""
    fields = {"grammar": {"choice": ["def read(self)", "def x"]}, "max_tokens": 30, "logprobs": 1}
    full, drafted = (ask(depth=depth, **fields)["choices"][0] for depth in ("full", "speculate:6"))
    assert full["text"] == drafted["text"]
    assert full["logprobs"]["tokens"] == drafted["logprobs"]["tokens"]
    assert drafted["logprobs"]["token_logprobs"] == pytest.approx(
        full["logprobs"]["token_logprobs"], abs=1e-3
    )


def test_a_grammar_that_fails_ends_its_own_text_and_no_other(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    endless = desk.model.grammars.compile(Grammar.lark('start: "a" start'))
    bad = desk.job([1, 2], 8, "speculate:2", sampling=Sampling(grammar=endless))
    good = [desk.job([1, 2], 8, "speculate:2") for _ in range(2)]
    desk.scheduler.add([good[0], bad, good[1]])
    desk.run()
    assert [desk.finish(job) for job in (good[0], bad, good[1])] == ["length", "error", "length"]
    assert (desk.told[bad.number][-1].status, desk.tokens(bad)) == (400, [])
    assert desk.tokens(good[0]) == desk.tokens(good[1])


BAD: list[tuple[str, dict[str, Any]]] = [
    ("response_format", {"response_format": {"type": "xml"}}),
    (
        "response_format",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
    ),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}),
    ("grammar", {"grammar": {"regex": "(("}}),
    ("grammar", {"grammar": {"lark": "start: nothing"}}),
    ("grammar", {"grammar": {"lark": "a", "regex": "b"}}),
    ("grammar", {"grammar": {"lark": "x" * 70_000}}),
    ("grammar", {"grammar": {"choice": [""]}}),
    ("grammar", {"grammar": {"gbnf": "root ::= x"}}),
    ("grammar", {"grammar": {}}),
    ("grammar", {"grammar": {"regex": "a"}, "response_format": {"type": "json_object"}}),
    ("grammar", {"grammar": {"lark": 'start: "a" start'}}),
]


@pytest.mark.parametrize(("param", "fields"), BAD)
def test_what_cannot_be_done_is_refused(client: httpx.Client, param: str, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4} | fields
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "\n" not in error["message"]


WORDS = [
    "type",
    "object",
    "items",
    "$ref",
    "#",
    "#/$defs/a",
    "$defs",
    "a",
    "anyOf",
    "allOf",
    "pattern",
    "^(a|b)*$",
]
WORDS += [
    "properties",
    "minLength",
    "maxItems",
    "enum",
    "const",
    "not",
    "string",
    "array",
    "required",
    "format",
]


def test_random_schemas_are_done_or_refused(client: httpx.Client) -> None:
    """Each gets a status and one line; the server goes on."""
    random_ = random.Random(5)

    def value(depth: int) -> Any:
        kind = random_.randrange(6 if depth else 3)
        if kind < 2:
            return random_.choice([*WORDS, 0, 1, 7, 10**9, -1, True, None, 0.5])
        if kind == 2:
            return random_.choice(WORDS)
        if kind == 3:
            return [value(depth - 1) for _ in range(random_.randrange(4))]
        return {random_.choice(WORDS): value(depth - 1) for _ in range(random_.randrange(5))}

    statuses = set()
    for _ in range(150):
        body = {"prompt": "a", "max_tokens": 6, "grammar": {"json_schema": value(4)}}
        answer = client.post("/v1/completions", json=body)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400), answer.text
    assert statuses == {200, 400}
    assert client.get("/health").json()["status"] == "ok"
