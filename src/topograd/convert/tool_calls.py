r"""Tool calls in the texts of models: the formats of families, a parser of streams, grammars of forced calls.

    hermes     <tool_call>{"name": "f", "arguments": {...}}</tool_call>, once for each call
               (Hermes, Qwen 2.5 and 3, SmolLM; some write a list between the tags)
    llama      {"name": "f", "parameters": {...}}; {...}   the whole text, or behind <|python_tag|> (Llama 3)
    mistral    [TOOL_CALLS][{"name": "f", "arguments": {...}}, {...}]
    named      [TOOL_CALLS]f[ARGS]{...}, once for each call (Mistral since 2025)

`CallFormat.of` reads the format off a chat template. A template that knows no tools gets them described in a
system message, and calls and results as plain messages (`describe`): hermes then, as most models were taught.

`CallParser` takes a text in parts and says what is content and what belongs to a call. A call's arguments are
released as they come. Text that begins like a call and is none (no JSON, an unknown name) stays content, and
nothing of the text is lost but tags and the spaces around calls. In whatever parts a text comes, the content
and the calls are the same.

Cost: O(characters); of an object that does not begin with its name O(n²), so its length n is bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topograd.decode.grammar import SPACES
from topograd.decode.text import held_from
from topograd.errors import ConfigError

MAX_CALLS = 16
"""Calls of one text that a grammar allows."""
MAX_HELD = 2**14
"""Characters that may turn out to be a call whose name does not come first; more are content."""
NAME = r"[A-Za-z0-9_-]{1,128}"
_SKIPPED = re.compile(r"(?:[\s,;\]]|\[(?=[\s{\[]))*")
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*"({NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_NAMED = re.compile(rf"({NAME})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]+\s*)?\[ARGS\]\s*(?=\{{)")
_NAMED_BEGINS = re.compile(rf"(?:{NAME})?\s*(?:\[[A-Z_]*(?:\]\s*[A-Za-z0-9]*\s*(?:\[[A-Z_]*(?:\]\s*)?)?)?)?")


@dataclass(frozen=True)
class CallFormat:
    """How a family writes calls."""

    name: str
    opening: str
    closing: str = ""
    key: str = "arguments"
    bare: bool = False
    """Whether a text may begin with a call's brace."""

    @classmethod
    def of(cls, template: str | None) -> CallFormat:
        """The format of the models of a chat template; hermes where it says nothing."""
        text = template or ""
        if "[TOOL_CALLS]" in text:
            return NAMED if "[ARGS]" in text else MISTRAL
        if "<tool_call>" not in text and ("<|python_tag|>" in text or '"parameters":' in text):
            return LLAMA
        return HERMES

    def lark(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        several: bool,
        tokens: Mapping[str, int],
        content: Mapping[str, Any] | None = None,
    ) -> str:
        """A grammar of calls and nothing else: the schema of each tool's arguments by its name.

        `tokens` are the special tokens among the markers; `content` is the schema of JSON that may be
        written instead.
        """

        def marker(text: str) -> str:
            return f"<[{tokens[text]}]>" if text in tokens else json.dumps(text)

        numbered = list(enumerate(tools.items()))
        if self is NAMED:
            heads = [f"{json.dumps(name)} {marker('[ARGS]')} args_{i}" for i, (name, _) in numbered]
        else:
            begins = [json.dumps(f'{{"name": "{name}", "{self.key}": ') for name in tools]
            heads = [f'{begin} args_{i} "}}"' for i, begin in enumerate(begins)]
        opening = marker(self.opening)

        def again(item: str, between: str = "") -> str:
            return f" ({between} {item}){{0,{MAX_CALLS - 1}}}" if several else ""

        line, comma, semicolon = map(json.dumps, ("\n", ", ", "; "))
        calls = {
            "hermes": f"tagged{again('tagged', line)}\n"
            f"tagged: {opening} {line} call {line} {marker(self.closing)}",
            "llama": f"call{again('call', semicolon)}",
            "mistral": f'{opening} "[" call{again("call", comma)} "]"',
            "named": f"tagged{again('tagged')}\ntagged: {opening} call",
        }[self.name]
        lines = [f"start: calls{'' if content is None else ' | content'}", f"calls: {calls}"]
        lines += [f"call: {' | '.join(heads)}"]
        lines += [f"args_{i}: %json {_schema(schema)}" for i, (_, schema) in numbered]
        return "\n".join([*lines, *([] if content is None else [f"content: %json {_schema(content)}"])])


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA = CallFormat("llama", "<|python_tag|>", key="parameters", bare=True)
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]")
NAMED = CallFormat("named", "[TOOL_CALLS]")


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": SPACES})


