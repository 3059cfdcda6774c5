"""Sums of h hᵀ and δ δᵀ over rows: half of each matrix, and one for all layers that read the same tensors.

Statement. A symmetric sum (d, d) is computed and stored as panels of its lower half: 9/16 of it where d is
above `WHOLE`. Layers that read one tensor one after the other, as queries, keys and values do, are *readers*
of it; Σ h hᵀ is stored once for each set of readers, and that of a layer is the sum over the sets it is in.

Symbols and shapes. rows (M, d). Cost: M d² multiply-adds or 9/16 of them, and a copy of the rows.
Source: the factors are those of `factors.py`; halves and readers are ours.
Limits. Whether two layers read the same tensor is seen by its identity and version.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from topograd.geometry.layers import Call

T = TypeVar("T")
WIDEST = 8192
"""The widest factor that is formed: 512 MiB. A vocabulary of 50 000 would take 20 GB."""
WHOLE = 128
PANELS = 8


class Total(Protocol):
    """A sum over rows (M, d)."""

    def add(self, rows: Tensor) -> None:
        """Take rows in."""

    def take(self, other: Self) -> None:
        """Add another sum to this one."""

    def mean(self, count: int) -> Any:
        """The factor."""


class HalfGram:
    """rowsᵀ rows in float64, by panels of its lower half."""

    def __init__(self, size: int, device: torch.device, multiplied_in: torch.dtype = torch.float32) -> None:
        self._coarsest = multiplied_in
        self._step = size if size <= WHOLE else -(-size // PANELS)
        starts = range(0, size, self._step)
        shapes = [(size - start, min(self._step, size - start)) for start in starts]
        self._panels = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes]

    def add(self, rows: Tensor) -> None:
        """Multiply in the type of the rows, `multiplied_in` at least, and add in float64."""
        with torch.autocast(rows.device.type, enabled=False):
            rows = rows.to(torch.promote_types(rows.dtype, self._coarsest))
            for start, panel in zip(range(0, rows.shape[1], self._step), self._panels, strict=True):
                left, right = rows[:, start:].mT, rows[:, start : start + self._step]
                if rows.dtype == panel.dtype:
                    panel.addmm_(left, right)
                else:
                    panel += left @ right

    def take(self, other: HalfGram) -> None:
        torch._foreach_add_(self._panels, other._panels)

    def mean(self, count: int) -> Tensor:
        """The whole matrix over `count`."""
        size = len(self._panels[0])
        whole = self._panels[0].new_empty(size, size)
        for start, panel in zip(range(0, size, self._step), self._panels, strict=True):
            stop = start + self._step
            whole[start:, start:stop] = panel
            whole[start:stop, stop:] = panel[self._step :].mT
        return whole.div_(count)


def gram(rows: Tensor) -> Tensor:
    """rowsᵀ rows (d, d), multiplied in float32 at least, in float64."""
    total = HalfGram(rows.shape[1], rows.device)
    total.add(rows)
    return total.mean(1)


class GramSums:
    """A reducer (`layers.py`) that sums h hᵀ and δ δᵀ of every layer."""

    def __init__(self, widest: int = WIDEST) -> None:
        self._widest = widest
        self._inputs: dict[tuple[str, ...], Total] = {}
        self._gradients: dict[str, Total] = {}
        self.rows: dict[str, int] = {}
        """M of each layer."""
        self._open: tuple[Tensor, int, Any, Tensor, list[str]] | None = None
        """The tensor that was read last, its version, its way to rows, its rows, and its readers so far."""
        self._last: tuple[list[Total], Any] | None = None

    def refuses(self, layer: str, sides: tuple[int, int]) -> str | None:
        side = max(sides)
        return f"a factor of side {side} is wider than {self._widest}" if side > self._widest else None

    def see_inputs(self, layer: str, call: Call) -> None:
        self.read(layer, call.source, call.inputs)

    def read(self, layer: str, source: Tensor, inputs: Callable[[Tensor], Tensor]) -> None:
        """A layer reads the rows `inputs(source)`."""
        again = self._open is not None and self._open[0] is source and self._open[2] is inputs
        if not again or self._open is None or self._open[1] != source._version or layer in self._open[4]:
            self.close()
            rows = inputs(source.detach()).clone()  # the model may overwrite its own
            self._open = source, source._version, inputs, rows, []
        self._open[4].append(layer)
        self.rows[layer] = self.rows.get(layer, 0) + len(self._open[3])

    def see_gradients(self, layer: str, rows: Tensor) -> None:
        self.close()
        if layer not in self._gradients:
            self._gradients[layer] = self.empty(rows)
        self._gradients[layer].add(rows)

    def empty(self, rows: Tensor) -> Total:
        """A sum of nothing, for rows like these."""
        return HalfGram(rows.shape[1], rows.device)

    def close(self) -> None:
        """Nobody else reads the last tensor: add it to the sum of its readers."""
        if self._open is not None:
            _, _, _, rows, readers = self._open
            self._open = self._last = None
            total = self._inputs.get(tuple(readers))
            if total is None:
                total = self._inputs[tuple(readers)] = self.empty(rows)
            total.add(rows)

    def mean(self, layer: str, side: str, terms: int) -> Any:
        """A, a mean over rows, or G, a sum over the loss `terms`; None where nothing was seen.

        Readers of the same tensors that are asked for one after the other are given one A.
        """
        self.close()
        if side == "G":
            total = self._gradients.get(layer)
            return None if total is None else total.mean(terms)
        totals = [total for readers, total in self._inputs.items() if layer in readers]
        if not totals:
            return None
        if self._last is None or self._last[0] != totals:
            first = copy.deepcopy(totals[0]) if len(totals) > 1 else totals[0]
            for other in totals[1:]:
                first.take(other)
            self._last = totals, first.mean(self.rows[layer])
        return self._last[1]


class Remembered(threading.local, Generic[T]):
    """A function that, of the argument that it had last in this thread, gives the result that it gave."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self._last: tuple[Any, T] | None = None

    def __call__(self, x: Any) -> T:
        if self._last is None or self._last[0] is not x:
            self._last = x, self._function(x)
        return self._last[1]
