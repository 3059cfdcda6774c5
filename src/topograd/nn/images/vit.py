"""A small vision transformer: patches as tokens, attention to all of them, pre-norm.

    x0 = patches W + position            (batch, places, width)
    h ← h + A(LN(h));  h ← h + M(LN(h))  A attention over all places, M an MLP four times as wide, GELU
    features: the mean over places of LN(h) without gains, so that every stage's head sees one scale

In a layer that is appended the last matrices of A and M are zero at first. Source: Dosovitskiy et al. 2021,
with the mean instead of a class token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.nn.images.stack import ImageStack, Shape
from topograd.nn.stack import LayerContext


class Encoder(nn.Module):
    """One layer; with `identity` it changes nothing at first."""

    def __init__(self, width: int, heads: int, identity: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        if identity:
            for last in (self.out, self.down):
                nn.init.zeros_(last.weight)
                nn.init.zeros_(last.bias)

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        batch, places, width = h.shape
        split = self.queries(self.norm1(h)).reshape(batch, places, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, places, width)
        h = h + self.out(mixed)
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class ViT(ImageStack):
    """Layers of attention over patches."""

    reads_ahead = True

    def make_embedding(self) -> None:
        patch, width = self.config.patch_size, self.config.own_widths[0]
        self.patches = nn.Conv2d(self.config.shape[0], width, patch, patch)
        places = (self.config.shape[1] // patch) * (self.config.shape[2] // patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, places, width))

    @property
    def start(self) -> Shape:
        return self.position.shape[1], self.position.shape[2]

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        return self.patches(super().embed(inputs)).flatten(2).transpose(1, 2) + self.position

    def layer(self, depth: int, shape: Shape) -> tuple[nn.Module, Shape]:
        return Encoder(shape[1], self.config.heads), shape

    def extra(self, shape: Shape) -> nn.Module:
        return Encoder(shape[1], self.config.heads, identity=True)

    def features(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, h.shape[-1:]).mean(1)

    def feature_width(self, shape: Shape) -> int:
        return shape[1]

    @property
    def width(self) -> int:
        return self.config.own_widths[0]

    @property
    def context(self) -> int:
        return self.start[0]
