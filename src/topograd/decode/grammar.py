r"""Grammars: texts that may be written and no others, by llguidance (extra `serve`).

    Grammar.json_schema({...})      JSON that a schema allows, with the spaces of Python's json.dumps
    Grammar.json_object()           any JSON object
    Grammar.lark('start: ...')      a grammar as Lark has them, in llguidance's dialect
    Grammar.regex("[a-z]+")         a regular expression, which the whole text matches
    Grammar.choice(["yes", "no"])   one of some texts
    Grammar.calls("start: ...")     calls of tools: Lark around JSON schemas (`convert/tool_calls.py`)

A grammar is compiled for a tokenizer (`GrammarCompiler`), and a text goes through it as tokens (`Matcher`):
which may come next (a mask over the vocabulary), how many drafted ones fit, whether the text is complete.
Tokens that were only looked ahead at are rolled back. The text ends where nothing may follow, or with a stop
token, which is allowed where the text is complete.

Where the grammar leaves one text only, llguidance allows the tokens that the tokenizer would spell it with.
Cost: about 50 µs a mask. Source: llguidance (MIT), docs/syntax.md there.

Bounds, because requests bring grammars: characters and the length of chains of references are limited here;
nesting, the sizes of parser and lexer and the work of a step by llguidance. It compiles in a thread with a
large stack, since its recursion follows chains of rules. Intersections of expressions (`allOf`, `&`) can take
it longer than anybody waits, so what may have some is compiled in a process with a limit of time first. A
grammar that exceeds a limit while a text is written ends that text (`Matcher.problem`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from topograd.data.tokenizer import Tokenizer
from topograd.errors import ConfigError

MAX_CHARACTERS = 2**16
MAX_CHOICES = 1000
MAX_REFERENCES = 200
"""Rules of a grammar, references of a schema: a chain of so many is compiled with a tenth of STACK."""
STACK = 2**25
COMPILED = 32
"""Compiled grammars that are kept."""
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
}
"""Of llguidance, half of its own or less: 20 000 states are about 40 MB."""
SECONDS = 3
"""Of processor time, for a grammar that may intersect expressions; by the clock 20 times as many."""
INTERSECTING = re.compile(r'"(?:pattern|allOf|format|multipleOf|patternProperties)"')
"""Keywords of which two may be an intersection."""
_TRIAL = """
import json, resource, sys
import llguidance
given = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"], given["seconds"]))
limits = llguidance.LLParserLimits(**given["limits"], verbose_errors=False)
llguidance.LLMatcher(llguidance.LLTokenizer("byte"), given["source"], log_level=0, limits=limits)
"""
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Without spaces at will: a small model would write nothing else."""


@dataclass(frozen=True)
class Grammar:
    """What a text must be."""

    kind: Literal["json_schema", "lark", "regex", "calls"]
    text: str

    def __post_init__(self) -> None:
        _check_length(self.text)
        references = self.text.count(":" if self.kind == "lark" else '"$ref"')
        if self.kind != "regex" and references > MAX_REFERENCES:
            problem = f"a grammar has {references} rules or references"
            remedy = f"give at most {MAX_REFERENCES}"
            raise ConfigError(problem, setting="grammar", given=references, remedy=remedy)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that fits a schema, which is given as an object or as its text."""
        if isinstance(schema, str):
            _check_length(schema)
        try:
            text = json.dumps(json.loads(schema) if isinstance(schema, str) else schema)
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"the JSON schema is no JSON ({str(error).splitlines()[0][:100]})"
            raise ConfigError(problem, setting="json_schema", remedy="give a JSON object") from None
        if not text.startswith("{"):
            raise ConfigError(setting="json_schema", given=text[:40], allowed="a JSON object")
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """What the rule `start` derives."""
        return cls("lark", text)

    @classmethod
    def regex(cls, text: str) -> Grammar:
        """What a regular expression matches, as a whole."""
        return cls("regex", text)

    @classmethod
    def calls(cls, text: str) -> Grammar:
        """What a grammar derives whose rules are our own, and whose schemas are given ones."""
        return cls("calls", text)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of some texts."""
        if not 0 < len(texts) <= MAX_CHOICES or not all(texts):
            allowed = f"1 to {MAX_CHOICES} texts that are not empty"
            raise ConfigError(setting="choice", given=len(texts), allowed=allowed)
        # characters that stand for themselves, or by their numbers
        spelled = (
            "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
            for text in texts
        )
        return cls("regex", "|".join(spelled))


