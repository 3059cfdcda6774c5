"""A sequence: one text while it is decoded, with its watermarks, sampling and drafter state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from topograd.decode.sampling import Sampling
from topograd.nn.slots import Place

if TYPE_CHECKING:
    from topograd.decode.cache import Cache


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
        self.generator = torch.Generator().manual_seed(sampling.seed)
        self.close_drafters()
        self.tally = Tally()

    def close_drafters(self) -> None:
        """Give back what drafters keep of this sequence."""
        for state in self.drafter_state.values():
            if hasattr(state, "close"):
                state.close()
        self.drafter_state.clear()

    def __len__(self) -> int:
        return len(self.tokens)
