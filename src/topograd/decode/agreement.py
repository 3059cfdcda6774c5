"""Agreement of two decoded texts: identical tokens, ties and mismatches.

In float32 a position is rounded differently in another batch shape. Where the two best logits of full depth
are closer than TIE times the largest, either may win: such a difference is a tie, every other a mismatch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from topograd.decode.engine import Emitted, Engine

TIE = 1e-5


def identical(some: Sequence[Sequence[Emitted]], full: Sequence[Sequence[Emitted]]) -> float:
    """The share of texts that are the same, token for token."""
    same = [_tokens(a) == _tokens(b) for a, b in zip(some, full, strict=True)]
    return sum(same) / len(same)


def differences(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    some: Sequence[Sequence[Emitted]],
    full: Sequence[Sequence[Emitted]],
) -> dict[str, int]:
    """Texts that leave full depth's at a tie of its two best logits, and those that leave it elsewhere."""
    ties = mismatches = 0
    for prompt, a, b in zip(prompts, some, full, strict=True):
        ours, theirs = _tokens(a), _tokens(b)
        if ours != theirs:
            where = next(i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y)
            tied = is_tie(full_logits(engine, [*prompt, *theirs[:where]]), ours[where], theirs[where])
            ties, mismatches = ties + tied, mismatches + (not tied)
    return {"mismatches": mismatches, "ties": ties}


@torch.inference_mode()
def full_logits(engine: Engine, tokens: Sequence[int]) -> Tensor:
    """Logits (vocab,) of full depth behind these tokens."""
    batch, last = engine.start([tokens]), engine.exits[-1]
    engine.run(batch, last)
    return engine.logits(batch, last)[0]


def is_tie(logits: Tensor, a: int, b: int) -> bool:
    """Whether two tokens are the two best, closer than rounding between batch shapes can tell apart."""
    close = abs(float(logits[a] - logits[b])) <= TIE * float(logits.abs().max())
    return close and float(logits.max()) <= max(float(logits[a]), float(logits[b]))


def distinct(texts: Sequence[Sequence[Emitted]]) -> float | None:
    """The share of distinct 4-grams in each text, on average."""
    shares = []
    for text in texts:
        tokens = _tokens(text)
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        if grams:
            shares.append(len(set(grams)) / len(grams))
    return sum(shares) / len(shares) if shares else None


def mean_exit(texts: Sequence[Sequence[Emitted]]) -> float:
    """The mean, counted from 1, of the exits at which tokens left."""
    exits = [emitted.exit + 1 for text in texts for emitted in text]
    return sum(exits) / len(exits)


def _tokens(text: Sequence[Emitted]) -> list[int]:
    return [emitted.token for emitted in text]
