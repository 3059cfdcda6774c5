"""The freeze-probe: rates of a described network, measured on weights that are set by hand.

Statement. At every t of a log grid the weights are set, not trained, and

    G node    mean over samples of Σ_c (δ^{(c)} · v)²     δ^{(c)} the gradient of cotangent c at the node
    A node    mean over samples of (h · v)²
    product   A_{l-1} · G_l, t by t
    σ_min     the distance of the dead column of H from the span of the others: |R_dd| of a QR factorisation
              with that column last; an amplitude
    λ_min     the same of all δ^{(c)}, squared, over n: the Schur complement of G on its dead row
    K         mean ‖f_t(x) - f_0(x)‖² / 2σ²

are fitted as powers of t. The label noise is integrated by its cotangents: σ e_c for each output c (squared
error), √p_c (p - e_c) for each class c (cross-entropy), the residual f_t - f_0 (no noise). Over tokens, one
draw of the noise for each sample, the same at every t.

Symbols and shapes: networks.py. Cost: one forward and C backward passes for all t together, C outputs; one
backward pass over tokens.
Source: "Dead Directions: Geometric Singular Learning", §12 and appendix B.2 (protocol); the readings are
ours.
Limits. Projection comes before the mean: vᵀG v, or an eigenvalue, ends at 1e-16 of the largest one, the
mean of squared projections at 1e-32. Values below PROJECTED, where the dead direction is not a unit, and
Schur complements below ROUNDING count as zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from papers.dead_directions.catalogue.networks import Trace, normal, trace_chain
from papers.dead_directions.catalogue.networks_blocks import (
    trace_attention,
    trace_composition,
    trace_gated,
    trace_mixer,
)
from topograd.errors import GeometryError
from topograd.geometry.rates import SPAN, UPPER, Noise, Rate, fit_rate, log_grid
from topograd.geometry.rules.architectures import (
    Architecture,
    Attention,
    Chain,
    Composition,
    GatedStack,
    Mixer,
)
from topograd.geometry.rules.blocks import predict

SMALLEST = 1e-290
"""Second moments below this have lost digits in float64."""
PROJECTED = 1e-27
"""Along a vector that is not a unit a projection leaves rounding of 1e-16: its square, and room above."""
ROUNDING = 1e-26
"""A Schur complement below this share of its diagonal entry is zero."""
MANY = 16
"""Samples that a probe needs at least."""
OverTokens = Attention | Composition | Mixer
"""Architectures whose samples are sequences."""
TRACERS: dict[type, Callable[..., Trace]] = {
    Chain: trace_chain,
    Attention: trace_attention,
    GatedStack: trace_gated,
    Composition: trace_composition,
    Mixer: trace_mixer,
}


class Labels(TypedDict):
    """What a Rate says of the values it was fitted to."""

    estimator: str
    noise: Noise


@dataclass(frozen=True)
class Measurement:
    """The fitted rate of one node."""

    node: str
    rate: Rate

    @property
    def vanishes(self) -> bool:
        """Nothing above rounding at any t."""
        return self.rate.points == 0


def probe(
    architecture: Architecture,
    *,
    seed: int = 0,
    samples: int | None = None,
    window: tuple[float, float] | None = None,
) -> tuple[Measurement, ...]:
    """Measures every node that `predict` names.

    Without `samples` there are 4000, or 64 sequences; without `window`, that of `asymptotic_window`.

    >>> [round(m.rate.slope, 3) for m in probe(Chain(2), samples=100) if m.node.startswith("G")]
    [2.0, 0.0]
    """
    if samples is None:
        samples = 64 if isinstance(architecture, OverTokens) else 4000
    if samples < MANY:
        raise GeometryError(f"{samples} samples: give at least {MANY}", setting="samples", given=samples)
    t = log_grid(*(window or asymptotic_window(architecture)))
    with _one_thread():
        return _measure(architecture, t, samples, seed)


def ladder(
    depth: int, width: int = 8, activation: str = "linear", *, seed: int = 0
) -> dict[str, list[float]]:
    """Slopes of G_1 … G_L, of A_0 … A_{L-1} and of their products in a plain chain with noisy labels.

    >>> [round(slope) for slope in ladder(3)["product"]]
    [4, 4, 4]
    """
    result: dict[str, list[float]] = {"G": [], "A": [], "product": []}
    for measurement in probe(Chain(depth, width, activation), seed=seed):
        kind = measurement.node.split("_")[0]
        if kind in result:
            slope = measurement.rate.slope
            assert slope is not None, f"a plain chain can be read: {measurement.rate.refused}"
            result[kind].append(slope)
    return result


def asymptotic_window(architecture: Architecture) -> tuple[float, float]:
    """Ends of t: low enough for the limit, high enough for float64 to hold the steepest node.

    They depend on the architecture and on no prediction: in a chain, no second moment can be smaller than
    that of all its dead weights, twice over where the residual vanishes too.

    >>> asymptotic_window(Chain(6))
    (0.001, 0.03)
    """
    low, high = _preferred_window(architecture)
    if isinstance(architecture, Chain):
        powers = architecture.exponents or ((1,) * architecture.depth,)
        steepest = (2 if architecture.noise else 4) * max(sum(row) for row in powers)
        low = max(low, SMALLEST ** (1 / steepest))
        high = max(high, SPAN * low)
        if high > UPPER * (1 + 1e-9):
            raise GeometryError(
                f"{architecture}: t^{steepest} leaves float64 before the limit",
                setting="architecture",
                given=str(architecture),
                remedy="give fewer layers",
            )
    return low, high


def _measure(architecture: Architecture, t: Tensor, samples: int, seed: int) -> tuple[Measurement, ...]:
    """Sets the weights at every t, reads all nodes, fits each."""
    grid = torch.cat((t, t.new_zeros(1))) if isinstance(architecture, Chain) else t  # f_0 comes last
    trace = TRACERS[type(architecture)](architecture, grid, samples, seed)
    gradients = {name: torch.zeros_like(grid) for name in trace.backward}
    stacks = _backward(architecture, trace, seed, gradients)
    moments = gradients | {name: reading.of(reading.at) for name, reading in trace.forward.items()}
    floor = PROJECTED if _turned(architecture) else 0.0
    moments = {name: torch.where(values > floor, values, 0.0) for name, values in moments.items()}
    results = []
    for name in [prediction.node for prediction in predict(architecture)]:
        if name in moments:
            values = moments[name]
        elif name == "K":
            values = _divergence(trace.outputs.detach(), architecture)
        elif name.startswith("product"):
            values = _product(name, moments)
        else:
            values = _smallest(name, trace, stacks)
        labels = _labels(name, architecture)
        depth = architecture.depth if isinstance(architecture, Chain) else 2
        rate = fit_rate(
            t, values[: len(t)], **labels, floor=floor, alignment_error=trace.alignment_error, depth=depth
        )
        results.append(Measurement(name, rate))
    return tuple(results)


def _preferred_window(architecture: Architecture) -> tuple[float, float]:
    """Smaller t where corrections are of relative order t, larger where cancellation leaves rounding."""
    if _turned(architecture):
        return 1e-2, 1e-1  # a linear chain is an exact power of t
    match architecture:
        case Chain(norm="rmsnorm", activation="linear" | "relu"):
            return 1e-3, 1e-2
        case Attention(positions="rope-single"):
            return 1e-7, 1e-6
        case Composition(blocks=blocks) if any(block.kind in ("experts", "scan") for block in blocks):
            return 1e-6, 1e-5
        case Composition() | Attention(wiring="chain" | "residual"):
            return 1e-3, 1e-2
        case Chain(norm="none", bias=0, skips=()):
            return 1e-3, 3e-2
    return 1e-5, 1e-4


def _turned(architecture: Architecture) -> bool:
    """Whether the dead direction is read along a vector that is not a unit."""
    return (
        isinstance(architecture, Chain)
        and architecture.activation == "linear"
        and bool(architecture.rotation or architecture.widths)
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices are small here: two threads take four times the processor's time, waiting for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _backward(
    architecture: Architecture, trace: Trace, seed: int, sums: dict[str, Tensor]
) -> dict[str, list[Tensor]]:
    """Adds Σ_c mean((δ^{(c)} · v)²) to `sums`; returns all δ^{(c)} if a smallest eigenvalue is asked for."""
    stacks: dict[str, list[Tensor]] = {name: [] for name in trace.backward}
    retained = _has_eigenvalues(architecture)
    nodes = [reading.at for reading in trace.backward.values()]
    for cotangent in _cotangents(architecture, trace.outputs, seed):
        result = torch.autograd.grad(trace.outputs, nodes, cotangent, retain_graph=True)
        for (name, reading), delta in zip(trace.backward.items(), result, strict=True):
            sums[name] += reading.of(delta)
            if retained:
                stacks[name].append(delta)
    return stacks


def _has_eigenvalues(architecture: Architecture) -> bool:
    return any(prediction.node.startswith("lambda_min") for prediction in predict(architecture))


def _cotangents(architecture: Architecture, outputs: Tensor, seed: int) -> Iterator[Tensor]:
    """Gradients at the output whose squares, summed, are the expectation over labels."""
    outputs = outputs.detach()
    units = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
    batch = isinstance(architecture, Chain) and architecture.norm == "batchnorm"
    if isinstance(architecture, OverTokens) or batch:  # BatchNorm removes what all samples share
        yield normal(*outputs.shape[1:], seed=seed + 3, like=outputs).expand_as(outputs)
    elif isinstance(architecture, Chain) and architecture.noise == 0:
        yield outputs - outputs[-1:]
    elif isinstance(architecture, Chain) and architecture.loss == "cross-entropy":
        p = outputs.softmax(-1)
        for c, unit in enumerate(units):
            yield p[..., c : c + 1].sqrt() * (p - unit)
    else:
        sigma = architecture.noise if isinstance(architecture, Chain) else 1.0
        for unit in units:
            yield (sigma * unit).expand_as(outputs)


def _labels(name: str, architecture: Architecture) -> Labels:
    """Estimator and noise regime of a node's values."""
    if re.match(r"A_|sigma_min|output", name):
        return {"estimator": "activations", "noise": "none"}
    if name == "K":
        return {"estimator": "divergence", "noise": "none"}
    if isinstance(architecture, OverTokens):
        return {"estimator": "Fisher, one draw of the labels", "noise": "noisy"}
    if isinstance(architecture, Chain) and architecture.noise == 0:
        return {"estimator": "loss-gradient covariance", "noise": "noise-free"}
    return {"estimator": "expected Fisher", "noise": "noisy"}


