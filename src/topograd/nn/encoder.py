"""The masked text encoder: a GPT whose attention sees all positions.

Its vocabulary has one token more than the tokenizer's, the last: the mask, which stands where a token is
hidden (`data/masked.py`). The loss is that of the hidden tokens, so that a position may read all others, and
interfaces that pool a whole sequence are legitimate. It predicts no next token and does not generate.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from topograd.nn.gpt import GPT
from topograd.nn.stack import LayerContext


class Encoder(GPT):
    """A GPT whose attention sees all positions; `vocab` counts the mask."""

    reads_ahead = True

    def layer_context(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> LayerContext:
        ctx = super().layer_context(x0, inputs, offset)
        time = x0.shape[1]
        return replace(ctx, mask=torch.ones(time, time, dtype=torch.bool, device=x0.device))
