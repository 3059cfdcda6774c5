"""The same GPT written plainly in torch, with nothing of topograd: the yardstick of the backprop step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class PlainBlock(nn.Module):
    def __init__(self, vocab: int, width: int, heads: int, valued: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.x0 = nn.Parameter(torch.tensor(0.1))
        self.values = nn.Embedding(vocab, width) if valued else None
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, h: Tensor, x0: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = h.shape
        h = h + self.x0 * x0
        x = norm(h)
        shape = (batch, time, self.heads, width // self.heads)
        v = self.v(x)
        if self.values is not None:
            v = v + self.gate * self.values(tokens)
        q, k, v = (t.view(shape).transpose(1, 2) for t in (self.q(x), self.k(x), v))
        q, k = (
            norm(torch.cat((a * cos + b * sin, b * cos - a * sin), -1))
            for a, b in (q.chunk(2, -1), k.chunk(2, -1))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.o(y.transpose(1, 2).reshape(batch, time, width))
        return h + self.down(F.relu(self.up(norm(h))).square())


class PlainGPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocab: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.before = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            PlainBlock(vocab, width, heads, (layers - 1 - i) % 2 == 0) for i in range(layers)
        )
        self.head = nn.Linear(width, vocab, bias=False)
        self.cos: Tensor
        self.sin: Tensor
        half = width // heads // 2
        angles = torch.arange(context)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x0 = norm(x + F.pad(self.before(tokens[:, :-1]), (0, 0, 1, 0)))
        h = x0
        for block in self.blocks:
            h = block(h, x0, tokens, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        return self.head(norm(h))


def plain_step(model: PlainGPT, tokens: Tensor, targets: Tensor) -> float:
    """Forward, loss and backward, as any tutorial writes them."""
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item()


def copy_weights(plain: PlainGPT, stack: nn.Module) -> None:
    """Give the plain model the weights of topograd's GPT of the same shape."""
    renames = {
        "tokens.": "embedding.",
        "before.": "previous.",
        "blocks.": "layers.",
        ".q.": ".attention.query.",
        ".k.": ".attention.key.",
        ".v.": ".attention.value.",
        ".o.": ".attention.output.",
        ".up.": ".mlp.up.",
        ".down.": ".mlp.down.",
        ".values.": ".attention.value_embedding.",
        ".gate": ".attention.value_gate",
        ".x0": ".x0_scale",
    }
    source = dict(stack.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            for ours, theirs in renames.items():
                name = name.replace(ours, theirs)
            if name in source:  # layers without value embeddings have no gate to copy
                parameter.copy_(source[name])
