"""Translators: affine maps before the heads of early exits of a frozen model.

    T(u) = u + A u + b

u = h / rms(h) is the state at a stage's end; the model's own norm and head read T(u). T starts as the
identity, which is the logit lens. A translator belongs to an exit before the last: full depth is read as
ever, so it stays as it was, bit for bit.

Shapes: u (..., width). Cost: width² multiply-adds a position, beside vocab · width of the head.
Source: "Eliciting Latent Predictions from Transformers with the Tuned Lens" (Belrose et al. 2023).
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor, nn

from topograd.nn.draft_stage import unit


class Translator(nn.Module):
    """T of the module's head; the identity at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.affine = nn.Linear(width, width)
        nn.init.zeros_(self.affine.weight)
        nn.init.zeros_(self.affine.bias)

    def forward(self, u: Tensor) -> Tensor:
        return u + self.affine(u)


class Readable(Protocol):
    """A stack or a runtime: hidden states to logits."""

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor: ...


class TranslatedReader:
    """A stack or a runtime that reads the exits before the last through translators, by head."""

    def __init__(
        self, reader: Readable, translators: Callable[[], Mapping[int, Translator]], last: int
    ) -> None:
        self.reader, self.translators, self.last = reader, translators, last

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        """Logits of h by the head of `stage`; the last head is not translated."""
        translator = None if stage == self.last else self.translators().get(stage)
        return self.reader.readout(h if translator is None else translator(unit(h)), stage, rows)
