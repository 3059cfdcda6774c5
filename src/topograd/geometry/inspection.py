"""A model read in one pass: its stream by depth, its LayerNorm kernels, and the spectra of its factors.

Statement. Over the same batches,

    stream       ρ_l = σ_r(H_l) / σ_r(H_0) and the effective rank of H_l, l = 0..L   `monitors/stream.py`
    norms        the kernel of each LayerNorm on its outputs; RMSNorm to compare     `monitors/layernorm.py`
    spectra      the eigenvalues of A and G of each layer, largest first             `factors.py`

With no loss there is no gradient: the factors are then A alone, and the result says so.

Symbols and shapes. A (d_in, d_in), G (d_out, d_out); a spectrum keeps at most `POINTS` of its eigenvalues,
evenly spaced by place, its ends included. Its effective rank is that of the eigenvalues, λ / Σ λ. A factor
wider than `sketches.WIDEST` is sketched: its spectrum is the leading part, its rank a lower bound. Stream and
norms are read twice where there are massive rows (`monitors/massive.py`), with them and without.
Cost: that of `kfac_factors`, 2 n d² in float64 for each layer and norm that is watched, and O(d³) for each
factor.
Source: "Dead Directions: Geometric Singular Learning" §5.1 (the tiers of observables), Corollary 58,
Proposition 63.
Limits. All of it is static: it describes a checkpoint and claims no rate. Eigenvalues below the resolution
of the model's own numbers are counted as zero. Grams are float64 in every case, so that it is that of the
rows, squared: 1e-11 of the largest for a float32 model, 1e-14 for a float64 one (`model.double()`).
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
from topograd.geometry.factors import Batch, Outputs, stream
from topograd.geometry.losses import Fisher, Loss, OwnLoss, loss_named
from topograd.geometry.monitors.layernorm import KernelMonitor, KernelReading, other_norms
from topograd.geometry.monitors.moments import RESOLUTION
from topograd.geometry.monitors.stream import StreamMonitor, StreamProfile
from topograd.geometry.reads import first_not_finite
from topograd.geometry.sketches import FactorSums, Sketched

POINTS = 64
ROWS_PER_CHANNEL = 10
"""A fresh MiniLM, whose stream keeps its bottom, still reads 2.5 instead of 1.0 at 5 rows a channel."""
SUMMED = 1024
"""Terms of a sum in float32 that makes a number of a row: it is off by √SUMMED roundings or so."""
Factor = Tensor | Sketched


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
    sketched: bool = False
    """Whether only the leading part is known, and the rank is a lower bound."""


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
    stream_without_massive: StreamProfile | None
    """The same without massive rows, where there are any."""
    norms: Mapping[str, KernelReading]
    layers: Mapping[str, LayerSpectra]
    uncovered: Mapping[str, str]
    """Parameters without factors, and why."""
    notes: tuple[str, ...]
    """What could not be read, and why."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, words and lists, as JSON holds them."""
        plain: dict[str, Any] = asdict(self)
        for name in ("stream", "stream_without_massive"):
            if (found := getattr(self, name)) is not None:
                read = {"ratios": list(found.ratios), "trend": found.trend, "verdict": found.verdict}
                plain[name] |= read
        for name, norm in self.norms.items():
            plain["norms"][name]["found"] = norm.found
            if norm.without_massive is not None:
                plain["norms"][name]["without_massive"]["found"] = norm.without_massive.found
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
    found, _ = inspect_with_factors(
        model, batches, loss, fisher, layers=layers, outputs=outputs, generator=generator
    )
    return found


def inspect_with_factors(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    loss: str | Loss | OwnLoss | None,
    fisher: Fisher,
    *,
    layers: list[nn.Module] | str | None,
    outputs: Outputs | None,
    generator: torch.Generator | None,
) -> tuple[Inspection, dict[str, tuple[Factor, Factor | None]]]:
    """What `inspect` says, and the factors A and G that it says it of."""
    refuse_quantised(model)
    notes: list[str] = []
    watching = _stream_monitor(model, layers, notes)
    sums = FactorSums()
    chosen = _NoLoss() if loss is None else loss_named(loss)
    with ExitStack() as watched:
        kernels = watched.enter_context(KernelMonitor(model))
        if watching is not None:
            watched.enter_context(watching)
        way: Fisher = "empirical" if loss is None else fisher
        watch, terms = stream(model, batches, sums, chosen, way, outputs=outputs, generator=generator)
    if loss is None:
        notes.append("there is no loss, so there are no gradients: the factors are A alone")
        sent = "no gradient reaches it"  # as none was sent, this is no reason here
        uncovered = {name: why for name, why in watch.uncovered().items() if why != sent}
        names = list(sums.rows)
    else:
        uncovered, names = watch.uncovered(), watch.layers()
    factors = {name: _finite_factors(name, sums, terms) for name in names}
    resolution = _resolution(model)
    norms = _kernel_readings(model, kernels, notes)
    stream_profile, without = _profiles(watching, notes)
    found = Inspection(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        loss=None if loss is None else chosen.name,
        fisher=None if loss is None else fisher,
        resolution=resolution,
        stream=stream_profile,
        stream_without_massive=without,
        norms=norms,
        layers={
            name: LayerSpectra(spectrum(A, resolution), None if G is None else spectrum(G, resolution))
            for name, (A, G) in factors.items()
        },
        uncovered=uncovered,
        notes=tuple(notes),
    )
    return found, factors


