"""A sequence: one text while it is decoded, with its watermarks, sampling and drafter state."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from topograd.decode.sampling import Sampling, distribution, finite, probabilities
from topograd.errors import ConfigError
from topograd.nn.slots import Place

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from topograd.decode.cache import Cache
    from topograd.decode.processor import LogitsProcessor


@dataclass
class Count:
    """Tokens that were drafted, and those of them that were accepted."""

    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted over drafted."""
        return self.accepted / self.drafted if self.drafted else math.nan


@dataclass
class Tally(Count):
    """What speculation did."""

    rounds: int = 0
    by: dict[str, Count] = field(default_factory=dict)
    """The same by drafter."""

    def add(self, other: Tally) -> None:
        self.drafted, self.accepted = self.drafted + other.drafted, self.accepted + other.accepted
        self.rounds += other.rounds
        for name, count in other.by.items():
            mine = self.by.setdefault(name, Count())
            mine.drafted, mine.accepted = mine.drafted + count.drafted, mine.accepted + count.accepted


class Sequence:
    """Tokens, how far each stage has run them, how the next is drawn, and what drafters keep of them.

    Make it with `Cache.new`; what a stage has run is changed by its cache alone.
    """

    def __init__(self, cache: Cache, place: Place, stages: int, sampling: Sampling, index: int) -> None:
        self.cache, self.place = cache, place
        self.tokens: list[int] = []
        self.marks = [0] * stages
        """Watermarks: how many positions each stage has run."""
        self.index = index
        """Its number among those that were started together."""
        self.drafter_state: dict[str, Any] = {}
        """By drafter, what it keeps of this sequence; with a `close` method where that must be given back."""
        self.begin(sampling)

    def begin(self, sampling: Sampling) -> None:
        """Begin another text: its sampling, a random stream of its seed, drafters that know nothing."""
        self.sampling = sampling
        self._generator: torch.Generator | None = None
        self.close_drafters()
        self.tally = Tally()
        self.processor: LogitsProcessor | None = None
        """What changes its logits, if anything does; made by `start_writing`."""

    def start_writing(self) -> None:
        """A token is about to be written: before the first, what the sequence holds is its prompt."""
        if self.processor is None and self.sampling.looks_back:
            from topograd.decode.processor import LogitsProcessor

            self.processor = LogitsProcessor(self.sampling, self.tokens)

    @property
    def generator(self) -> torch.Generator:
        """The random stream of its seed."""
        if self._generator is None:
            import torch

            self._generator = torch.Generator().manual_seed(self.sampling.seed)
        return self._generator

    @property
    def plain(self) -> bool:
        """Whether its next token is the one with the largest logit."""
        return self.sampling.greedy and not self.sampling.looks_back

    def ends(self, ahead: abc.Sequence[int] = ()) -> bool:
        """Whether nothing may follow it and the tokens `ahead`, by its grammar."""
        return self.processor is not None and self.processor.ends(ahead)

    @property
    def problem(self) -> ConfigError | None:
        """Why its last tokens are not to be used, if they are not; its grammar's fault."""
        matcher = None if self.processor is None else self.processor.matcher
        return None if matcher is None else matcher.problem

    def take(self, tokens: abc.Sequence[int]) -> None:
        """Tokens were written in it."""
        if self.processor is not None:
            self.processor.take(tokens)

    def processed(self, logits: Tensor, ahead: abc.Sequence[int] = ()) -> Tensor:
        """Its logits (n, vocab) of the last places behind it and the tokens `ahead`, changed."""
        self.start_writing()
        return logits if self.processor is None else self.processor.process(finite(logits), ahead)

    def probabilities(self, logits: Tensor) -> Tensor:
        """What it draws from, of logits that are processed."""
        if self.sampling.looks_back:  # they were checked before some became -inf
            return distribution(logits, self.sampling)
        return probabilities(logits, self.sampling)

    def close_drafters(self) -> None:
        """Give back what drafters keep of this sequence."""
        for state in self.drafter_state.values():
            if hasattr(state, "close"):
                state.close()
        self.drafter_state.clear()

    def __len__(self) -> int:
        return len(self.tokens)


def common_prefix(a: abc.Sequence[int], b: abc.Sequence[int]) -> int:
    """How many tokens two texts have in common at their start."""
    least = min(len(a), len(b))
    if list(a[:least]) == list(b[:least]):
        return least
    return next(i for i in range(least) if a[i] != b[i])
