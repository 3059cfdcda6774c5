"""What runtimes that are written for transformers share: they read a stack's parts instead of calling it.

    embed_array         x0 of packed tokens as an array
    rotations, shapes   tables of cosines and sines; sizes of the caches
    readout             logits of a head: (W + W_k) norm(h), by the product that each runtime has

A runtime gives `_product`, logits of a head by its own kernels, and `made`, the matrices that are quantised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from topograd.nn.capabilities import operator_form
from topograd.nn.heads import cap
from topograd.nn.mamba.mamba2 import Mamba2Mixer
from topograd.nn.mamba.mamba3 import Mamba3Mixer
from topograd.nn.stack import LayerContext, Stack
from topograd.nn.transformer.attention import check_reach
from topograd.nn.transformer.block import Block, MixerBlock
from topograd.nn.transformer.parts import EPSILON
from topograd.runtime.quantize import Quantized, dequantize
from topograd.topology.plan import PlannedStage

if TYPE_CHECKING:
    from topograd.nn.transformer.stack import Transformer


def unsupported_reason(stack: Stack, recurrent: bool = False) -> str | None:
    """Why a stack cannot be read part by part, with `recurrent` mixers or without; None where it can."""
    form = operator_form(stack)
    if form is None:
        return f"a stack of the kind {type(stack).__name__} is not made of transformer blocks"
    for layer in form.layers:
        mixer = layer.mixer if type(layer) is MixerBlock and layer.mlp is None else None
        if type(layer) is not Block and not (recurrent and isinstance(mixer, Mamba2Mixer | Mamba3Mixer)):
            return f"{type(getattr(layer, 'mixer', layer)).__name__} layers are not transformer blocks"
    weight = form.embedding.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        kind = str(weight.dtype).removeprefix("torch.")
        return f"the weights are {kind} on {weight.device}, not float32 on a CPU"
    return None


class OperatorRuntime(ABC):
    """A runtime over the parts of a transformer in float32 on a CPU."""

    def __init__(self, stack: Stack, made: dict[str, Quantized] | None) -> None:
        self.stack = cast("Transformer", stack)
        self.made = {} if made is None else made
        """Matrices that are quantised, by name."""
        traits = self.stack.config.traits  # made anew at each look
        self._normed, self._learned = traits.normed_embedding, traits.learned_positions
        tables = (self.stack.embedding, self.stack.previous)
        self._read: dict[int, tuple[int, tuple[Tensor, Tensor] | None]] = {}
        """By stage, whose matrix its logits are read by, and what is added to it."""
        self._tables = [table.weight.detach().numpy() for table in tables if table is not None]

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        return self.stack.embed(inputs, previous)

    def embed_array(self, tokens: Sequence[int], previous: Sequence[int]) -> NDArray[Any]:
        """In fewer steps than torch takes for the few tokens of a round."""
        if not self._normed:
            return self.stack.embed(torch.tensor([tokens]))[0].numpy()
        x = self._tables[0][tokens]
        if len(self._tables) > 1:
            before = np.asarray(previous)
            known = before >= 0
            x[known] += self._tables[1][before[known]]
        x /= np.sqrt(np.einsum("nw,nw->n", x, x)[:, None] / x.shape[-1] + np.float32(EPSILON))
        return x

    def layer_context(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> LayerContext:
        if self._learned:
            check_reach(self.stack.config, inputs, offset)
        return Stack.layer_context(self.stack, x0, inputs, offset)

    def shapes(self, planned: PlannedStage) -> dict[int, tuple[int, int]]:
        """By layer, how many heads of keys and values a stage caches, and how wide they are."""
        each: list[tuple[int, Any]] = [(i, self.stack.layers[i]) for i in planned.layers]
        attend = [(i, layer.attention) for i, layer in each if isinstance(layer, Block)]
        return {i: (a.kv_heads, a.head_width) for i, a in attend}

    def _head_width(self) -> int:
        """0 where no layer attends."""
        return next((each.attention.head_width for each in self.stack.layers if isinstance(each, Block)), 0)

    def rotations(self, reach: int) -> dict[str, NDArray[np.float32]]:
        """Cosines and sines of the first `reach` positions, for each kind of rotation."""
        half = self._head_width() // 2
        sign = -1 if self.stack.config.traits.half_tables else 1  # those turn the other way
        tables = self.stack.rotations(torch.arange(reach), torch.empty(0))
        each = {kind: (cos[:, :half], sign * sin[:, :half]) for kind, (cos, sin) in tables.items()}
        return {
            f"{turn}.{kind}": table.float().contiguous().numpy()
            for kind, both in each.items()
            for turn, table in zip(("cos", "sin"), both, strict=True)
        }

    def _check_stop(self, stop: int) -> None:
        if self._learned and stop > self.stack.config.positions:
            check_reach(self.stack.config, torch.zeros(1, stop), 0)

    # Heads

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        flat = h.reshape(-1, h.shape[-1])
        logits = self._logits(flat, stage) if rows is None else self._some(flat, stage, rows)
        return logits.view(*h.shape[:-1], -1)

    def _logits(self, flat: Tensor, stage: int) -> Tensor:
        if stage not in self._read:  # to ask the modules for each token takes long
            own = stage if self.stack.has_head(stage) else -1
            self._read[stage] = own, self._factors(stage)
        own, factors = self._read[stage]
        if factors is None:
            return self._product(flat, own)
        up, down = factors  # W x + U (V x): all of them share W
        return self._product(flat, -1).addmm_(F.linear(self.stack.normalize(flat), down), up.t())

    def _factors(self, stage: int) -> tuple[Tensor, Tensor] | None:
        """(U, V) of a stage that reads the shared matrix and adds to it; None where its matrix is its own."""
        head = self.stack.head
        return None if head.softcap is not None else head.low_rank(stage)

    @abstractmethod
    def _product(self, flat: Tensor, which: int) -> Tensor:
        """Logits by the matrix of a stage, or by the one (-1) that stages without their own share."""

    def _head_name(self, stage: int) -> str:
        return f"head.{stage}" if self.stack.has_head(stage) else "head"

    def _some(self, flat: Tensor, stage: int, rows: Tensor) -> Tensor:
        """Logits of some tokens: their rows of the matrix alone are read."""
        factors = self._factors(stage)
        packed = self.made.get("head" if factors is not None else self._head_name(stage))
        if packed is None:
            return self.stack.readout(flat, stage, rows)
        head, x = self.stack.head, self.stack.normalize(flat)
        matrix = torch.from_numpy(dequantize(packed.rows(rows.numpy()), flat.shape[-1]))
        z = F.linear(x, matrix, None if head.bias is None else head.bias[rows])
        if factors is not None:
            up, down = factors
            z = z + F.linear(F.linear(x, down), up[rows])
        return cap(z, head.softcap)
