"""Training phase, accumulation or compression: whether rates can be read along it.

Statement. Over a window of readings of the weight norm ‖w‖ and of the bottom σ_min (of a layer's
activations, of the stream, or √λ_min of a factor), let Δ be the total change of the logarithm along a
least-squares line. It counts if |Δ| > `CHANGE` and |Δ| > 2 standard errors of it.

    compression     ‖w‖ falls and σ_min falls         an approach: rates may be read
    accumulation    ‖w‖ rises and σ_min does not fall  no descent: only static readings mean something
    undecided       anything else, or fewer than `READINGS` readings

Symbols and shapes. n readings each, in the order of training, evenly spaced. Cost: O(n).
Source: "Dead Directions: Geometric Singular Learning" §12.1 describes the two phases in words. The rule and
its thresholds are ours.
Limits. It describes the window, not the run. Weight decay alone makes ‖w‖ fall; so both signs are asked
for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from topograd.errors import GeometryError
from topograd.geometry.host_copy import to_host
from topograd.geometry.rates import fit_line

Phase = Literal["accumulation", "compression", "undecided"]
CHANGE = 0.01
"""A change of one percent over the window."""
READINGS = 5


@dataclass(frozen=True)
class PhaseReading:
    """The phase, and the changes of log ‖w‖ and log σ_min that decide it, with their standard errors."""

    phase: Phase
    norm_change: float
    norm_error: float
    sigma_change: float
    sigma_error: float
    readings: int

    def __str__(self) -> str:
        return (
            f"{self.phase}: log ‖w‖ {self.norm_change:+.3f} ± {self.norm_error:.3f}, log σ_min "
            f"{self.sigma_change:+.3f} ± {self.sigma_error:.3f} over {self.readings} readings"
        )


def weight_norm(model: nn.Module) -> float:
    """‖w‖ over all parameters, each once, in float64."""
    squares = to_host([parameter.detach().double().square().sum() for parameter in model.parameters()])
    if not squares:
        raise GeometryError(f"{type(model).__name__} has no parameters", setting="model")
    return math.sqrt(math.fsum(squares))


def read_phase(norms: Sequence[float], sigmas: Sequence[float]) -> PhaseReading:
    """The phase of a window of weight norms and σ_min.

    >>> down = [0.9**i for i in range(6)]
    >>> read_phase(down, down).phase
    'compression'
    """
    if len(norms) != len(sigmas) or not norms:
        raise GeometryError(
            f"there are {len(norms)} norms and {len(sigmas)} σ_min",
            setting="sigmas",
            given=len(sigmas),
            remedy="give as many of each, at least one",
        )
    for name, values in (("norms", norms), ("sigmas", sigmas)):
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise GeometryError(setting=name, given=list(values), allowed="positive numbers")
    if len(norms) < READINGS:
        return PhaseReading("undecided", math.nan, math.nan, math.nan, math.nan, len(norms))
    norm, sigma = _change(norms), _change(sigmas)
    up, down = _sign(*norm) > 0, _sign(*norm) < 0
    phase: Phase = "undecided"
    if down and _sign(*sigma) < 0:
        phase = "compression"
    elif up and _sign(*sigma) >= 0:
        phase = "accumulation"
    return PhaseReading(phase, *norm, *sigma, len(norms))


def _change(values: Sequence[float]) -> tuple[float, float]:
    """The change of log values from the first to the last along the line, and its standard error."""
    y = torch.tensor(values, dtype=torch.float64).log()
    slope, _, error, _ = fit_line(torch.stack((torch.linspace(-0.5, 0.5, len(y), dtype=torch.float64), y)))
    return slope, error


def _sign(change: float, error: float) -> int:
    if abs(change) <= max(CHANGE, 2 * error):
        return 0
    return 1 if change > 0 else -1
