"""A translator: what an exit of a frozen model reads its state through.

    lens         T(u) = u
    low-rank     T(u) = u + U V u                        rank RANK
    affine       T(u) = u + A u + b
    swiglu       T(u) = u + A u + b + D (silu(G u) ⊙ (E u))

u = h / rms(h) is the state at a stage's end; the model's own norm and head read T(u). T starts as the
identity, which is the logit lens. A translator belongs to an exit before the last: full depth is read as
ever, so it stays as it was, bit for bit.

Shapes: u (..., width). Cost: at most 4 width² multiply-adds a position, beside vocab · width of the head.
Source: "Eliciting Latent Predictions from Transformers with the Tuned Lens" (Belrose et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from topograd.nn.draft_stage import unit

Kind = Literal["lens", "low-rank", "affine", "swiglu"]
RANK = 64


class Translator(nn.Module):
    """T of the module's head; the identity at first."""

    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "low-rank":
            self.down = nn.Linear(width, RANK, bias=False)
            self.up = nn.Linear(RANK, width, bias=False)
            nn.init.zeros_(self.up.weight)
        if kind in ("affine", "swiglu"):
            self.affine = nn.Linear(width, width)
            nn.init.zeros_(self.affine.weight)
            nn.init.zeros_(self.affine.bias)
        if kind == "swiglu":
            self.gate, self.lift = (nn.Linear(width, width, bias=False) for _ in range(2))
            self.drop = nn.Linear(width, width, bias=False)
            nn.init.zeros_(self.drop.weight)

    def forward(self, u: Tensor) -> Tensor:
        if self.kind == "lens":
            return u
        if self.kind == "low-rank":
            return u + self.up(self.down(u))
        moved = u + self.affine(u)
        return moved if self.kind == "affine" else moved + self.drop(F.silu(self.gate(u)) * self.lift(u))


class Readable(Protocol):
    """Whatever reads hidden states: a stack or a runtime."""

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor: ...


class TranslatedReader:
    """A stack or a runtime that reads the exits before the last through translators, by head."""

    def __init__(
        self, reader: Readable, translators: Callable[[], Mapping[int, Translator]], last: int
    ) -> None:
        self.reader, self.translators, self.last = reader, translators, last

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        """Logits of h by the head of `stage`; the last head is not translated, nor its translators asked."""
        translator = None if stage == self.last else self.translators().get(stage)
        return self.reader.readout(h if translator is None else translator(unit(h)), stage, rows)
