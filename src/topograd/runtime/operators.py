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
from numpy.typing import NDArray

from topograd.runtime.quantize import Quantized, dequantize
from topograd.topology.plan import PlannedStage

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.nn.stack import LayerContext, Stack
    from topograd.nn.transformer.stack import Transformer


EPSILON = np.float32(np.finfo(np.float32).eps)
"""As torch.nn.functional.rms_norm has it."""


def unsupported_reason(stack: Stack, recurrent: bool = False) -> str | None:
    """Why a stack cannot be read part by part, with `recurrent` mixers or without; None where it can."""
    import torch

    from topograd.nn.capabilities import operator_form
    from topograd.nn.mamba.mamba2 import Mamba2Mixer
    from topograd.nn.mamba.mamba3 import Mamba3Mixer
    from topograd.nn.transformer.block import Block, MixerBlock

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

    ready = False

    def __init__(self, stack: Stack, made: dict[str, Quantized] | None) -> None:
        self.stack = cast("Transformer", stack)
        self.made = {} if made is None else made
        """Matrices that are quantised, by name."""
        traits = self.stack.config.traits  # made anew at each look
        self.normed, self.learned = traits.normed_embedding, traits.learned_positions
        self.known_positions = self.stack.config.positions if self.learned else None
        self.scale = self.stack.config.width**0.5 if traits.scaled_embedding else None
        tables = (self.stack.embedding, self.stack.previous)
        self.tables = [table.weight.detach().numpy() for table in tables if table is not None]
        self._read: dict[int, tuple[int, tuple[Tensor, Tensor] | None]] = {}

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        return self.stack.embed(inputs, previous)

    def embed_array(self, tokens: Sequence[int], previous: Sequence[int]) -> NDArray[Any]:
        """In fewer steps than torch takes for the few tokens of a round."""
        x = self.tables[0][tokens]
        if len(self.tables) > 1:
            before = np.asarray(previous)
            known = before >= 0
            x[known] += self.tables[1][before[known]]
        if self.scale is not None:
            x *= np.float32(self.scale)
        if self.normed:
            x /= np.sqrt(np.einsum("nw,nw->n", x, x)[:, None] / x.shape[-1] + EPSILON)
        return x

    def layer_context(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> LayerContext:
        from topograd.nn.stack import Stack
        from topograd.nn.transformer.attention import check_reach

        if self.learned:
            check_reach(self.stack.config, inputs, offset)
        return Stack.layer_context(self.stack, x0, inputs, offset)

    def shapes(self, planned: PlannedStage) -> dict[int, tuple[int, int]]:
        """By layer, how many heads of keys and values a stage caches, and how wide they are."""
        from topograd.nn.transformer.block import Block

        each: list[tuple[int, Any]] = [(i, self.stack.layers[i]) for i in planned.layers]
        attend = [(i, layer.attention) for i, layer in each if isinstance(layer, Block)]
        return {i: (a.kv_heads, a.head_width) for i, a in attend}

    def _head_width(self) -> int:
        """0 where no layer attends."""
        from topograd.nn.transformer.block import Block

        return next((each.attention.head_width for each in self.stack.layers if isinstance(each, Block)), 0)

    def rotations(self, reach: int) -> dict[str, NDArray[np.float32]]:
        """Cosines and sines of the first `reach` positions, for each kind of rotation."""
        import torch

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
        if self.known_positions is not None and stop > self.known_positions:
            import torch

            from topograd.nn.transformer.attention import check_reach

            check_reach(self.stack.config, torch.zeros(1, stop), 0)

    # Heads

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        flat = h.reshape(-1, h.shape[-1])
        logits = self._logits(flat, stage) if rows is None else self._some(flat, stage, rows)
        return logits.view(*h.shape[:-1], -1)

    def _logits(self, flat: Tensor, stage: int) -> Tensor:
        import torch.nn.functional as F

        which, factors = self._read_by(stage)
        if factors is None:
            return self._product(flat, which)
        up, down = factors  # W x + U (V x): all of them share W
        return self._product(flat, -1).addmm_(F.linear(self.stack.normalize(flat), down), up.t())

    def _read_by(self, stage: int) -> tuple[int, tuple[Tensor, Tensor] | None]:
        """Whose matrix a stage's logits are read by, and what is added to it."""
        if stage not in self._read:  # to ask the modules for each token takes long
            head = self.stack.head  # U and V of a stage that reads the shared matrix and adds to it
            self._read[stage] = self._which(stage), None if head.softcap is not None else head.low_rank(stage)
        return self._read[stage]

    def _which(self, stage: int) -> int:
        """The stage whose matrix a stage reads; -1 is the one that those without their own share."""
        return stage if self.stack.has_head(stage) else -1

    def readout_array(self, h: NDArray[Any], stage: int) -> NDArray[Any]:
        import torch

        return self._logits(torch.from_numpy(h), stage).numpy()

    @abstractmethod
    def _product(self, flat: Tensor, which: int) -> Tensor:
        """Logits by the matrix of a stage, or by the one (-1) that stages without their own share."""

    def _head_name(self, stage: int) -> str:
        return "head" if (which := self._which(stage)) < 0 else f"head.{which}"

    def _some(self, flat: Tensor, stage: int, rows: Tensor) -> Tensor:
        """Logits of some tokens: their rows of the matrix alone are read."""
        import torch
        import torch.nn.functional as F

        from topograd.nn.heads import cap

        which, factors = self._read_by(stage)
        packed = self.made.get("head" if factors is not None or which < 0 else f"head.{which}")
        if packed is None:
            return self.stack.readout(flat, stage, rows)
        head, x = self.stack.head, self.stack.normalize(flat)
        matrix = torch.from_numpy(dequantize(packed.rows(rows.numpy()), flat.shape[-1]))
        z = F.linear(x, matrix, None if head.bias is None else head.bias[rows])
        if factors is not None:
            up, down = factors
            z = z + F.linear(F.linear(x, down), up[rows])
        return cap(z, head.softcap)
