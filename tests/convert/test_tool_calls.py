"""Tool calls: every family's format, in whatever parts the text comes; and what is no call stays text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from topograd.convert.tool_calls import (
    HERMES,
    LLAMA,
    MAX_HELD,
    MISTRAL,
    NAMED,
    CallFormat,
    CallParser,
    describe,
    for_template,
)
from topograd.decode.grammar import Grammar, GrammarCompiler
from topograd.errors import ConfigError
from topograd.pretrained import REFERENCE
from topograd.runs.session import open_session

NAMES = ["add", "get_weather"]
A, B = {"a": 1, "b": [2, {"c": "}]"}]}, {"city": 'Zürich "x" \\ {', "n": {}}


def parsed(form: CallFormat, parts: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """Content, and calls with their arguments."""
    parser = CallParser(form, NAMES)
    deltas = [delta for part in parts for delta in parser.feed(part)] + parser.feed("", last=True)
    content = "".join(delta.text for delta in deltas if delta.call is None)
    calls = [
        (delta.name, "".join(other.text for other in deltas if other.call == delta.call))
        for delta in deltas
        if delta.name
    ]
    return content, [(name, json.loads(text)) for name, text in calls]


def call(name: str, given: Any, key: str = "arguments", **more: Any) -> str:
    return json.dumps({"name": name, key: given, **more}, ensure_ascii=False)


TAG = "<tool_call>"
BOTH = [("add", A), ("get_weather", B)]
TEXTS: list[tuple[CallFormat, str, str, list[tuple[str, Any]]]] = [
    (
        HERMES,
        f"<tool_call>\n{call('add', A)}\n</tool_call>\n<tool_call>{call('get_weather', B)}</tool_call>",
        "",
        BOTH,
    ),
    (HERMES, f"Let me see.\n\n<tool_call>\n{call('add', A)}\n</tool_call>", "Let me see.", BOTH[:1]),
    (HERMES, f"<tool_call>[{call('add', A)}, {call('get_weather', B)}]</tool_call>", "", BOTH),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": 1, "b": [2, {"c": "}]"}]}, "name": "add"}</tool_call>',
        "",
        BOTH[:1],
    ),
    (HERMES, f"<tool_call>{call('add', json.dumps(A))}</tool_call> Done.", "Done.", BOTH[:1]),
    (HERMES, f"<tool_call>\n{call('add', A)}", "", BOTH[:1]),
    (LLAMA, f"{call('add', A, 'parameters')}; {call('get_weather', B, 'parameters')}", "", BOTH),
    (LLAMA, f"<|python_tag|>{call('get_weather', B, 'parameters')}", "", BOTH[1:]),
    (LLAMA, f"\n {call('get_weather', B, 'parameters')}", "", BOTH[1:]),
    (MISTRAL, f"[TOOL_CALLS][{call('add', A)}, {call('get_weather', B, id='123456789')}]", "", BOTH),
    (MISTRAL, f"[TOOL_CALLS] [{call('add', A)}]", "", BOTH[:1]),
    (NAMED, f"[TOOL_CALLS]add[ARGS]{json.dumps(A)}[TOOL_CALLS]get_weather[ARGS]{json.dumps(B)}", "", BOTH),
    (NAMED, f"Yes.[TOOL_CALLS]add[CALL_ID]abc123456[ARGS]{json.dumps(A)}", "Yes.", BOTH[:1]),
]
NO_CALLS = [
    (HERMES, "a < b and <tool> are text, <tool_cal too"),
    (HERMES, "<tool_call>not JSON</tool_call> then more"),
    (HERMES, f"<tool_call>{call('unknown', A)}</tool_call>"),
    (HERMES, '<tool_call>{"name": "add", "arguments": 5}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "argum'),
    (HERMES, "<tool_call>"),
    (LLAMA, '{"name": "Ada", "age": 3}'),
    (LLAMA, "text first " + call("add", A, "parameters")),
    (MISTRAL, "[TOOL_CALLS] and nothing"),
    (MISTRAL, "[TOOL"),
    (NAMED, f"[TOOL_CALLS]other[ARGS]{json.dumps(A)}"),
]


def cut(text: str, chance: random.Random) -> list[str]:
    places = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(0, 12))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_calls_of_every_family(
    form: CallFormat, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    chance = random.Random(1)
    for parts in [[text], list(text), *(cut(text, chance) for _ in range(20))]:
        assert parsed(form, parts) == (content, calls), parts


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_stays_text(form: CallFormat, text: str) -> None:
    chance = random.Random(2)
    for parts in [[text], list(text), *(cut(text, chance) for _ in range(20))]:
        assert parsed(form, parts) == (text, []), parts


def test_random_texts_lose_nothing_and_never_fail() -> None:
    """The whole text and its characters one by one give the same."""
    chance = random.Random(3)
    words = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "add", "{", "}", "<|python_tag|>", "]"]
    words += ['{"name": "add", "arguments": ', '{"name": "add", "parameters": {}}', "[", "x"]
    words += ['"', "\\", ", ", ";", " ", "\n"]
    for form in (HERMES, LLAMA, MISTRAL, NAMED):
        for _ in range(300):
            text = "".join(chance.choices(words, k=chance.randint(1, 12)))
            made = []
            for parts in ([text], list(text)):
                parser = CallParser(form, NAMES)
                deltas = [d for part in parts for d in parser.feed(part)] + parser.feed("", last=True)
                content = "".join(d.text for d in deltas if d.call is None)
                made.append((content, [[d.text for d in deltas if d.call == k] for k in range(parser.calls)]))
                if not parser.calls:
                    assert content == text, (form, parts)
            assert made[0][0] == made[1][0], (form, text)
            assert [*map("".join, made[0][1])] == [*map("".join, made[1][1])]


def test_arguments_are_released_as_they_come() -> None:
    parser = CallParser(HERMES, NAMES)
    seen = [parser.feed(part) for part in ('<tool_call>{"name": "add", "arguments": ', '{"a"', ": 1")]
    assert ["".join(delta.text for delta in some) for some in seen] == ["", '{"a"', ": 1"]


def test_what_never_ends_is_released() -> None:
    """Not held back, nor looked at again and again, beyond a bound."""
    parser = CallParser(LLAMA, NAMES)
    made = [parser.feed('{"a": {"b": "c"}, ' if k == 0 else '"x": {}, ') for k in range(MAX_HELD // 4)]
    assert sum(len(delta.text) for some in made for delta in some) > MAX_HELD
    assert parser.calls == 0


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL, NAMED])
@pytest.mark.parametrize("several", [True, False])
def test_a_grammar_allows_what_the_parser_reads(form: CallFormat, several: bool) -> None:
    tokenizer = open_session(REFERENCE).tokenizer
    integer, string = {"type": "integer"}, {"type": "string"}
    add = {"properties": {"a": integer}, "required": ["a"], "additionalProperties": False}
    weather = {"type": "object", "properties": {"city": string}, "required": ["city"]}
    schemas: dict[str, Any] = {
        "add": {"type": "object", **add},
        "get_weather": {"$ref": "#/$defs/w", "$defs": {"w": weather}},
    }
    compiled = GrammarCompiler(tokenizer).compile(Grammar.calls(form.lark(schemas, several, {})))
    one, two = ("add", {"a": 12}), ("get_weather", {"city": "Bern"})
    spelled = {
        "hermes": lambda calls: "\n".join(f"<tool_call>\n{call(*each)}\n</tool_call>" for each in calls),
        "llama": lambda calls: "; ".join(call(name, given, "parameters") for name, given in calls),
        "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(call(*each) for each in calls)}]",
        "named": lambda calls: "".join(
            f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls
        ),
    }[form.name]

    def fits(text: str) -> bool:
        tokens = tokenizer.encode(text)
        matcher = compiled.start()
        return matcher.fits([], tokens) == len(tokens)

    assert fits(spelled([one]))
    assert fits(spelled([two]))
    assert fits(spelled([two, one])) is several
    assert not fits(spelled([("add", {"a": "x"})]))
    assert not fits(spelled([("other", {})]))
    assert not fits("Some text")
    assert parsed(form, [spelled([one, two])]) == ("", [one, two])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", HERMES),
        ("{{ '[TOOL_CALLS]' }}", MISTRAL),
        ("{{ '[TOOL_CALLS]' }}{{ '[ARGS]' }}", NAMED),
        ("{{ '<|python_tag|>' }}", LLAMA),
        ("{{ messages }}", HERMES),
        (None, HERMES),
    ],
)
def test_formats_are_read_off_templates(template: str | None, form: CallFormat) -> None:
    assert CallFormat.of(template) is form


def test_messages_for_templates() -> None:
    called: Any = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    made = for_template(messages)
    assert made[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    tools = [{"type": "function", "function": {"name": "add"}}]
    told = describe(made, tools)
    assert [each["role"] for each in told] == ["system", "user", "assistant", "user"]
    assert '"name": "add"' in told[0]["content"]
    assert parsed(HERMES, [told[2]["content"]]) == ("", [("add", {"a": 1})])
    assert told[3]["content"] == "<tool_response>\n2\n</tool_response>"
    called["function"]["arguments"] = "[1]"
    with pytest.raises(ConfigError) as problem:
        for_template(messages)
    assert problem.value.setting == "messages"
