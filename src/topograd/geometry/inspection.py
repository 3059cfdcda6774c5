"""One-pass inspection of a model: residual stream by depth, LayerNorm kernels, spectra of K-FAC factors.

Statement. Over the same batches,

    stream       ρ_l = σ_r(H_l) / σ_r(H_0) and the effective rank of H_l, l = 0..L   `monitors/stream.py`
    norms        the kernel of each LayerNorm on its outputs; RMSNorm to compare     `monitors/layernorm.py`
    spectra      the eigenvalues of A and G of each layer, largest first             `factors.py`

With no loss there is no gradient: the factors are then A alone, and the result says so.

Symbols and shapes. A (d_in, d_in), G (d_out, d_out); a spectrum keeps at most `POINTS` of its eigenvalues,
evenly spaced by place, its ends included. Its effective rank is that of the eigenvalues, λ / Σ λ. A factor
wider than `sketches.WIDEST` is sketched: its spectrum is the leading part, its rank a lower bound. Stream and
norms are read twice where there are massive rows (`monitors/massive_activations.py`), with and without them.
Cost: that of `kfac_factors`, 2 n d² in float64 for each layer and norm, and O(d³) for each factor.
Source: "Dead Directions: Geometric Singular Learning" §5.1 (the tiers of observables), Corollary 58,
Proposition 63.
Limits. All of it is static: it describes a checkpoint and claims no rate. Eigenvalues below the resolution
of the model's own numbers are counted as zero. Grams are float64 in every case, so that it is that of the
rows, squared: 1e-11 of the largest for a float32 model, 1e-14 for a float64 one (`model.double()`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from topograd.effective_rank import effective_rank
from topograd.errors import GeometryError
from topograd.geometry.cores import on_each_core
from topograd.geometry.factors import Batch, Outputs, check_finite_factors, reduce_batches
from topograd.geometry.losses import Fisher, Loss, OwnLoss, loss_named
from topograd.geometry.monitors.layernorm import KernelMonitor, KernelReading, other_norms
from topograd.geometry.monitors.moments import RESOLUTION
from topograd.geometry.monitors.stream import StreamMonitor, StreamProfile
from topograd.geometry.sketches import FactorSums, Sketched

POINTS = 64
ROWS_PER_CHANNEL = 10
"""A fresh MiniLM, whose stream keeps its bottom, still reads 2.5 instead of 1.0 at 5 rows a channel."""
SUMMED = 1024
"""Terms of a sum in float32 that makes a number of a row: it is off by √SUMMED roundings or so."""
Factor = Tensor | Sketched
Factors = tuple[str, Factor, Factor | None]
"""A layer's name, A and G."""
OnFactors = Callable[[str, Factor, Factor | None, tuple[str, Tensor] | None], None]
"""Takes a layer, A and G, and of a rearranged weight the parameter and every entry's place (d_out, d_in).

Layers may come out of order, in several threads at once."""


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
    """The readings of one pass over the batches."""

    parameters: int
    terms: int
    """n, the loss terms that were read."""
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
    factors: Mapping[str, tuple[Factor, Factor | None]] = field(default_factory=dict, repr=False)
    """A and G of every layer, where `on_factors` did not take them; not in `as_dict`."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, words and lists, as JSON holds them."""
        plain: dict[str, Any] = asdict(replace(self, factors={}))
        del plain["factors"]
        for name in ("stream", "stream_without_massive"):
            if (profile := getattr(self, name)) is not None:
                trend = profile.trend if math.isfinite(profile.trend) else None  # below resolution somewhere
                plain[name] |= {"ratios": list(profile.ratios), "trend": trend, "verdict": profile.verdict}
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
    on_factors: OnFactors | None = None,
) -> Inspection:
    """Read a model on batches (inputs, targets), in its present mode; with no loss only its activations.

    `layers` are those of the stream, as in `StreamMonitor`; `outputs` and `generator` as in `kfac_factors`.
    `on_factors` is given the factors of few layers at a time, which are whole at no other.
    """
    refuse_quantised(model)
    notes: list[str] = []
    stream_monitor: StreamMonitor | None = None
    try:
        stream_monitor = StreamMonitor(model, layers)
    except GeometryError as problem:
        if layers is not None:
            raise
        notes.append(f"there is no residual stream to read: {problem}")
    sums = FactorSums()
    chosen = _NoLoss() if loss is None else loss_named(loss)
    with ExitStack() as hooks:
        kernels = hooks.enter_context(KernelMonitor(model))
        if stream_monitor is not None:
            hooks.enter_context(stream_monitor)
        way: Fisher = "empirical" if loss is None else fisher
        tracer, terms = reduce_batches(
            model, batches, sums, chosen, way, outputs=outputs, generator=generator
        )
    uncovered, names = tracer.uncovered(), tracer.layers()
    if loss is None:
        notes.append("there is no loss, so there are no gradients: the factors are A alone")
        # no gradient was sent, so that this is no reason here
        uncovered = {name: why for name, why in uncovered.items() if why != "no gradient reaches it"}
        names = list(sums.rows)
    resolution = _resolution(model)
    factors: dict[str, tuple[Factor, Factor | None]] = {}

    def take(name: str, A: Factor, G: Factor | None) -> None:
        if on_factors is None:
            factors[name] = A, G
        else:
            on_factors(name, A, G, tracer.layouts.get(name))

    spectra = _spectra(_factors(names, sums, terms), resolution, take)
    norms = kernels.readings()
    if not norms:
        notes.append("no LayerNorm or RMSNorm was called as a module, so there is no kernel to read")
    notes += [f"{name} was never called as a module" for name in kernels.unused()]
    notes += kernels.unread.values()
    notes += [f"{name} is a {kind}, whose kernel is not known" for name, kind in other_norms(model).items()]
    stream, without = _profiles(stream_monitor, notes)
    return Inspection(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        terms=terms,
        loss=None if loss is None else chosen.name,
        fisher=None if loss is None else fisher,
        resolution=resolution,
        stream=stream,
        stream_without_massive=without,
        norms=norms,
        layers=spectra,
        uncovered=uncovered,
        notes=tuple(notes),
        factors={name: factors[name] for name in spectra if name in factors},
    )


