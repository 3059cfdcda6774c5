"""Settings of the decoding benchmark. Imports no torch, so that `--help` answers at once."""

from dataclasses import dataclass

from topograd.errors import ConfigError
from topograd.limits import BYTES, REPEATS, SIZE, check_numbers

MAX_TOKENS = 1_000_000
"""Tokens that one way of decoding writes."""


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """How much of decoding is measured."""

    prompts: int = 6
    """Held-out prompts, each continued by itself."""
    prompt_tokens: int = 64
    """Tokens of a prompt, at most."""
    tokens: int = 64
    """Tokens written after each prompt."""
    rounds: int = 7
    """How often every way is measured, in turns."""
    bytes: int = 100_000
    """Held-out text for agreement and calibration."""
    rows: int = 4
    """Prompts that are continued together in the batched comparison."""

    def __post_init__(self) -> None:
        check_numbers(self, prompts=REPEATS, prompt_tokens=SIZE, tokens=REPEATS, rounds=REPEATS)
        check_numbers(self, bytes=BYTES, rows=SIZE)
        if self.prompts * self.tokens * self.rounds > MAX_TOKENS:
            problem = f"more than {MAX_TOKENS} tokens would be written by each mode"
            raise ConfigError(problem, setting="tokens", given=self.tokens, remedy="ask for fewer")
