"""Jobs of the scheduler, one for each text of a request, and their progress.

A request is one job or several (its prompts times n). A job goes to the scheduler's thread; `Progress` comes
back: tokens with the text that they released, and at the end the finish reason and timings.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from topograd.decode.sampling import Sampling
from topograd.decode.text import TextStream

Finish = Literal["stop", "length", "cancelled", "error"]
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Scored:
    """A token's log-probability, and those of the likeliest ones: (token, log-probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Written:
    """A generated token: the text that it released, its exit, and whether it was drafted."""

    token: int
    text: str
    exit: int
    drafted: bool = False
    score: Scored | None = None
    end: bool = False
    """Whether it ended the text; then it released none."""


@dataclass
class Timings:
    """Where a text's time went, by the clock of `time.perf_counter`, and what its depth did."""

    received: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first: float | None = None
    at_first: int = 1
    """Tokens that came at that time."""
    finished: float | None = None
    cached: int = 0
    """Prompt tokens that an earlier text had left behind."""
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Progress:
    """What is new of a job."""

    written: tuple[Written, ...] = ()
    rest: str = ""
    """Text that was held back, released at the end."""
    prompt: tuple[Scored | None, ...] | None = None
    """Scores of the prompt's tokens, once all are known; the first has none."""
    candidates: tuple[tuple[Scored, ...], ...] | None = None
    """For each exit and position, where the job has `candidates`."""
    embedding: tuple[float, ...] | None = None
    """Of the prompt, where the job has `embed`."""
    finish: Finish | None = None
    error: str = ""
    status: int = 500
    """HTTP status, where it ended with an error."""
    param: str | None = None
    """The field at fault."""


@dataclass(eq=False)
class Job:
    """A text to generate."""

    prompt: list[int]
    tokens: int
    depth: str
    """As `decode/depths.py` reads it."""
    sampling: Sampling
    stream: TextStream
    on_progress: Callable[[Progress], None]
    """Called in the scheduler's thread."""
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    """How many alternatives to score beside each token written; None scores nothing."""
    score_prompt: bool = False
    """Whether the prompt's tokens are still to be scored."""
    candidates: int | None = None
    """Score the prompt by every exit with this many alternatives, and write nothing."""
    embed: Literal["mean", "last"] | None = None
    """Embed the prompt, and write nothing."""
    specialists: tuple[tuple[str, float], ...] = ()
    """Names of specialists and their weights."""
    tenant: str = ""
    """Whose it is: what was computed for one is not reused for another."""
    number: int = field(default_factory=_numbers.__next__)
    timings: Timings = field(default_factory=Timings)
    cancelled: bool = False
    """Set from any thread; the scheduler looks at it between steps."""
    deadline: float = float("inf")

    def __post_init__(self) -> None:
        self.remaining = self.tokens
        self.prompt_pos = 0
        """Prompt tokens that are in the sequence."""
        self.scores: list[Scored | None] = [None]
        self.exits: list[int] = []
        """The exit of each token that was written."""
