"""The catalogue: predicted and measured rates side by side, one cell for each node of each network.

Statement. A cell is ok if what was predicted happened: a slope within its tolerance, values that are zero
to rounding, or a refusal to report. Tolerances are |slope - integer| <= 0.01 for linear and ReLU chains and
0.05 for all others; constants have relative ones, given beside them. What follows from two other cells, the
product of A and G, is not counted again.

Cost: about half a minute on one core. Source: "Dead Directions: Geometric Singular Learning", appendix B.2,
whose table this extends. Limits. A cell shows an exponent of an approach set by hand, not of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from papers.dead_directions.catalogue.constants import (
    layernorm_leak,
    leak_coefficients,
    measured_leak,
    measured_share,
)
from papers.dead_directions.catalogue.probing import Measurement, probe
from papers.dead_directions.families.two_layer import relu_schur_fraction
from topograd.geometry.rates import LEAK
from topograd.geometry.rules.architectures import (
    ACTIVATIONS,
    Architecture,
    Attention,
    Block,
    Chain,
    Composition,
    GatedStack,
    Mixer,
)
from topograd.geometry.rules.blocks import predict
from topograd.geometry.rules.chains import DERIVED, PAPER, Prediction


@dataclass(frozen=True)
class Cell:
    """One row of the table. A zero or a refusal that was predicted has no slopes, and a note that says so."""

    name: str
    predicted: float | None
    measured: float | None
    ok: bool
    note: str


def catalogue(*, seed: int = 0, on_cell: Callable[[Cell, int], None] | None = None) -> list[Cell]:
    """All cells. `on_cell` is called with each as it is done, and with how many there will be."""
    networks = architectures()
    counted = [message for network in networks for message in predict(network) if not follows(message.node)]
    total = len(counted) + len(SHARES) + 2 * len(LEAKS)
    cells = []
    for cell in _all(networks, seed):
        cells.append(cell)
        if on_cell is not None:
            on_cell(cell, total)
    return cells


def follows(node: str) -> bool:
    """Whether a node's rate is the sum of two others', which are cells already."""
    return node.startswith("product")


def compare(architecture: Architecture, *, seed: int = 0) -> list[Cell]:
    """The cells of one network.

    >>> [(cell.name, cell.predicted, cell.ok) for cell in compare(Chain(1))][:2]
    [('chain L=1 d=8 linear: G_1', 0.0, True), ('chain L=1 d=8 linear: A_0', 0.0, True)]
    """
    measured = probe(architecture, seed=seed)
    within = tolerance(architecture)
    return [
        _cell(architecture, prediction, measurement, within)
        for prediction, measurement in zip(predict(architecture), measured, strict=True)
    ]


def tolerance(architecture: Architecture) -> float:
    """How far a slope may be from its integer."""
    match architecture:
        case Chain(activation="linear" | "relu", norm="none"):
            return 0.01
    return 0.05


def architectures() -> tuple[Architecture, ...]:
    """The networks of the catalogue, rule by rule."""
    return (*_chains(), *_graphs(), *_norms(), *_blocks())


SHARES = ((3, 20_000), (8, 20_000), (32, 51_200))
"""Widths and samples at which the explained share is measured: at least 50 d² samples, for 2%."""
LEAKS = (8, 64)
"""Widths at which LayerNorm's leak is measured."""


def _all(networks: tuple[Architecture, ...], seed: int) -> Iterator[Cell]:
    for network in networks:
        cells = zip(predict(network), compare(network, seed=seed), strict=True)
        yield from (cell for message, cell in cells if not follows(message.node))
    yield from _shares(seed)
    yield from _leaks(seed)


def _cell(network: Architecture, message: Prediction, result: Measurement, within: float) -> Cell:
    slope, refused = result.rate.slope, result.rate.refused
    if message.expected == "zero":
        ok = result.vanishes
    elif message.expected == "refusal":
        ok = refused is not None and result.rate.alignment_error > LEAK
    else:
        ok = slope is not None and message.slope is not None and abs(slope - message.slope) <= within
    note = f"{message.source}: {message.note}" if message.note else message.source
    if refused is not None and message.expected != "zero":
        note += f"; {refused}"
    return Cell(f"{network}: {message.node}", message.slope, slope, ok, note)


def _chains() -> Iterator[Architecture]:
    """Ladders, and departures that keep the graph a chain."""
    for activation in ACTIVATIONS:
        yield Chain(6, activation=activation)
        yield Chain(4, activation=activation, loss="cross-entropy", head="square")
        yield Chain(4, activation=activation, widths=(10, 7, 5, 9, 6))
        yield Chain(4, activation=activation, rotation=0.1)
    yield from (Chain(4, loss="cross-entropy"), Chain(4, activation="gelu", loss="cross-entropy"))
    yield from (Chain(32, activation="relu"), Chain(6, rotation=0.5))
    yield from (Chain(depth, noise=0.0) for depth in (2, 3, 6))
    yield from (Chain(2, widths=(6, 3, 6)), Chain(2, widths=(6, 3, 6), noise=0.0))  # x̂ = WᵀW x, untied
    for activation in ("linear", "relu", "gelu"):
        yield Chain(4, activation=activation, exponents=((1, 2, 1, 2), (2, 1, 3, 1)))
    for activation in ("linear", "gelu"):
        yield from (Chain(4, activation=activation, bias=power) for power in (1, 2))


