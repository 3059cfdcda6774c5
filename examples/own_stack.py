"""A model of your own as a run: a spec and a stack, trained, resumed, decoded and served like any other.

    topograd train --config examples/own_stack.toml --out runs/decay     from the folder above `examples`
    topograd generate runs/decay --prompt "def " --tokens 40

Each layer adds a decaying average of the past, so there is no attention and no cache of keys.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import topograd as tg


@dataclass(frozen=True, kw_only=True)
class DecaySpec(tg.ModelSpec):
    """The `[model]` table: what a run needs to build the stack again."""

    layers: int = 4
    width: int = 64
    vocab: int = 257
    context: int = 64

    def build(self, topology: tg.Topology) -> tg.Stack:
        return DecayStack(replace(self, layers=topology.layers))


class DecayLayer(nn.Module):
    """h_t ← h_t + W Σ_{s ≤ t} exp(-r (t - s)) V h_s, then an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value, self.output = nn.Linear(width, width), nn.Linear(width, width)
        self.rate = nn.Parameter(torch.tensor(-1.0))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor, ctx: tg.LayerContext, state: tg.History | None = None) -> Tensor:
        values = self.value(F.rms_norm(h, h.shape[-1:]))
        if state is not None:
            values = state.append(values)
        ago = ctx.positions[..., None] - torch.arange(values.shape[1], device=h.device)
        weights = torch.exp(-self.rate.exp() * ago.clamp(min=0)) * (ago >= 0)
        h = h + self.output(weights.to(h.dtype) @ values)
        return h + self.mlp(F.rms_norm(h, h.shape[-1:]))

    def new_state(self, batch: int, capacity: int) -> tg.History:
        return tg.History(capacity)  # `truncate` and `copy` are the whole protocol of a layer's state


class DecayStack(tg.HeadedStack):
    """Embedding, layers, readout; `HeadedStack` adds per-stage heads and the fast loss."""

    def __init__(self, spec: DecaySpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab, spec.width)
        self.layers = nn.ModuleList(DecayLayer(spec.width) for _ in range(spec.layers))
        self.head = tg.Head(nn.Parameter(0.02 * torch.randn(spec.vocab, spec.width)))

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        return self.embedding(inputs)

    def normalize(self, h: Tensor) -> Tensor:
        return F.rms_norm(h, h.shape[-1:])

    @property
    def width(self) -> int:
        return self.spec.width

    @property
    def context(self) -> int:
        return self.spec.context
