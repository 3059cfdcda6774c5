"""Lookup drafters: n-grams of the text so far, and a table of the model's own text.

    TextLookup      the tokens behind the newest earlier place of the text's last n tokens, n large if it can
    TableLookup     the likeliest token behind the last n tokens in a text that was counted, then the next

A text is indexed as it grows (`NGramIndex`): for each n ≤ `longest`, the place behind every run of n tokens,
the newest first. Both look-ups cost O(longest), whatever the length of the text. Drafted tokens are never
indexed.

The table (`NGramTable`) is sorted keys, a 64-bit hash of (n, tokens), with the likeliest next token and its
share of what followed. Keys that collide give a wrong guess now and then, which a speculation refuses: drafts
need not be right. It is made of the model's own text, because only that repeats the model's habits.

Scores: the number of tokens that matched, a follower that is itself drafted counting on; for a table the
share c / (c + others + 1). Source: "Prompt Lookup Decoding" (A. Saxena); tables of own text as in
docs/how-to/import-and-export.md.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from topograd.decode.drafters import DraftRule, Guess
from topograd.decode.sequence import Sequence
from topograd.errors import ConfigError, DataError

LONGEST_MATCH = 8
"""A longer match is more often right: of SmolLM2's text 0.2 behind one token, 0.57 behind 3, 0.8 behind 8."""
LOOKUP_TOKENS = 8
ORDERS = (4, 3, 2)
"""How many tokens a table looks at, longest first."""
MIN_COUNT = 2
_PRIME = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class NGramIndex:
    """The places behind every run of up to `longest` tokens of a text that grows at its end."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.text: list[int] = []
        self._behind: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]

    def follow(self, text: abc.Sequence[int]) -> None:
        """Make `text` the text; what it has in common with the one before, from its start, is kept."""
        known = len(self.text)
        if list(text[:known]) != self.text:  # other rows, or a row that forgot its older half
            self.text, known = [], 0
            self._behind = [{} for _ in range(self.longest)]
        for place in range(known, len(text)):
            for n in range(1, min(self.longest, place) + 1):
                self._behind[n - 1][tuple(text[place - n : place])] = place
        self.text.extend(text[known:])

    def find(self, ahead: abc.Sequence[int], count: int) -> tuple[int, list[int]]:
        """The longest match n of the end of the text and `ahead`, and up to `count` tokens behind it."""
        end = [*self.text[max(0, len(self.text) - self.longest) :], *ahead][-self.longest :]
        for n in range(len(end), 0, -1):
            place = self._behind[n - 1].get(tuple(end[len(end) - n :]))
            if place is not None:
                return n, [
                    *self.text[place : place + count],
                    *ahead[: max(0, place + count - len(self.text))],
                ]
        return 0, []


class TextLookup:
    """What followed the last tokens where they stood before: at most `tokens` of it."""

    name = "lookup"

    def __init__(self, tokens: int = LOOKUP_TOKENS, longest: int = LONGEST_MATCH) -> None:
        for name, value in (("tokens", tokens), ("longest", longest)):
            if value < 1:
                raise ConfigError(setting=name, given=value, allowed="at least 1")
        self.rule, self.longest = DraftRule(0.0, tokens), longest

    def begin(self, sequence: Sequence) -> None:
        index = sequence.drafter_state.get(self.name)
        if index is None:
            index = sequence.drafter_state[self.name] = NGramIndex(self.longest)
        index.follow(sequence.tokens)

    def find(self, sequence: Sequence, ahead: abc.Sequence[int], count: int) -> list[Guess]:
        n, tokens = sequence.drafter_state[self.name].find(ahead, min(count, self.rule.longest))
        return [(token, float(n + i)) for i, token in enumerate(tokens)]


class NGramTable:
    """The likeliest token behind runs of tokens, and its share."""

    def __init__(
        self, keys: NDArray[np.uint64], tokens: NDArray[np.int32], shares: NDArray[np.float32]
    ) -> None:
        if not len(keys) == len(tokens) == len(shares):
            problem = f"a table has {len(keys)} keys, {len(tokens)} tokens and {len(shares)} shares"
            raise DataError(problem, setting="keys", given=len(keys))
        self.keys, self.tokens, self.shares = keys, tokens, shares

    @classmethod
    def of(
        cls, rows: NDArray[np.integer], own: NDArray[np.integer] | None = None, least: int = MIN_COUNT
    ) -> NGramTable:
        """Count texts (rows, length); with `own`, only the tokens that it marks count as followers."""
        parts = [_counted(rows.astype(np.uint64), own, n, least) for n in ORDERS]
        keys, tokens, shares = (np.concatenate(part) for part in zip(*parts, strict=True))
        order = np.argsort(keys, kind="stable")
        return cls(keys[order], tokens[order].astype(np.int32), shares[order].astype(np.float32))

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, end: abc.Sequence[int]) -> Guess | None:
        """The likeliest token behind the last of these tokens, and its share."""
        for n in ORDERS:
            if len(end) >= n:
                key = np.uint64(_key(end[len(end) - n :], n))
                place = int(self.keys.searchsorted(key))
                if place < len(self.keys) and self.keys[place] == key:
                    return int(self.tokens[place]), float(self.shares[place])
        return None

    def tensors(self) -> dict[str, Tensor]:
        """What an adapter keeps."""
        arrays = {"keys": self.keys.view(np.int64), "tokens": self.tokens, "shares": self.shares}
        return {f"table.{name}": torch.from_numpy(array) for name, array in arrays.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> NGramTable:
        keys, tokens, shares = (tensors[f"table.{name}"].numpy() for name in ("keys", "tokens", "shares"))
        return cls(keys.view(np.uint64), tokens, shares)


def _key(tokens: abc.Sequence[int], n: int) -> int:
    """A hash of n tokens; `_counted` has the same for arrays."""
    key = n
    for token in tokens:
        key = ((key ^ int(token)) * _PRIME) & _MASK
        key ^= key >> 29
    return key


def _counted(
    rows: NDArray[np.uint64], own: NDArray[np.integer] | None, n: int, least: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.float64]]:
    """Keys of runs of n tokens, the likeliest follower of each, and its share."""
    length = rows.shape[1]
    keys = np.full((len(rows), max(length - n, 0)), n, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for i in range(n):
            keys = (keys ^ rows[:, i : length - n + i]) * np.uint64(_PRIME)
            keys ^= keys >> np.uint64(29)
    nexts = rows[:, n:]
    chosen = np.ones(nexts.shape, bool) if own is None else own[:, n:].astype(bool)
    pairs = np.stack([keys[chosen], nexts[chosen]], axis=1)
    pairs, counts = np.unique(pairs, axis=0, return_counts=True)
    totals_of, inverse = np.unique(pairs[:, 0], return_inverse=True)
    totals = np.bincount(inverse, weights=counts, minlength=len(totals_of))
    order = np.lexsort((-counts, inverse))
    best = order[np.searchsorted(inverse[order], np.arange(len(totals_of)))]
    often = counts[best] >= least
    best, totals = best[often], totals[often]
    return pairs[best, 0], pairs[best, 1], counts[best] / (totals + 1)


class TableLookup:
    """The likeliest tokens of a table, one after the other."""

    name = "table"

    def __init__(self, table: NGramTable, rule: DraftRule | None = None) -> None:
        self.table, self.rule = table, rule or DraftRule(0.4, LOOKUP_TOKENS)

    def begin(self, sequence: Sequence) -> None:
        """Nothing is kept of a sequence."""

    def find(self, sequence: Sequence, ahead: abc.Sequence[int], count: int) -> list[Guess]:
        end, guesses = [*sequence.tokens[-ORDERS[0] :], *ahead], list[Guess]()
        for _ in range(min(count, self.rule.longest)):
            guess = self.table.find(end)
            if guess is None:
                break
            guesses.append(guess)
            end.append(guess[0])
        return guesses
