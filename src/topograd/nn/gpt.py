"""A GPT of nanochat's class, as a stack.

    x0 = norm(E[token] + E'[previous token])                      the second term is the smear
    h  ← h + s x0;  h ← h + Attn(norm(h));  h ← h + MLP(norm(h))     per layer, s a learned scalar
    z  = cap((W + W_k) norm(h))

The layers are in `blocks.py`; some or all may mix positions by another mixer than attention (`mixers.py`).
The norm is RMSNorm without a gain. Output matrices of layers start at zero and the head near it, so that
every stage first predicts almost the uniform distribution.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.blocks import Block, layer_of, norm
from topograd.nn.config import GPTConfig
from topograd.nn.gpt_decoding import DecodingGPT
from topograd.nn.heads import Head
from topograd.nn.stack import Bus, Projection, Stack


class GPT(Stack):
    """The stack; `GPT(layers=6, width=96, heads=3, vocab=1024, context=128)` and the rest of GPTConfig."""

    frequencies: Tensor

    def __init__(self, config: GPTConfig | None = None, **settings: Any) -> None:
        super().__init__()
        if config is not None and settings:
            raise StackError(f"GPT got a config and also {sorted(settings)}; put everything into one of them")
        self.config = config = config or GPTConfig(**settings)
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.previous = nn.Embedding(config.vocab, config.width) if config.smear else None
        for table in (self.embedding, self.previous):
            if table is not None:
                nn.init.normal_(table.weight, std=1.0 if not config.tied else config.width**-0.5)
        self.layers = nn.ModuleList(layer_of(config, i) for i in range(config.layers))
        own = nn.Parameter(config.head_std * torch.randn(config.vocab, config.width))
        weight = self.embedding.weight if config.tied else own
        self.head = Head(weight, rank=config.head_rank, softcap=config.softcap)
        half = config.width // config.heads // 2
        frequencies = config.rope_base ** (-torch.arange(half) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        x = self.embedding(inputs)
        if self.previous is not None:
            before = self.previous(inputs[:, :-1])
            first = torch.zeros_like(x[:, :1]) if previous is None else self.previous(previous[:, None])
            x = x + torch.cat((first, before), dim=1)
        return norm(x)

    def bus(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> Bus:
        bus = super().bus(x0, inputs, offset)
        angles = bus.positions[..., None] * self.frequencies  # in the buffer's own precision
        if angles.dim() == 3:
            angles = angles[:, None]  # one for all heads
        return Bus(x0, inputs, bus.positions, {"rotary": (angles.cos().to(x0), angles.sin().to(x0))})

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        return self.head(norm(h), stage, rows)

    def projection(self, stage: int) -> Projection:
        return self.head.projection(norm, stage)

    def for_decoding(self) -> Stack:
        if all(isinstance(layer, Block) for layer in self.layers):
            return DecodingGPT(self)
        return super().for_decoding()

    def add_heads(self, stages: Iterable[int], rank: int | None = None) -> bool:
        return self.head.add(stages, rank)

    def has_head(self, stage: int) -> bool:
        return self.head.has_delta(stage)

    def append_layers(self, count: int, index: int | None = None) -> None:
        """Put new layers behind the last one; they are the identity until they learn.

        Layers are counted from the first, so those that are there stay what they are. `index` is what the
        first new one counts as: specialists that stand beside one another all count from their base's end.
        """
        first = replace(self.config, count_from="first")
        if any(_kind(first, i) != _kind(self.config, i) for i in range(self.config.layers)):
            raise StackError(
                f"this model's {self.config.layers} layers alternate counted from the last, so appended ones "
                "would change them; train it again with count_from = 'first'"
            )
        self.config = replace(first, layers=first.layers + count)
        like = self.embedding.weight
        first_new = len(self.layers) if index is None else index
        for i in range(first_new, first_new + count):
            self.layers.append(layer_of(self.config, i, appended=True).to(like.device, like.dtype))

    @property
    def width(self) -> int:
        return self.config.width

    @property
    def context(self) -> int:
        return self.config.context

    def head_parameters(self, stage: int) -> list[nn.Parameter]:
        return self.head.own_parameters(stage)

    @property
    def last_stage(self) -> int:
        return self.head.last_stage


def _kind(config: GPTConfig, index: int) -> tuple[str, bool]:
    """What alternates in layer `index`: its mixer, and whether that has a value embedding."""
    mixer = config.mixer(index)
    return mixer, mixer == "attention" and config.has_value_embedding(index)
