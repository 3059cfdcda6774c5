"""Evaluation windows: held-out text cut so that each token is predicted exactly once.

A document d_0 ... d_{n-1} is read as  s d_0 ... d_{n-1}  (s the separator) and cut into consecutive windows
of `context` targets: window j has the inputs from position j*context on and, as targets, their successors.
So every token is a target once, the separator never, and the last window of a document is padded (separator
as input, -100 as target). The first token of a window other than a document's first is predicted from one
token of context: bits per byte here are an upper bound on what a sliding window would give.

`nbytes`, the number of bytes that the targets decode to, is exact, also when a limit leaves windows out:
bits per byte = nats of the targets / (ln 2 * nbytes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from topograd.data.loader import IGNORED
from topograd.data.tokenizer import Tokenizer
from topograd.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Text:
    """Held-out text as sequences: targets of -100 do not count, the others decode to `nbytes` bytes."""

    inputs: Tensor
    targets: Tensor
    nbytes: int


def windows(
    documents: Iterable[Sequence[int] | np.ndarray],
    tokenizer: Tokenizer,
    context: int,
    limit_bytes: int | None = None,
) -> tuple[Tensor, Tensor, int]:
    """(inputs, targets, nbytes): int64 tensors of shape (windows, context), and the targets' bytes.

    `documents` are tokens without separators: `Shards`, or a list of what `Tokenizer.encode` gave. With
    `limit_bytes`, a longer text is represented by windows spaced evenly over it, of at most that many bytes
    in all. The choice depends on nothing but the text and the arguments.
    """
    if context < 1:
        raise ConfigError(setting="context", given=context, allowed="at least 1")
    arrays = [np.asarray(document) for document in documents if len(document)]
    if not arrays:
        raise DataError("there is no text to evaluate", setting="documents", remedy="give at least one token")
    owner, start, nbytes = _table(arrays, tokenizer, context)
    if limit_bytes is not None and nbytes.sum() > limit_bytes:
        chosen = _spaced(nbytes, limit_bytes)
        owner, start, nbytes = owner[chosen], start[chosen], nbytes[chosen]
    inputs = np.full((len(owner), context), tokenizer.separator, dtype=np.int64)
    targets = np.full((len(owner), context), IGNORED, dtype=np.int64)
    for index, (document, begin) in enumerate(zip(owner.tolist(), start.tolist(), strict=True)):
        here = arrays[document][begin : begin + context]
        targets[index, : len(here)] = here
        inputs[index, 1 : len(here)] = here[:-1]
        if begin > 0:
            inputs[index, 0] = arrays[document][begin - 1]
    import torch

    return torch.from_numpy(inputs), torch.from_numpy(targets), int(nbytes.sum())


def _table(
    arrays: list[np.ndarray], tokenizer: Tokenizer, context: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each window its document, its first target within that document, and the bytes of its targets."""
    owner, start, nbytes = [], [], []
    for index, tokens in enumerate(arrays):
        if tokens.min() < 0 or tokens.max() >= tokenizer.vocab:
            raise DataError(
                f"tokens {tokens.min()} to {tokens.max()} are not within 0..{tokenizer.vocab - 1}",
                setting="documents",
            )
        begins = np.arange(0, len(tokens), context)
        owner.append(np.full(len(begins), index))
        start.append(begins)
        nbytes.append(np.add.reduceat(tokenizer.byte_lengths[tokens], begins))
    return np.concatenate(owner), np.concatenate(start), np.concatenate(nbytes)


def _spaced(nbytes: np.ndarray, limit_bytes: int) -> np.ndarray:
    """Indices of evenly spaced windows whose bytes come to `limit_bytes` or a little less."""
    count, total = len(nbytes), int(nbytes.sum())
    while (count := min(count - 1, int(count * limit_bytes / total))) > 0:
        chosen = (np.arange(count) * 2 + 1) * len(nbytes) // (2 * count)
        total = int(nbytes[chosen].sum())
        if total <= limit_bytes:
            return chosen
    problem = f"a limit of {limit_bytes} bytes is too small for one window: allow at least {nbytes.max()}"
    raise DataError(problem, setting="limit_bytes", given=limit_bytes)
