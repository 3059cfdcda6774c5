"""Drafts that are looked up: in the text so far, and in a table of what the model wrote before.

    LookupDrafter   the tokens behind the newest earlier place of the text's last n tokens, n large if it can
    TableDrafter    the likeliest token behind the last n tokens in a text that was counted, then the next

A text is indexed as it grows (`NGramIndex`): for each n ≤ `longest`, the place behind every run of n tokens,
the newest first. Both look-ups cost O(longest), whatever the length of the text. Drafted tokens are never
indexed.

The table (`NGramTable`) is sorted keys, a 64-bit hash of (n, tokens), with the likeliest next token and its
share of what followed. Keys that collide give a wrong guess now and then, which a speculation refuses: drafts
need not be right. It is made of the model's own text, because only that repeats the model's habits.

Scores: the number of tokens that matched, a follower that is itself drafted counting on; for a table the
share c / (c + others + 1). Source: "Prompt Lookup Decoding" (A. Saxena); tables of own text as in
docs/models.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from topograd.decode.autotune import DraftRule
from topograd.decode.drafters import Draft, Drafting, Generators, Guess
from topograd.decode.engine import AnyCache, Engine
from topograd.decode.sampling import Sampling
from topograd.errors import ConfigError, DataError

LONGEST_MATCH = 8
"""A longer match is more often right: of SmolLM2's text 0.2 behind one token, 0.57 behind 3, 0.8 behind 8."""
LOOKUP_TOKENS = 8
ORDERS = (4, 3, 2)
"""How many tokens a table looks at, longest first."""
LEAST_COUNT = 2
_PRIME = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class NGramIndex:
    """The places behind every run of up to `longest` tokens of a text that grows at its end."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.text: list[int] = []
        self._behind: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]

    def follow(self, text: Sequence[int]) -> None:
        """Make `text` the text; what it has in common with the one before, from its start, is kept."""
        known = len(self.text)
        if list(text[:known]) != self.text:  # other rows, or a row that forgot its older half
            self.text, known = [], 0
            self._behind = [{} for _ in range(self.longest)]
        for place in range(known, len(text)):
            for n in range(1, min(self.longest, place) + 1):
                self._behind[n - 1][tuple(text[place - n : place])] = place
        self.text.extend(text[known:])

    def find(self, ahead: Sequence[int], count: int) -> tuple[int, list[int]]:
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


class LookupDrafter:
    """What followed the last tokens where they stood before: at most `tokens` of it."""

    name = "lookup"

    def __init__(self, engine: Engine, tokens: int = LOOKUP_TOKENS, longest: int = LONGEST_MATCH) -> None:
        if tokens < 1 or longest < 1:
            raise ConfigError(f"a lookup has tokens {tokens} and longest {longest}; both are at least 1")
        self.engine, self.rule, self.longest = engine, DraftRule(0.0, tokens), longest
        self._rows: list[NGramIndex] = []
        self._alone = Drafting(engine, [self])

    def draft(
        self, cache: AnyCache, active: Sequence[bool], sampling: Sampling, generators: Generators
    ) -> list[Draft]:
        """It is a drafter by itself too."""
        return self._alone.draft(cache, active, sampling, generators)

    def begin(self, cache: AnyCache, active: Sequence[bool]) -> None:
        if len(self._rows) != len(active):
            self._rows = [NGramIndex(self.longest) for _ in active]
        for index, text, on in zip(self._rows, cache.tokens, active, strict=True):
            if on:
                index.follow(text)

    def find(self, row: int, ahead: Sequence[int], count: int) -> list[Guess]:
        n, tokens = self._rows[row].find(ahead, min(count, self.rule.longest))
        return [(token, float(n + i)) for i, token in enumerate(tokens)]


class NGramTable:
    """The likeliest token behind runs of tokens, and its share."""

    def __init__(
        self, keys: NDArray[np.uint64], tokens: NDArray[np.int32], shares: NDArray[np.float32]
    ) -> None:
        if not len(keys) == len(tokens) == len(shares):
            raise DataError(f"a table has {len(keys)} keys, {len(tokens)} tokens and {len(shares)} shares")
        self.keys, self.tokens, self.shares = keys, tokens, shares

    @classmethod
    def of(
        cls, rows: NDArray[np.integer], own: NDArray[np.integer] | None = None, least: int = LEAST_COUNT
    ) -> NGramTable:
        """Count texts (rows, length); with `own`, only the tokens that it marks count as followers."""
        parts = [_counted(rows.astype(np.uint64), own, n, least) for n in ORDERS]
        keys, tokens, shares = (np.concatenate(part) for part in zip(*parts, strict=True))
        order = np.argsort(keys, kind="stable")
        return cls(keys[order], tokens[order].astype(np.int32), shares[order].astype(np.float32))

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, end: Sequence[int]) -> Guess | None:
        """The likeliest token behind the last of these tokens, and its share."""
        for n in ORDERS:
            if len(end) >= n:
                key = np.uint64(_key(end[len(end) - n :], n))
                place = int(self.keys.searchsorted(key))
                if place < len(self.keys) and self.keys[place] == key:
                    return int(self.tokens[place]), float(self.shares[place])
        return None

    def tensors(self) -> dict[str, Tensor]:
        """What a sidecar keeps."""
        keys = torch.from_numpy(self.keys.view(np.int64))
        return {
            "table.keys": keys,
            "table.tokens": torch.from_numpy(self.tokens),
            "table.shares": torch.from_numpy(self.shares),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> NGramTable:
        keys, tokens, shares = (tensors[f"table.{name}"].numpy() for name in ("keys", "tokens", "shares"))
        return cls(keys.view(np.uint64), tokens, shares)


def _key(tokens: Sequence[int], n: int) -> int:
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
    kept = counts[best] >= least
    best, totals = best[kept], totals[kept]
    return pairs[best, 0], pairs[best, 1], counts[best] / (totals + 1)


class TableDrafter:
    """The likeliest tokens of a table, one behind the other."""

    name = "table"

    def __init__(self, engine: Engine, table: NGramTable, rule: DraftRule | None = None) -> None:
        self.engine, self.table, self.rule = engine, table, rule or DraftRule(0.4, LOOKUP_TOKENS)
        self._alone = Drafting(engine, [self])
        self._ends: list[list[int]] = []

    def draft(
        self, cache: AnyCache, active: Sequence[bool], sampling: Sampling, generators: Generators
    ) -> list[Draft]:
        """It is a drafter by itself too."""
        return self._alone.draft(cache, active, sampling, generators)

    def begin(self, cache: AnyCache, active: Sequence[bool]) -> None:
        self._ends = [text[-ORDERS[0] :] for text in cache.tokens]

    def find(self, row: int, ahead: Sequence[int], count: int) -> list[Guess]:
        end, found = [*self._ends[row], *ahead], list[Guess]()
        for _ in range(min(count, self.rule.longest)):
            guess = self.table.find(end)
            if guess is None:
                break
            found.append(guess)
            end.append(guess[0])
        return found
