"""A layer whose mixer is recurrent: Mamba-2 or Mamba-3 in place of attention and MLP.

    h ← h + s x0;  h ← h + Mixer(norm(h))

The mixer is twice as wide as the stream (expand 2), with heads as wide as the GPT's and one group. It starts
with its output matrix at zero, as attention and MLP do. `hybrid` stacks have one attention block behind every
three of these.

Cost per token in multiply-adds forward: about 6 width² for the projections, and chunk + 2 state times 2 width
for the scan, whatever the context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.nn.mamba2 import Mamba2Mixer
from topograd.nn.mamba3 import Mamba3Mixer
from topograd.nn.recurrent import RecurrentState
from topograd.nn.stack import Bus

if TYPE_CHECKING:
    from topograd.nn.gpt import GPTConfig

EXPAND = 2
PERIOD = 4
"""A hybrid stack's every fourth layer attends, the last one among them."""


def mixer_kind(config: GPTConfig, index: int) -> type[Mamba2Mixer] | type[Mamba3Mixer] | None:
    """The recurrent mixer of layer `index`; None where the layer attends."""
    attends = config.architecture == "hybrid" and (config.layers - 1 - index) % PERIOD == 0
    if config.architecture == "transformer" or attends:
        return None
    return Mamba2Mixer if config.architecture == "mamba2" else Mamba3Mixer


class RecurrentBlock(nn.Module):
    """One layer: blend x0, mix."""

    takes_rows = True

    def __init__(self, config: GPTConfig, kind: type[Mamba2Mixer] | type[Mamba3Mixer]) -> None:
        super().__init__()
        self.mixer = kind(config.width, EXPAND * config.heads, config.width // config.heads, config.ssm_state)
        nn.init.zeros_(self.mixer.out_proj.weight)
        self.x0_scale = nn.Parameter(torch.tensor(0.1)) if config.x0_blend else None

    def forward(
        self, h: Tensor, bus: Bus, state: RecurrentState | None = None, rows: Tensor | None = None
    ) -> Tensor:
        if self.x0_scale is not None:
            h = h + self.x0_scale * bus.x0
        kept = h if rows is None else h[:, rows]
        return kept + self.mixer(F.rms_norm(h, h.shape[-1:]), state, bus.counts, rows)

    def new_state(self, batch: int, capacity: int) -> RecurrentState:
        return self.mixer.new_state(batch)
