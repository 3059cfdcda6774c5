"""The GPT of nanochat's class: a transformer with the traits of `GPTConfig`."""

from __future__ import annotations

from typing import Any

from topograd.errors import StackError
from topograd.nn.config import GPTConfig
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