def refuse_quantised(model: nn.Module) -> None:
    """One line for a model whose weights are integers: it has no gradient in them and no directions."""
    for name, module in model.named_modules():
        if "quantized" in type(module).__module__ or hasattr(module, "_packed_params"):
            raise GeometryError(
                f"{name} is quantised ({type(module).__name__})", remedy="give the model in floats"
            )
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise GeometryError(
                f"parameter {name} holds {kind}: a quantised model", remedy="give it in floats"
            )


def _finite_factors(name: str, sums: FactorSums, terms: int) -> tuple[Factor, Factor | None]:
    A, G = sums.factor(name, "A", terms), sums.factor(name, "G", terms)
    assert A is not None, "it was listed because its inputs were seen"
    parts = {"inputs": A} if G is None else {"inputs": A, "gradients": G}
    bad = first_not_finite({w: f.values if isinstance(f, Sketched) else f for w, f in parts.items()})
    if bad is not None:
        raise GeometryError(
            f"the {bad} of layer {name} are not finite", remedy="look at the data and the loss"
        )
    return A, G


def _kernel_readings(
    model: nn.Module, kernels: KernelMonitor, notes: list[str]
) -> Mapping[str, KernelReading]:
    norms = kernels.readings()
    if not norms:
        notes.append("no LayerNorm or RMSNorm was called as a module, so there is no kernel to read")
    notes.extend(f"{name} was never called as a module" for name in kernels.unused())
    notes.extend(
        f"{name} is a {kind}, whose kernel is not known" for name, kind in other_norms(model).items()
    )
    return norms


def spectrum(factor: Factor, resolution: float = RESOLUTION) -> Spectrum:
    """The eigenvalues of a symmetric factor, those below `resolution` of the largest as zero.

    >>> found = spectrum(torch.diag(torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64)))
    >>> found.rank, found.values
    (2, (3.0, 1.0, 0.0))
    """
    if isinstance(factor, Sketched):
        values, size, trace = factor.values.cpu(), len(factor.vectors), factor.trace
    else:
        values = torch.linalg.eigvalsh(factor.double()).cpu().flip(0).clamp(min=0)
        size, trace = len(values), float(values.sum())
    floor = max(resolution, size * torch.finfo(values.dtype).eps)
    values = torch.where(values > floor * values[0], values, 0.0)
    places = torch.linspace(0, len(values) - 1, min(POINTS, len(values))).round().long()
    return Spectrum(
        size=size,
        rank=int((values > 0).sum()),
        effective_rank=float(effective_rank(values)),
        trace=trace,
        places=tuple(places.tolist()),
        values=tuple(values[places].tolist()),
        sketched=isinstance(factor, Sketched),
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


def _profiles(
    monitor: StreamMonitor | None, notes: list[str]
) -> tuple[StreamProfile | None, StreamProfile | None]:
    """With all rows, and without massive ones where there are any."""
    if monitor is None:
        return None, None
    try:
        found = monitor.profile()
        without = monitor.profile(massive=False) if found.massive else None
    except GeometryError as problem:
        notes.append(f"there is no residual stream to read: {problem}")
        return None, None
    if found.samples < ROWS_PER_CHANNEL * found.width:
        notes.append(
            f"the stream has width {found.width} and only {found.samples} rows were read: its bottom is that "
            f"of the sample; read at least {ROWS_PER_CHANNEL * found.width}"
        )
    return found, without


def _resolution(model: nn.Module) -> float:
    """What Gram matrices of rows in the coarsest type of the model can tell from zero."""
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    summed = [torch.finfo(torch.promote_types(kind, torch.float32)).eps for kind in types]
    rounded = [torch.finfo(kind).eps for kind in types]
    return max(RESOLUTION, *(SUMMED * eps**2 for eps in summed), *(eps**2 for eps in rounded))


class _NoLoss:
    """Nothing to send back."""

    name = "none"

    def output_gradients(
        self, outputs: Tensor, targets: Tensor | None, fisher: Fisher, generator: torch.Generator | None
    ) -> tuple[int, tuple[Tensor, ...]]:
        return outputs.shape[:-1].numel(), ()