def refuse_quantised(model: nn.Module) -> None:
    """Raise GeometryError where weights are integers: there is no gradient and no direction in them."""
    quantised = [
        (name, type(module).__name__)
        for name, module in model.named_modules()
        if "quantized" in type(module).__module__ or hasattr(module, "_packed_params")
    ]
    quantised += [
        (name, str(p.dtype).removeprefix("torch."))
        for name, p in model.named_parameters()
        if not p.is_floating_point()
    ]
    for name, kind in quantised:
        raise GeometryError(
            f"{name} is quantised ({kind})", setting="model", given=name, remedy="give the model in floats"
        )


def _spectra(
    every: Iterable[Factors], resolution: float, take: Callable[[str, Factor, Factor | None], None]
) -> dict[str, LayerSpectra]:
    """Of every layer, whose factors are then taken; those that share one A on one core."""

    def read(layers: list[Factors]) -> dict[str, LayerSpectra]:
        of_inputs, found = spectrum(layers[0][1], resolution), {}
        for name, A, G in layers:
            found[name] = LayerSpectra(of_inputs, None if G is None else spectrum(G, resolution))
            take(name, A, G)
        return found

    return {name: one for found in on_each_core(read, _by_inputs(every)) for name, one in found.items()}


def _by_inputs(every: Iterable[Factors]) -> Iterator[list[Factors]]:
    """Layers that follow one another and share one A, together."""
    layers: list[Factors] = []
    for one in every:
        if layers and layers[0][1] is not one[1]:
            yield layers
            layers = []
        layers.append(one)
    if layers:
        yield layers


def _factors(names: Iterable[str], sums: FactorSums, terms: int) -> Iterator[Factors]:
    """A and G of one layer after the other."""
    for name in names:
        A, G = sums.mean(name, "A", terms), sums.mean(name, "G", terms)
        assert A is not None, "it was listed because its inputs were seen"
        parts = {"inputs": A} if G is None else {"inputs": A, "gradients": G}
        check_finite_factors(
            {name: {what: x.values if isinstance(x, Sketched) else x for what, x in parts.items()}}
        )
        yield name, A, G


def spectrum(factor: Factor, resolution: float = RESOLUTION) -> Spectrum:
    """The eigenvalues of a symmetric factor, those below `resolution` of the largest as zero.

    >>> eigenvalues = spectrum(torch.diag(torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64)))
    >>> eigenvalues.rank, eigenvalues.values
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


def _profiles(
    monitor: StreamMonitor | None, notes: list[str]
) -> tuple[StreamProfile | None, StreamProfile | None]:
    """With all rows, and without massive ones where there are any."""
    if monitor is None:
        return None, None
    try:
        profile = monitor.profile()
        without = monitor.profile(massive=False) if profile.massive else None
    except GeometryError as problem:
        notes.append(f"there is no residual stream to read: {problem}")
        return None, None
    if profile.samples < ROWS_PER_CHANNEL * profile.width:
        notes.append(
            f"the stream has width {profile.width} and only {profile.samples} rows were read: its bottom is "
            f"that of the sample; read at least {ROWS_PER_CHANNEL * profile.width}"
        )
    return profile, without


def _resolution(model: nn.Module) -> float:
    """The smallest relative eigenvalue of a Gram matrix of rows in the model's coarsest type."""
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    summed = [torch.finfo(torch.promote_types(kind, torch.float32)).eps for kind in types]
    rounded = [torch.finfo(kind).eps for kind in types]
    return max(RESOLUTION, *(SUMMED * eps**2 for eps in summed), *(eps**2 for eps in rounded))


class _NoLoss:
    """A loss without gradients."""

    name = "none"

    def output_gradients(
        self, outputs: Tensor, targets: Tensor | None, fisher: Fisher, generator: torch.Generator | None
    ) -> tuple[int, tuple[Tensor, ...]]:
        return outputs.shape[:-1].numel(), ()
