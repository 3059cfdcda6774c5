"""The GPT of nanochat's class, a transformer with the traits of `GPTConfig`, and its masked encoder.

The encoder's attention sees all positions. Its vocabulary has one token more than the tokenizer's, the last:
the mask, which stands where a token is hidden (`data/masked.py`). The loss is that of the hidden tokens, so
that a position may read all others, and interfaces that pool a whole sequence are legitimate. It predicts no
next token and does not generate.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from topograd.errors import StackError
from topograd.nn.config import GPTConfig
from topograd.nn.stack import LayerContext
from topograd.nn.transformer.stack import Transformer
from topograd.reading import build_dataclass


class GPT(Transformer):
    """The stack; `GPT(layers=6, width=96, heads=3, vocab=1024, context=128)` and the rest of GPTConfig."""

    config: GPTConfig

    def __init__(self, config: GPTConfig | None = None, **settings: Any) -> None:
        if config is not None and settings:
            allowed = "given alone, without other settings"
            raise StackError(setting="config", given=sorted(settings), allowed=allowed)
        super().__init__(config or build_dataclass(GPTConfig, settings))


class Encoder(GPT):
    """A GPT whose attention sees all positions; `vocab` counts the mask."""

    reads_ahead = True

    def layer_context(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> LayerContext:
        ctx = super().layer_context(x0, inputs, offset)
        time = x0.shape[1]
        return replace(ctx, mask=torch.ones(time, time, dtype=torch.bool, device=x0.device))