def _check_length(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        problem = f"a grammar has more than {MAX_CHARACTERS} characters"
        raise ConfigError(problem, setting="grammar", given=len(text), remedy="give fewer")


class _Vocabulary:
    """A tokenizer as llguidance's `TokenizerWrapper` asks for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encode = tokenizer.encode
        self.special_token_ids = [i for i, piece in enumerate(tokenizer.pieces) if not piece]
        self.tokens = [piece or b"\xff<%d>" % i for i, piece in enumerate(tokenizer.pieces)]  # \xff: special
        ends = sorted(tokenizer.stop_tokens) or [tokenizer.separator]
        self.eos_token_ids, self.eos_token_id, self.bos_token_id = ends, ends[0], None
        self._ids = {piece: i for i, piece in enumerate(tokenizer.pieces) if piece}
        self._longest = max(map(len, tokenizer.pieces))

    def __call__(self, text: str) -> list[int]:
        """Its tokens: their bytes are the text's, also where the tokenizer would put a space before it."""
        if not isinstance(text, str):
            raise TypeError("give a str")  # llguidance asks which of the two it may give
        spelled, data = self.encode(text), text.encode()
        if b"".join(self.tokens[i] for i in spelled) == data:
            return spelled
        return list(self._greedy(data))

    def _greedy(self, data: bytes) -> Iterable[int]:
        """The longest token each time; a byte that no token begins with is left out."""
        place = 0
        while place < len(data):
            sizes = range(min(self._longest, len(data) - place), 0, -1)
            size = next((n for n in sizes if data[place : place + n] in self._ids), 0)
            if size:
                yield self._ids[data[place : place + size]]
            place += size or 1


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the last ones; of use to several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._made: OrderedDict[tuple[str, Grammar], CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def _vocabulary(self) -> Any:
        llguidance = _llguidance()
        own = _Vocabulary(self.tokenizer)
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(own), eos_token=own.eos_token_ids)

    def compile(self, grammar: Grammar, tenant: str = "") -> CompiledGrammar:
        """The grammar, ready for texts; ConfigError where it is none, or too large.

        What was compiled for one tenant is not kept for another, who could tell by the time it takes.
        """
        key = tenant, grammar
        with self._lock:  # one at a time: what they need together is bounded too
            if key not in self._made:
                self._made[key] = _in_large_stack(lambda: self._compile(grammar))
                while len(self._made) > COMPILED:
                    self._made.popitem(last=False)
            self._made.move_to_end(key)
            return self._made[key]

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        matcher = _llguidance().LLMatcher
        sources: dict[str, Callable[[], str]] = {
            "json_schema": lambda: matcher.grammar_from_json_schema(grammar.text, overrides=SPACES),
            "lark": lambda: matcher.grammar_from_lark(grammar.text),
            "calls": lambda: matcher.grammar_from_lark(grammar.text),
            "regex": lambda: matcher.grammar_from_regex(grammar.text),
        }
        limits = _llguidance().LLParserLimits(**LIMITS, verbose_errors=False)
        source = sources[grammar.kind]()
        intersections = len(INTERSECTING.findall(grammar.text)) > 1 and grammar.kind != "regex"
        if grammar.kind == "lark":
            intersections = any(mark in grammar.text for mark in ("&", "~", "%json"))
        if intersections:  # there may be some
            _try_apart(source)
        made = matcher(self._vocabulary, source, log_level=0, limits=limits)
        if (problem := _problem(made, "the grammar cannot be used")) is not None:
            raise problem
        return CompiledGrammar(made)


class CompiledGrammar:
    """A grammar and a tokenizer's vocabulary."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> Matcher:
        """A text without tokens."""
        return Matcher(self._matcher.deep_copy())


class Matcher:
    """How far one text has come in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def stopped(self) -> bool:
        """Whether nothing may follow, or there is a problem."""
        return bool(self._matcher.is_stopped())

    @property
    def problem(self) -> ConfigError | None:
        """Why the text cannot be continued: its grammar exceeded a limit. Then the last masks were none."""
        return _problem(self._matcher, "the text cannot be continued by its grammar")

    def take(self, tokens: Iterable[int]) -> None:
        """Tokens were written; those behind the end are of no concern."""
        for token in tokens:
            if not self.stopped:
                self._matcher.consume_token(token)

    def masks(self, ahead: Sequence[int], count: int, vocab: int) -> Tensor:
        """Which tokens may come at the last `count` places behind the text and the tokens ahead of it.

        (count, vocab) bool. Where the tokens ahead do not fit, or end the text, everything may.
        """
        rows, taken = torch.ones(count, vocab, dtype=torch.bool), 0
        first = len(ahead) + 1 - count
        for place in range(len(ahead) + 1):
            if self.stopped:
                break
            if place >= first:
                rows[place - first] = self._mask(vocab)
            if place < len(ahead):
                if not self._matcher.try_consume_tokens([ahead[place]]):
                    break
                taken += 1
        self._back(taken)
        return rows

    def fits(self, ahead: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of some tokens may follow those ahead, up to one that ends the text."""
        known = self._look(ahead)
        fitting = self._look(tokens) if known == len(ahead) else 0
        self._back(known + fitting)
        return fitting

    def ends(self, ahead: Sequence[int]) -> bool:
        """Whether the text is at its end behind the tokens ahead."""
        taken = self._look(ahead)
        stopped = self.stopped
        self._back(taken)
        return stopped

    def _look(self, tokens: Sequence[int]) -> int:
        """Take tokens as far as they fit; how many do."""
        for place, token in enumerate(tokens):
            if self.stopped or not self._matcher.try_consume_tokens([token]):
                return place
        return len(tokens)

    def _back(self, tokens: int) -> None:
        if tokens:
            self._matcher.rollback(tokens)

    def _mask(self, vocab: int) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            return torch.ones(vocab, dtype=torch.bool)
        known = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:vocab].astype(bool))
        return torch.nn.functional.pad(known, (0, vocab - len(known)))  # a head may have more rows


def _problem(matcher: Any, problem: str) -> ConfigError | None:
    if not matcher.is_error():
        return None
    reason = (str(matcher.get_error()).splitlines() or [""])[0][:200]
    return ConfigError(f"{problem} ({reason})", setting="grammar", remedy="give another, or a smaller one")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        problem, remedy = "grammars need llguidance, which is not installed", "pip install 'topograd[serve]'"
        raise ConfigError(problem, setting="grammar", remedy=remedy) from None
    return llguidance


def _try_apart(source: str) -> None:
    """Compile a grammar in a process that is ended where it takes too long; ConfigError then."""
    if sys.platform == "win32":
        return  # it knows no such limits
    given = json.dumps({"source": source, "limits": LIMITS, "seconds": SECONDS})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _TRIAL],
            input=given.encode(),
            capture_output=True,
            timeout=20 * SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode < 0:  # it was ended
        remedy = "give one with fewer expressions that must hold together"
        raise ConfigError("the grammar takes too long to compile", setting="grammar", remedy=remedy)


def _in_large_stack(work: Callable[[], CompiledGrammar]) -> CompiledGrammar:
    """Call a function in a thread of its own, whose stack has STACK bytes."""
    done: Future[CompiledGrammar] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="grammar")
    before = threading.stack_size(STACK)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    return done.result()
