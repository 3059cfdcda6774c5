"""New special tokens on a frozen base, initialised from related ones.

A base whose vocabulary has V tokens gets the ids V, V + 1, ...: every table that is indexed by tokens (the
embedding, the smear, value embeddings) and the shared head have one more row for each, the mean of the rows
of the tokens that it is begun from. "Product of Experts" §6.1 (2), appendix D.2: with rows at random the
frozen stages make nothing of such a token, and the specialist does not learn to answer.

The rows follow from the base and from the names, so a specialist keeps the names alone. They stay as they
are, since the base is frozen; the specialist's own head has rows for them that learn.

Cost: a copy of each table. The base's own tables are not touched.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from topograd.data.tokenizer import Tokenizer
from topograd.errors import ConfigError
from topograd.nn.heads import LowRankDelta
from topograd.nn.stack import Stack

MAX_TOKENS = 256


@dataclass(frozen=True)
class NewToken:
    """A special token and the text whose tokens it is begun from."""

    text: str
    source: str

    @classmethod
    def parse(cls, words: str) -> NewToken:
        """What a user writes: `<|user|>=User`."""
        text, equals, source = words.rpartition("=")
        if not equals or not text.strip() or not source:
            raise ConfigError(setting="tokens", given=words, allowed="the new token, =, and a related word")
        return cls(text, source)


class Vocabulary:
    """A base's tokenizer with some special tokens behind its own."""

    def __init__(self, tokenizer: Tokenizer, rows: int, new: Sequence[NewToken] = ()) -> None:
        """`rows` is how many tokens the base's head knows."""
        self.tokenizer, self.new, self.rows = tokenizer, tuple(new), rows
        texts = [token.text for token in self.new]
        if len(set(texts)) < len(texts) or len(texts) > MAX_TOKENS:
            raise ConfigError(setting="tokens", given=len(texts), allowed=f"at most {MAX_TOKENS}, each once")
        self.ids = {text: rows + i for i, text in enumerate(texts)}
        longest_first = sorted(texts, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if texts else None
        self.sources = [self._source(token) for token in self.new]

    @property
    def size(self) -> int:
        """How many tokens there are, the new ones included."""
        return self.rows + len(self.new)

    def encode_chat(self, text: str) -> list[int]:
        """The ids of a text that spells special tokens: the new ones and the base's own."""
        ids: list[int] = []
        for part in self._split.split(text) if self._split else [text]:
            if part in self.ids:
                ids.append(self.ids[part])
            elif part:
                ids.extend(self.tokenizer.encode(part, "chat"))
        return ids

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt: the same, with what the base's tokenizer puts around one; never none."""
        before, after = self._around
        return [*before, *self.encode_chat(text), *after] or [self.tokenizer.separator]

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """What the base's tokenizer puts before and behind a prompt."""
        bare, whole = self.tokenizer.encode("a", "chat"), self.tokenizer.encode("a", "prompt")
        places = range(len(whole) - len(bare) + 1)
        start = next((i for i in places if whole[i : i + len(bare)] == bare), 0)
        return whole[:start], whole[start + len(bare) :]

    def check(self, ids: Sequence[int]) -> None:
        """Refuse tokens that the base does not know."""
        worst = max(ids, default=0)
        if worst >= self.size or min(ids, default=0) < 0:
            raise ConfigError(
                setting="tokens", given=worst, allowed=f"below {self.size}, the base's vocabulary"
            )

    def _source(self, token: NewToken) -> list[int]:
        ids = self.tokenizer.encode(token.source, "chat")
        if not ids or max(ids) >= self.rows:
            raise ConfigError(
                f"new token {token.text!r} is to begin as {token.source!r}, which the base has no token for",
                setting="tokens",
                given=token.source,
                remedy="give a word of its language",
            )
        return ids


def with_new_rows(stack: Stack, vocabulary: Vocabulary) -> None:
    """Give a stack (a copy that may be changed: see `attach.py`) a row for each new token in every table."""
    if not vocabulary.new:
        return
    extended: dict[int, nn.Embedding] = {}
    head = stack.shared_head
    assert head is not None, "`copied` has checked it"
    _extend_tables(stack, vocabulary, extended)
    stack.config = replace(stack.config, vocab=vocabulary.size)  # type: ignore[type-var]
    if id(head.weight) in extended:  # tied: one matrix, as it was
        head.weight = extended[id(head.weight)].weight
    else:
        head.weight = nn.Parameter(_grown(head.weight, vocabulary), requires_grad=False)
    if isinstance(head.bias, Tensor):
        head.bias = nn.Parameter(_grown(head.bias, vocabulary), requires_grad=False)
    for stage, delta in list(head.deltas.items()):
        head.deltas[stage] = _grown_delta(delta, vocabulary)


def _grown_delta(delta: nn.Module, vocabulary: Vocabulary) -> nn.Module:
    """A stage's own head with the new rows: of the whole matrix, or of U where it is U V."""
    twin = shallow(delta)
    name = "up" if isinstance(delta, LowRankDelta) else "weight"
    rows = _grown(delta.get_parameter(name), vocabulary)
    twin._parameters[name] = nn.Parameter(rows, requires_grad=False)
    return twin


def _extend_tables(parent: nn.Module, vocabulary: Vocabulary, extended: dict[int, nn.Embedding]) -> None:
    """Replace the tables below `parent` by longer ones; modules on the way are copied, not changed."""
    for name, child in list(parent.named_children()):
        if isinstance(child, nn.Embedding) and child.num_embeddings == vocabulary.rows:
            key = id(child.weight)
            if key not in extended:
                grown = _grown(child.weight, vocabulary)
                table = nn.Embedding(vocabulary.size, child.embedding_dim, _weight=grown)
                extended[key] = table.requires_grad_(False)
            parent._modules[name] = extended[key]
        elif any(isinstance(module, nn.Embedding) for module in child.modules()):
            twin = shallow(child)
            parent._modules[name] = twin
            _extend_tables(twin, vocabulary, extended)


def shallow(module: nn.Module) -> nn.Module:
    """The same module with lists of its own of children, parameters and buffers, which are shared."""
    twin = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        twin.__dict__[name] = dict(module.__dict__[name])
    return twin


@torch.no_grad()
def _grown(table: Tensor, vocabulary: Vocabulary) -> Tensor:
    """(rows, ...) with a row for each new token: the mean of its sources'."""
    rows = [table[torch.tensor(ids, device=table.device)].mean(0) for ids in vocabulary.sources]
    return torch.cat((table.detach(), torch.stack(rows)))
