"""The bottoms of the gradient factors along a training, and the rates that may be read from them.

Statement. At each checkpoint the largest and the r smallest eigenvalues of every G_l are kept with a
coordinate t of the approach,

    t = loss^{1/2L}   (K ~ t^{2L})      or      t = σ_min(H_l)^{1/l}   (σ_min(H_l) ~ t^l),

and `selection.select_rank` chooses among them the one that goes as the predicted power of t, or says that
the theorem's reach is exceeded. Ranks at the numerical floor, which gauge zeros are, do not take part.

Symbols and shapes. L layers, G_l (d_l, d_l), n checkpoints. Cost: O(d_l³) per layer and checkpoint, and
memory for r + 1 numbers; the factors come from `kfac_factors`.
Source: "Dead Directions: Geometric Singular Learning" §5.1 (the operational rule), Theorem 21, and §12,
§12.1 for the conditions.
Limits. An exponent is reported only if the layers are aligned, the Fisher is not the empirical one, the
window is asymptotic and the training compresses: every reading carries these, and says which of them
failed. Eigenvalues are matched by their order, so ranks that cross are mixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from papers.dead_directions.selection import EXCEEDED, Selection, select_rank
from topograd.errors import GeometryError
from topograd.geometry.monitors.phase import Phase
from topograd.geometry.rates import Noise, Rate, misalignment

Estimator = Literal["expected", "monte-carlo", "empirical"]


class HasG(Protocol):
    """What is read of a layer's factors."""

    @property
    def G(self) -> Tensor: ...


@dataclass(frozen=True)
class Conditions:
    """What must hold for a rate to mean the theorem's exponent."""

    alignment_error: float
    """The tangent of the angle between the dead directions of neighbouring layers."""
    depth: int
    """L, the layers that share the dead direction."""
    noise: Noise
    """The regime; without label noise every exponent is larger by 2L."""
    estimator: Estimator
    phase: Phase
    equivariant: bool
    """Whether the optimizer commutes with the model's gauges. Printed only: what breaks is the alignment."""

    def refusal(self, smallest: float) -> str | None:
        """The first condition that forbids a rate down to the smallest t. The window is judged by the fit."""
        if not self.alignment_error >= 0:
            return f"the alignment error is {self.alignment_error}: directions may not be shared"
        if (leaks := misalignment(self.alignment_error, smallest, self.depth)) is not None:
            return leaks
        if self.phase != "compression":
            return f"the phase is {self.phase}: there is no descent to read, only static readings"
        if self.estimator == "empirical":
            return (
                "the empirical Fisher carries the residuals' own decay; take the expected one for exponents"
            )
        return None

    def __str__(self) -> str:
        commutes = "equivariant" if self.equivariant else "not equivariant"
        return (
            f"alignment error {self.alignment_error:.2g}, {self.noise}, {self.estimator} Fisher, "
            f"{self.phase}, optimizer {commutes}"
        )


@dataclass(frozen=True)
class BottomReading:
    """What one layer's bottom says: a rate with its conditions, or why there is none."""

    layer: str
    selection: Selection
    conditions: Conditions
    refused: str | None

    @property
    def rate(self) -> Rate | None:
        """The rate of the chosen rank, unless it was refused."""
        chosen = self.selection.chosen
        return None if self.refused is not None or chosen is None else chosen.rate

    def __str__(self) -> str:
        message = f"no rate: {self.refused}" if self.rate is None else str(self.rate)
        floor = self.selection.count("floor")
        predicted = f"{self.selection.predicted:g} predicted"
        return f"{self.layer}: {message} [{predicted}; {self.conditions}; {floor} ranks at the floor]"


class BottomMonitor:
    """Keeps the bottoms of the factors it is given and reads their rates."""

    def __init__(self, ranks: int = 4) -> None:
        if ranks < 1:
            raise GeometryError(
                f"{ranks} ranks were asked for", setting="ranks", given=ranks, remedy="keep at least 1"
            )
        self._ranks = ranks
        self._t: list[float] = []
        self._spectra: dict[str, list[Tensor]] = {}

    def record(self, t: float, factors: Mapping[str, HasG]) -> None:
        """Keep the eigenvalues of every layer's G at the coordinate t."""
        if not (math.isfinite(t) and t > 0):
            raise GeometryError(
                f"t is {t}: give a positive number, such as loss^(1/2L)", setting="t", given=t
            )
        if self._t and factors.keys() != self._spectra.keys():
            other = sorted(factors.keys() ^ self._spectra.keys())
            raise GeometryError(
                f"the layers changed: {', '.join(other)}",
                setting="factors",
                given=other,
                remedy="record the same ones each time",
            )
        retained = {name: self._ends(name, layer.G) for name, layer in factors.items()}
        for name, values in retained.items():
            self._spectra.setdefault(name, []).append(values)
        self._t.append(t)

    def read(self, predicted: Mapping[str, float], conditions: Conditions) -> dict[str, BottomReading]:
        """A reading for each layer with a predicted exponent, refused where a condition fails."""
        unknown = sorted(predicted.keys() - self._spectra.keys())
        if unknown or not predicted:
            known = ", ".join(self._spectra) or "none"
            raise GeometryError(
                f"exponents for {unknown or 'no layer'} were given",
                setting="predicted",
                given=unknown,
                remedy=f"recorded layers: {known}",
            )
        return {name: self._read(name, exponent, conditions) for name, exponent in predicted.items()}

    def _read(self, name: str, exponent: float, conditions: Conditions) -> BottomReading:
        t = torch.tensor(self._t, dtype=torch.float64)
        estimator = f"{conditions.estimator} Fisher"
        selection = select_rank(
            t, torch.stack(self._spectra[name]), exponent, estimator=estimator, noise=conditions.noise
        )
        refused = conditions.refusal(min(self._t))
        if refused is None and selection.chosen is None:
            refused = _why(selection)
        return BottomReading(name, selection, conditions, refused)

    def _ends(self, name: str, factor: Tensor) -> Tensor:
        """The smallest eigenvalues and the largest, ascending, on the CPU: a few numbers."""
        if not factor.isfinite().all():
            raise GeometryError(
                f"G of {name} is not finite", setting="factors", given=name, remedy="look at its gradients"
            )
        values = torch.linalg.eigvalsh(factor.detach().double()).clamp(min=0).cpu()
        return torch.cat((values[: min(self._ranks, len(values) - 1)], values[-1:]))


def _why(selection: Selection) -> str:
    """Why no rank was chosen: a window that is not asymptotic, or slopes that are other ones."""
    rates = [rank.rate for rank in selection.ranks if rank.rate is not None]
    slopes = [rate.slope for rate in rates if rate.slope is not None]
    if not slopes:
        return next((str(rate.refused) for rate in rates), EXCEEDED)
    near = min(slopes, key=lambda slope: abs(slope - selection.predicted))
    return f"{EXCEEDED}: {selection.predicted:g} was predicted and the nearest rank has {near:.2f}"
