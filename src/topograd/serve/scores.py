"""Log-probabilities of tokens: log softmax of the logits that an exit predicts by, at temperature 1.

    scores(z, tokens, k)    log p of each token under logits z (n, vocab), and of the k likeliest

They are what `score` gives for the same model, and what `echo` with `logprobs` answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from topograd.serve.jobs import Scored


def scores(logits: Tensor, tokens: Sequence[int], top: int) -> list[Scored]:
    """A score for each of n tokens from n rows of logits."""
    logp = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    logp = logp.log_softmax(-1)
    chosen = logp[torch.arange(len(tokens)), torch.tensor(list(tokens), dtype=torch.long)].tolist()
    if not top:
        return [Scored(value) for value in chosen]
    best = logp.topk(min(top, logp.shape[-1]))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    likeliest = [tuple(zip(ids, values, strict=True)) for ids, values in rows]
    return [Scored(value, pairs) for value, pairs in zip(chosen, likeliest, strict=True)]
