"""Layers of transformers: attention with an MLP, or another mixer in the place of attention.

    h ← h + s x0;  h ← h + Mixer(norm(h));  h ← h + MLP(norm(h))         s a learned scalar, in the GPT

A mixer that is an MLP too (Mamba) comes without one. In a model from scratch output matrices start at zero:
a new layer adds s x0 and nothing else. One that is appended to a trained stack starts with s = 0 too, so that
it is the identity, bit for bit ("Product of Experts" §6.1). Learned positions are added by the first layer,
because the embedding has no positions: another stage that reads the embedding gets none.

Cost per token and layer, in multiply-adds forward: 2 (heads + kv_heads) head_width width for attention's
matrices, 3 mlp_width width for the MLP (2 if not gated), and 2 context heads head_width for attention.
"""

from typing import cast

import torch
from torch import Tensor, nn

from topograd.nn.config import MIXERS
from topograd.nn.layer_state import KVState, LayerState
from topograd.nn.mamba.mixers import Mixer, RowMixer
from topograd.nn.stack import LayerContext
from topograd.nn.transformer.attention import Attention
from topograd.nn.transformer.config import BlockConfig
from topograd.nn.transformer.parts import ACTIVATIONS, INIT_STD, linear_of, norm, norm_of

X0_SCALE = 0.1
"""The share of x0 that a new layer adds."""


class MLP(nn.Module):
    """down(act(gate x) ⊙ up x), or down(act(up x))."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        inner, bias, gated = config.mlp_width, config.mlp_bias, config.traits.gated
        if config.traits.scratch:  # the order in which optimizers number the parameters
            self.up = linear_of(config, config.width, inner, bias)
            self.gate = linear_of(config, config.width, inner, bias) if gated else None
        else:
            self.gate = linear_of(config, config.width, inner, bias) if gated else None
            self.up = linear_of(config, config.width, inner, bias)
        self.down = linear_of(config, inner, config.width, bias, scale=0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: blend x0 where the model does, attend, transform."""

    takes_rows = True

    def __init__(self, config: BlockConfig, index: int) -> None:
        super().__init__()
        self.positions: nn.Embedding | None = None
        if config.traits.learned_positions and index == 0:
            self.positions = table(config.positions, config.width)
        self.attention_norm = norm_of(config, config.width)
        self.attention = Attention(config, index)
        self.mlp_norm = norm_of(config, config.width)
        self.mlp = MLP(config)
        post = config.traits.post_norms
        self.attention_post_norm = norm_of(config, config.width) if post else None
        self.mlp_post_norm = norm_of(config, config.width) if post else None
        self.x0_scale = nn.Parameter(torch.tensor(X0_SCALE)) if config.x0_blend else None

    def forward(
        self, h: Tensor, ctx: LayerContext, state: KVState | None = None, rows: Tensor | None = None
    ) -> Tensor:
        if self.positions is not None:
            h = h + self.positions(ctx.positions.clamp(max=len(self.positions.weight) - 1))
        if self.x0_scale is not None:
            h = h + self.x0_scale * ctx.x0
        y = self.attention(self.attention_norm(h), ctx, state, rows)
        h = h if rows is None else h[:, rows]
        h = h + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = self.mlp(self.mlp_norm(h))
        return h + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))

    def new_state(self, batch: int, capacity: int) -> KVState:
        return self.attention.new_state(batch, capacity)


class MixerBlock(nn.Module):
    """One layer with any other mixer: blend x0, mix, and transform unless the mixer does that too."""

    takes_rows = True

    def __init__(self, config: BlockConfig, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer
        self.mlp = MLP(config) if getattr(mixer, "with_mlp", True) else None
        self.x0_scale = nn.Parameter(torch.tensor(X0_SCALE)) if config.x0_blend else None

    def forward(
        self, h: Tensor, ctx: LayerContext, state: LayerState | None = None, rows: Tensor | None = None
    ) -> Tensor:
        if self.x0_scale is not None:
            h = h + self.x0_scale * ctx.x0
        if rows is None:
            h = h + self.mixer(norm(h), ctx, state)
        elif getattr(self.mixer, "takes_rows", False):
            h = h[:, rows] + cast(RowMixer, self.mixer)(norm(h), ctx, state, rows)
        else:
            h = (h + self.mixer(norm(h), ctx, state))[:, rows]
        return h if self.mlp is None else h + self.mlp(norm(h))

    def new_state(self, batch: int, capacity: int) -> LayerState:
        return self.mixer.new_state(batch, capacity)


def layer_of(config: BlockConfig, index: int) -> Block | MixerBlock:
    """Layer `index` of the model."""
    name = config.mixer(index)
    return Block(config, index) if name == "attention" else MixerBlock(config, MIXERS[name](config, index))


def make_identity(layer: Block | MixerBlock) -> None:
    """Make a new layer the identity; the output matrix of another mixer is zero already."""
    if layer.x0_scale is not None:
        nn.init.zeros_(layer.x0_scale)
    if layer.mlp is not None:
        nn.init.zeros_(layer.mlp.down.weight)
    attention = getattr(layer, "attention", None)
    if attention is not None:
        nn.init.zeros_(attention.output.weight)


def table(rows: int, width: int) -> nn.Embedding:
    """An embedding with small random weights."""
    weight = torch.empty(rows, width)
    if not weight.is_meta:  # initialising a meta tensor takes seconds
        nn.init.normal_(weight, std=INIT_STD)
    return nn.Embedding(rows, width, _weight=weight)
