"""A model read in one pass: its stream by depth, its LayerNorm kernels, and the spectra of its factors.

Statement. Over the same batches,

    stream       ρ_l = σ_r(H_l) / σ_r(H_0) and the effective rank of H_l, l = 0..L   `monitors/stream.py`
    norms        the kernel of each LayerNorm on its outputs; RMSNorm to compare     `monitors/layernorm.py`
    spectra      the eigenvalues of A and G of each layer, largest first             `factors.py`

With no loss there is no gradient: the factors are then A alone, and the result says so.

Symbols and shapes. A (d_in, d_in), G (d_out, d_out); a spectrum keeps at most `POINTS` of its eigenvalues,
evenly spaced by place, its ends included. Its effective rank is that of the eigenvalues, λ / Σ λ.
Cost: that of `kfac_factors`, 2 n d² in float64 for each layer and norm that is watched, and O(d³) for each
factor.
Source: "Dead Directions: Geometric Singular Learning" §5.1 (the tiers of observables), Corollary 58,
Proposition 63.
Limits. All of it is static: it describes a checkpoint and claims no rate. Eigenvalues below the resolution
of the model's own numbers are counted as zero: a float64 copy of the model resolves most
(`model.double()`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from topograd.effective_rank import effective_rank
from topograd.errors import GeometryError
from topograd.geometry.factors import Batch, Outputs, gram, kfac_factors, stream
from topograd.geometry.layers import Call
from topograd.geometry.losses import Fisher, Loss, OwnLoss
from topograd.geometry.monitors.layernorm import KernelMonitor, KernelReading, other_norms
from topograd.geometry.monitors.moments import RESOLUTION
from topograd.geometry.monitors.stream import StreamMonitor, StreamProfile

POINTS = 64
ROWS_PER_CHANNEL = 10
"""A fresh MiniLM, whose stream keeps its bottom, still reads 2.5 instead of 1.0 at 5 rows a channel."""
WIDEST = 4096
"""The widest factor whose eigenvalues are computed."""


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of one factor."""

    size: int
    rank: int
    """How many are above the resolution."""
    effective_rank: float
    trace: float
    places: tuple[int, ...]
    """Which eigenvalues `values` holds, 0 the largest."""
    values: tuple[float, ...]
    """0 where an eigenvalue is below the resolution."""


@dataclass(frozen=True)
class LayerSpectra:
    """The spectra of one layer; G is None where there is no loss."""

    A: Spectrum
    G: Spectrum | None


@dataclass(frozen=True)
class Inspection:
    """Everything that one pass says of a model."""

    parameters: int
    loss: str | None
    fisher: Fisher | None
    resolution: float
    """The share of the largest eigenvalue below which one counts as zero, before the factor's size enters."""
    stream: StreamProfile | None
    norms: Mapping[str, KernelReading]
    layers: Mapping[str, LayerSpectra]
    uncovered: Mapping[str, str]
    """Parameters without factors, and why."""
    notes: tuple[str, ...]
    """What could not be read, and why."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, words and lists, as JSON holds them."""
        plain: dict[str, Any] = asdict(self)
        if self.stream is not None:
            found = self.stream
            plain["stream"] |= {"ratios": list(found.ratios), "trend": found.trend, "verdict": found.verdict}
        for name, norm in self.norms.items():
            plain["norms"][name]["found"] = norm.found
        return plain


def inspect(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    loss: str | Loss | OwnLoss | None = "cross-entropy",
    fisher: Fisher = "monte-carlo",
    *,
    layers: list[nn.Module] | str | None = None,
    outputs: Outputs | None = None,
    generator: torch.Generator | None = None,
) -> Inspection:
    """Read a model on batches (inputs, targets), in the mode it is in; with no loss only its activations.

    `layers` are those of the stream, as in `StreamMonitor`; `outputs` and `generator` as in `kfac_factors`.
    """
    notes: list[str] = []
    watching = _stream_monitor(model, layers, notes)
    with ExitStack() as watched:
        kernels = watched.enter_context(KernelMonitor(model))
        if watching is not None:
            watched.enter_context(watching)
        if loss is None:
            grams, uncovered = _input_factors(model, batches, outputs)
            notes.append("there is no loss, so there are no gradients: the factors are A alone")
        else:
            found = kfac_factors(
                model, batches, loss, fisher, outputs=outputs, generator=generator, widest=WIDEST
            )
            grams = {name: (factors.A, factors.G) for name, factors in found.items()}
            uncovered = dict(found.uncovered)
    resolution = _resolution(model)
    norms = kernels.readings()
    if not norms:
        notes.append("no LayerNorm or RMSNorm was called as a module, so there is no kernel to read")
    notes.extend(f"{name} was never called as a module" for name in kernels.unused())
    notes.extend(
        f"{name} is a {kind}, whose kernel is not known" for name, kind in other_norms(model).items()
    )
    spectra = {
        name: LayerSpectra(spectrum(A, resolution), None if G is None else spectrum(G, resolution))
        for name, (A, G) in grams.items()
    }
    return Inspection(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        loss=None if loss is None else found.loss,
        fisher=None if loss is None else fisher,
        resolution=resolution,
        stream=_profile(watching, notes),
        norms=norms,
        layers=spectra,
        uncovered=uncovered,
        notes=tuple(notes),
    )