def _graphs() -> Iterator[Architecture]:
    for activation in ("linear", "relu", "tanh"):
        yield from (Chain(4, activation=activation, skips=(skip,)) for skip in ((2, 4), (1, 3)))
    yield Chain(4, activation="relu", skips=tuple((layer, layer + 1) for layer in range(4)))
    yield Chain(4, skips=((2, 4),), skip="projected")
    yield Chain(5, activation="tanh", skips=((0, 2), (1, 4)))


def _norms() -> Iterator[Architecture]:
    for depth, at in ((5, (2,)), (5, (3,)), (6, (2, 4)), (6, (1, 5)), (4, (1, 2, 3)), (4, (1,)), (4, (3,))):
        yield Chain(depth, norm="layernorm", norm_at=at)
    yield from (Chain(5, activation=smooth, norm="layernorm", norm_at=(2,)) for smooth in ("gelu", "tanh"))
    yield Chain(5, 32, "relu", norm="layernorm", norm_at=(2,))
    every = (1, 2, 3, 4, 5)
    yield from (Chain(6, norm="rmsnorm", norm_at=at) for at in ((2,), every))
    yield Chain(8, norm="rmsnorm", norm_at=(1, 3))
    yield from (Chain(6, activation=smooth, norm="rmsnorm", norm_at=every) for smooth in ("gelu", "tanh"))
    yield Chain(6, 32, "relu", norm="rmsnorm", norm_at=(2,))
    yield from (Chain(5, norm="batchnorm", norm_at=(at,)) for at in (1, 2))
    yield from (Chain(6, norm="batchnorm", norm_at=at) for at in ((4,), (2, 4)))
    yield from (Chain(5, activation=smooth, norm="batchnorm", norm_at=(2,)) for smooth in ("gelu", "tanh"))
    yield from (Chain(5, activation=smooth, norm="groupnorm", norm_at=(2,)) for smooth in ("linear", "gelu"))


def _blocks() -> Iterator[Architecture]:
    yield from (Attention(blocks) for blocks in range(1, 7))
    yield from (Attention(5, *size) for size in ((8, 4), (32, 16), (64, 8)))
    yield from (Attention(5, causal=True), Attention(5, heads=4))
    yield from (Attention(3, heads=4, powers=(1, 2, 1, 3)), Attention(5, heads=2, powers=(1, 1), causal=True))
    yield from (Attention(2, heads=2, powers=(1, 2), wiring=wiring) for wiring in ("residual", "pre-norm"))
    yield from (Attention(3, wiring=wiring) for wiring in ("residual", "pre-norm"))
    yield from (Attention(blocks, heads=4, kv_heads=2) for blocks in (3, 5))
    yield from (Attention(3, positions=positions) for positions in ("rope", "rope-single"))
    yield from (Attention(2, heads=4, kv_heads=2, wiring=wiring) for wiring in ("residual", "pre-norm"))
    yield from (Attention(blocks, memory=True) for blocks in (1, 3))
    yield from (Mixer(3, mlp) for mlp in ("gelu", "swiglu"))
    yield from (GatedStack(blocks) for blocks in (1, 2, 3))
    yield from (GatedStack(1, kind) for kind in ("geglu", "reglu"))
    mlp, attention, residual = Block("mlp", 2), Block("attention"), Block("residual")
    yield Composition((mlp, residual, Block("mlp", 3)))
    yield Composition((mlp, attention, Block("mlp", 1)))
    yield Composition((attention, mlp))
    yield Composition((residual, attention, residual, attention))
    yield from (Composition((Block(kind),) * blocks) for kind, blocks in (("experts", 3), ("scan", 2)))
    yield Composition((mlp, Block("experts"), Block("mlp", 1)))


def _shares(seed: int) -> Iterator[Cell]:
    for width, samples in SHARES:
        predicted, measured = relu_schur_fraction(width), measured_share(width, samples, seed)
        name = f"chain L=2 d={width} relu: share of A_1 explained by live units"
        ok = abs(measured - predicted) <= 0.02 * predicted
        yield Cell(name, predicted, measured, ok, f"{PAPER}, Lemma 18: a constant, within 2%")


def _leaks(seed: int) -> Iterator[Cell]:
    t = torch.tensor([1e-3, 1.0], dtype=torch.float64)
    for width in LEAKS:
        small, large = measured_leak(width, t, 40_000, noise=0.0, seed=seed).tolist()
        alpha, _ = leak_coefficients(width)
        whole = float(layernorm_leak(width, t, noise=0.0)[1])
        rows = (("t² coefficient", alpha, small / 1e-6), ("value at t=1", whole, large))
        for what, predicted, measured in rows:
            ok = abs(measured - predicted) <= 0.03 * predicted
            note = f"{DERIVED} (the paper drops a term of LayerNorm's variance): a constant, within 3%"
            yield Cell(f"W_2 LN(W_1 x) d={width}: leak, {what}", predicted, measured, ok, note)
