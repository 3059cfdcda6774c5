"""Texts of a strategy together with what speculation counted."""

from __future__ import annotations

from collections.abc import Sequence

from topograd.decode.engine import Emitted
from topograd.decode.sampling import Sampling
from topograd.decode.sequence import Tally
from topograd.decode.strategies import DecodeStrategy, continue_tokens, generate_batch


def written(
    strategy: DecodeStrategy,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling | None = None,
) -> tuple[list[list[Emitted]], Tally]:
    """The tokens behind each prompt, and the drafts of all of them."""
    batch = strategy.engine.start(prompts, sampling)
    rows: list[list[Emitted]] = [[] for _ in prompts]
    for row, emitted in continue_tokens(strategy, batch, tokens):
        rows[row].append(emitted)
    tally = Tally()
    for sequence in batch:
        tally.add(sequence.tally)
    return rows, tally


def tokens_of(
    strategy: DecodeStrategy,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling | None = None,
) -> list[list[int]]:
    """The tokens behind each prompt, as numbers."""
    rows = generate_batch(strategy, prompts, tokens, sampling)
    return [[emitted.token for emitted in row] for row in rows]
