"""Limits of a server and settings of its benchmark. Imports no torch, so that `--help` answers at once."""

import math
from dataclasses import dataclass

from topograd.limits import check_numbers, check_rules

SOME = (1, math.inf)


@dataclass(frozen=True)
class Limits:
    """Limits on requests."""

    rows: int = 16
    """Batch slots: texts that are generated at the same time, each with its own KV cache."""
    waiting: int = 256
    """Texts that may wait for a slot; a request beyond that gets status 429."""
    chunk: int = 64
    """Prompt tokens that are processed in one step, of all slots together."""
    seconds: float = 600.0
    """How long a request may take, waiting included."""
    body: int = 8 * 2**20
    """Bytes of a request's body."""
    body_seconds: float = 30.0
    """How long a body may take to arrive."""
    choices: int = 128
    """Texts of one request: prompts times n."""
    grace: float = 10.0
    """How long running requests may take after the server was told to stop."""
    share_prompts: bool = False
    """Let texts of one token begin with what was computed for another's: faster, and who measures time can
    tell what others asked."""

    def __post_init__(self) -> None:
        check_numbers(self, rows=SOME, waiting=SOME, chunk=SOME, body=SOME, choices=SOME)
        for name in ("seconds", "body_seconds", "grace"):
            check_rules(self, **{name: (0 < getattr(self, name) < math.inf, "above 0 and finite")})


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of `bench serve`."""

    clients: int = 8
    """Texts that are generated at the same time."""
    depth: str = "speculate:lookup"
    """How deep tokens go, as in `topograd generate --depth`."""
    tokens: int | None = None
    """Tokens that each text gets; by default 96, or what the context leaves."""
    prompt_tokens: int = 128
    """Tokens of each prompt, or half of the context if that is less."""
    rounds: int = 5
    """Turns that each depth gets."""

    def __post_init__(self) -> None:
        check_numbers(
            self, clients=(1, 256), tokens=(1, 4096), prompt_tokens=(1, 65536), rounds=(1, 1000)
        )  # fmt: skip