def spectrum(factor: Tensor, resolution: float = RESOLUTION) -> Spectrum:
    """The eigenvalues of a symmetric factor, those below `resolution` of the largest as zero.

    >>> found = spectrum(torch.diag(torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64)))
    >>> found.rank, found.values
    (2, (3.0, 1.0, 0.0))
    """
    values = torch.linalg.eigvalsh(factor.double()).flip(0).clamp(min=0)
    floor = max(resolution, len(values) * torch.finfo(values.dtype).eps)
    values = torch.where(values > floor * values[0], values, 0.0)
    places = torch.linspace(0, len(values) - 1, min(POINTS, len(values))).round().long()
    return Spectrum(
        size=len(values),
        rank=int((values > 0).sum()),
        effective_rank=float(effective_rank(values)),
        trace=float(values.sum()),
        places=tuple(places.tolist()),
        values=tuple(values[places.to(values.device)].tolist()),
    )


def _stream_monitor(
    model: nn.Module, layers: list[nn.Module] | str | None, notes: list[str]
) -> StreamMonitor | None:
    """The monitor, or None and a note where the model has no list of layers and none was named."""
    try:
        return StreamMonitor(model, layers)
    except GeometryError as problem:
        if layers is not None:
            raise
        notes.append(f"there is no residual stream to read: {problem}")
        return None


def _profile(monitor: StreamMonitor | None, notes: list[str]) -> StreamProfile | None:
    if monitor is None:
        return None
    try:
        found = monitor.profile()
    except GeometryError as problem:
        notes.append(f"there is no residual stream to read: {problem}")
        return None
    if found.samples < ROWS_PER_CHANNEL * found.width:
        notes.append(
            f"the stream has width {found.width} and only {found.samples} rows were read: its bottom is that "
            f"of the sample; read at least {ROWS_PER_CHANNEL * found.width}"
        )
    return found


def _resolution(model: nn.Module) -> float:
    """What Gram matrices in the coarsest type of the model can tell from zero (see `factors.py`)."""
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    rounding = [torch.finfo(torch.promote_types(kind, torch.float32)).eps for kind in types]
    return max(RESOLUTION, *rounding, *(torch.finfo(kind).eps ** 2 for kind in types), 0.0)


def _input_factors(
    model: nn.Module, batches: Batch | Iterable[Batch], outputs: Outputs | None
) -> tuple[dict[str, tuple[Tensor, Tensor | None]], dict[str, str]]:
    """A of every layer that ran, from forward passes alone."""
    inputs = _InputGrams()
    watch, _ = stream(model, batches, inputs, _NoLoss(), "empirical", outputs=outputs)
    found: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name, total in inputs.sums.items():
        found[name] = (total / inputs.rows[name], None)
    sent = "no gradient reaches it"  # as none was sent, this is no reason here
    return found, {name: why for name, why in watch.uncovered().items() if why != sent}


class _InputGrams:
    """Sums of h hᵀ."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.rows: dict[str, int] = {}

    def refuses(self, layer: str, sides: tuple[int, int]) -> str | None:
        return f"a factor of side {sides[0]} is wider than {WIDEST}" if sides[0] > WIDEST else None

    def see_inputs(self, layer: str, call: Call) -> None:
        rows = call.inputs(call.source.detach())
        found = gram(rows).double()
        self.sums[layer] = self.sums[layer] + found if layer in self.sums else found
        self.rows[layer] = self.rows.get(layer, 0) + len(rows)

    def see_gradients(self, layer: str, rows: Tensor) -> None:
        raise AssertionError("no gradient was sent")


class _NoLoss:
    """Nothing to send back."""

    name = "none"

    def output_gradients(
        self, outputs: Tensor, targets: Tensor | None, fisher: Fisher, generator: torch.Generator | None
    ) -> tuple[int, tuple[Tensor, ...]]:
        return outputs.shape[:-1].numel(), ()