def _product(name: str, moments: dict[str, Tensor]) -> Tensor:
    layer, direction = re.fullmatch(r"product_(\d+)(.*)", name).groups()  # type: ignore[union-attr]
    return moments[f"A_{int(layer) - 1}{direction}"] * moments[f"G_{layer}{direction}"]


def _divergence(outputs: Tensor, architecture: Architecture) -> Tensor:
    """mean ‖f_t - f_0‖² / 2σ² (σ = 1 where there is no noise); f_0 is the last of the grid."""
    sigma = architecture.noise if isinstance(architecture, Chain) and architecture.noise else 1.0
    return (outputs - outputs[-1:]).square().sum(-1).mean(1) / (2 * sigma**2)


def _smallest(name: str, trace: Trace, stacks: dict[str, list[Tensor]]) -> Tensor:
    """sigma_min of a matrix of activations (an amplitude), or lambda_min of a factor G."""
    kind, inner = re.fullmatch(r"(\w+)\((.+)\)", name).groups()  # type: ignore[union-attr]
    if kind == "lambda_min":
        rows = torch.cat(stacks[inner], 1)  # (T, n C, d)
        return dead_distance(rows).square() / stacks[inner][0].shape[1]
    return dead_distance(trace.forward[inner.replace("H_", "A_")].at.flatten(1, -2))


def dead_distance(rows: Tensor) -> Tensor:
    """How far the last column of rows (T, n, d) is from the span of the others; 0 where that is rounding.

    Householder QR is backward stable by column: the error is 1e-16 of the last column, not of the largest.
    """
    distance = torch.linalg.qr(rows, mode="r").R[:, -1, -1].abs()
    whole = rows[..., -1].norm(dim=-1)
    return torch.where(distance.square() > ROUNDING * whole.square(), distance, 0.0)