@dataclass(frozen=True)
class Delta:
    """Some new text of an answer: content, or arguments of a call."""

    text: str
    call: int | None = None
    """The number of the call."""
    name: str = ""
    """The tool of a call that begins here."""


State = Callable[[bool], list[Delta] | None]
"""Takes some of the text that is held; None where it needs more."""


class CallParser:
    """Content and calls of one text."""

    def __init__(self, form: CallFormat, names: Sequence[str]) -> None:
        self.form, self.names = form, frozenset(names)
        self.calls = 0
        self._held, self._raw = "", ""
        """Text that is not decided yet; and what was skipped before it, should it be no call."""
        self._state: State = self._content
        self._depth, self._quoted, self._escaped = 0, False, False
        self._begun = self._wrapped = self._trim = False

    def feed(self, text: str, last: bool = False) -> list[Delta]:
        """What is sure now; with `last`, everything."""
        self._held += text
        made: list[Delta] = []
        while (some := self._state(last)) is not None:
            made += [delta for delta in some if delta.text or delta.name]
        return made

    def _content(self, last: bool) -> list[Delta] | None:
        if self._trim and self._held.strip():
            self._held, self._trim = self._held.lstrip(), False
        held, opening = self._held, self.form.opening
        if self.form.bare and not self._begun and held.lstrip().startswith("{"):
            self._enter(held[: -len(held.lstrip())], held.lstrip())
            return []
        place = held.find(opening)
        if place >= 0:
            content = held[:place].rstrip()
            self._enter(held[len(content) : place + len(opening)], held[place + len(opening) :])
            return [Delta(content)]
        cut = 0 if self._trim else len(held)
        if not last:
            cut = len(held[: held_from(held, [opening], len(opening))].rstrip())
        released, self._held = held[:cut], self._held[cut:]
        self._begun |= bool(released)
        return [Delta(released)] if released else None

    def _enter(self, raw: str, held: str) -> None:
        self._raw, self._held, self._state, self._begun = raw, held, self._head, True

    def _head(self, last: bool) -> list[Delta] | None:
        """Between an opening and the arguments of a call, or behind a call."""
        form, skipped = self.form, _SKIPPED.match(self._held)
        assert skipped is not None
        rest = self._held[skipped.end() :]
        for tag, state in ((form.closing, self._content), (form.opening, self._head)):
            if tag and rest.startswith(tag):
                return self._at_tag(tag, skipped.end(), state)
            if tag and rest and tag.startswith(rest) and not last:
                return None
        if not rest or (rest == "[" and not last):
            return self._no_call() if last and self._raw else None
        head = _HEAD.match(rest)
        named = _NAMED.match(rest) if form.opening == MISTRAL.opening else None
        found = head or named
        if found is not None and found[1] in self.names:
            self._held, self._state, self._wrapped = rest[found.end() :], self._arguments, head is not None
            return [self._begin(found[1])]
        if rest.startswith("{"):
            return self._whole_object(rest, last)
        if named is None and form.opening == MISTRAL.opening and not last and _NAMED_BEGINS.fullmatch(rest):
            return None
        return self._no_call()

    def _at_tag(self, tag: str, place: int, state: State) -> list[Delta]:
        """A closing, or another opening, at a place of the text that is held."""
        before, opens = self._held[:place], tag == self.form.opening
        text = self._raw and self._raw + before + ("" if opens else tag)  # there was no call, so it is text
        self._trim |= not self._raw
        self._raw, self._held, self._state = tag if opens else "", self._held[place + len(tag) :], state
        return [Delta(text)]

    def _begin(self, name: str, arguments: str = "") -> Delta:
        self._raw, self._depth = "", 0
        self.calls += 1
        return Delta(arguments, self.calls - 1, name)

    def _whole_object(self, rest: str, last: bool) -> list[Delta] | None:
        """A call whose name does not come first, or an object that is no call."""
        ended = last or (self.form.closing and self.form.closing in rest)
        if not ended and "}" not in rest:
            return None
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return self._no_call() if ended or len(rest) > MAX_HELD else None
        given = value.get("arguments", value.get("parameters", {}))
        if isinstance(given, str):
            given = _object(given)
        name = value.get("name")
        if not isinstance(name, str) or name not in self.names or not isinstance(given, dict):
            return self._no_call()
        self._held = rest[end:]
        return [self._begin(name, json.dumps(given, ensure_ascii=False))]

    def _no_call(self) -> list[Delta]:
        """What was skipped is text, and so is the rest up to the next opening."""
        text, self._raw, self._state = self._raw, "", self._content
        return [Delta(text)]

    def _arguments(self, last: bool) -> list[Delta] | None:
        held = self._held
        for place, character in enumerate(held):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0:
                    self._held, self._state = held[place + 1 :], self._tail
                    return [Delta(held[: place + 1], self.calls - 1)]
        self._held = ""
        return [Delta(held, self.calls - 1)] if held else None

    def _tail(self, last: bool) -> list[Delta] | None:
        """The rest of the object around the arguments."""
        place = self._held.find("}") if self._wrapped else -1
        if self._wrapped and place < 0:
            return None
        self._held, self._state = self._held[place + 1 :], self._head
        return []


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: the arguments of calls as objects, not as their text."""
    made = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            text = call["function"].get("arguments") or "{}"
            arguments = _object(text)
            if not isinstance(arguments, dict):
                problem = "the arguments of a call are no JSON object"
                raise ConfigError(problem, setting="messages", given=text[:40])
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        made.append({**message, **({"tool_calls": calls} if calls else {})})
    return made


def describe(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    briefly: bool = False,
) -> list[dict[str, Any]]:
    """The same for a template that knows no tools: they are described, calls and results are text.

    `briefly`, for a model that was not taught conversations: a line for each tool.
    """
    made = []
    for message in messages:
        content = message["content"]
        for call in message.get("tool_calls") or ():
            function = call["function"]
            spelled = json.dumps({"name": function["name"], "arguments": function["arguments"]})
            content += f"{content and chr(10)}<tool_call>\n{spelled}\n</tool_call>"
        if message["role"] == "tool":
            made.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
        else:
            others = {k: v for k, v in message.items() if k != "tool_calls"}
            made.append({**others, "content": content})
    if tools:
        words = _DESCRIPTION.format("\n".join(json.dumps(tool) for tool in tools))
        if briefly:
            words = "\n".join(_signature(tool["function"]) for tool in tools)
        if made[0]["role"] == "system":
            made[0]["content"] += f"\n\n{words}"
        else:
            made.insert(0, {"role": "system", "content": words})
    return made


def _signature(function: Mapping[str, Any]) -> str:
    named = (function.get("parameters") or {}).get("properties")
    arguments = ", ".join(named) if isinstance(named, dict) else ""
    return f"{function['name']}({arguments})  # {function.get('description') or ''}".rstrip(" #")


_DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""As Qwen 2.5 was taught."""
