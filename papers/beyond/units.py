"""Hidden units: how much of a network's function passes through each, and the network without some of them.

Statement. A hidden layer y = W a has units a_j, j = 1..h, made by one or two maps (up, or gate and up) from
the layer's input; W (d, h) has a column w_j for each. Taking unit j away moves W along -w_j e_jᵀ, and

    fisher_j      E[(a_j ⟨w_j, δ⟩)²]                       Fisher of that move; δ = ∂loss/∂y, labels drawn
    kfac_j        A_jj ⟨w_j, G w_j⟩                        the same where a and δ are independent
    unexplained_j ⟨w_j, G w_j⟩ / ((A + ρ)⁻¹)_jj            the same for the part of a_j that no other has:
                                                          1 / (A⁻¹)_jj is the Schur complement of the others
    variance_j    A_jj - (E a_j)²                          baseline: how much the unit varies
    product_j     √A_jj ‖w_j‖                              baseline: how large what it adds is
    magnitude_j   √(‖w_j‖² + Σ ‖rows j of up, gate‖²)      baseline: how large its weights are

A direction with little Fisher is dead: half of fisher_j is the KL divergence, to second order, that removing
the unit costs. Magnitudes change when up grows and W shrinks by the same factor, which the function does not
see; all the others but `variance` are the same for every such choice.

Repair. With S removed and K kept, what the kept units know of the removed ones is put into their columns:

    W_K ← W_K + W_S A_SK (A_KK + ρ)⁻¹                     least squares on the text, for any choice of S

Symbols and shapes. A (h, h) = E[a aᵀ], not centred; G (d, d) = E[δ δᵀ]; ρ = `RIDGE` times the mean of A_jj.
Cost. One forward and backward pass, M h² multiply-adds for A; h³ for `unexplained` and for a repair.
Source: "Dead Directions: Geometric Singular Learning" §2, §5.1 (directions of no Fisher); fisher and kfac as
in "Optimal Brain Damage" (LeCun et al.) with a Fisher for the Hessian, unexplained and the repair as in
"Optimal Brain Surgeon" (Hassibi, Stork); product after "A Simple and Effective Pruning Approach for Large
Language Models" (Sun et al.).
Limits. Second order, and one unit at a time: what several removals do together only the repair knows. A layer
is called once in a forward pass; rows of padding count. Each position counts for itself, so that fisher_j
leaves out how the positions of one sequence go together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from topograd.errors import GeometryError
from topograd.geometry.factors import Batch, reduce_batches
from topograd.geometry.gram_sums import gram
from topograd.geometry.layers import Call
from topograd.geometry.losses import Fisher, loss_named

RIDGE = 1e-3
"""ρ over the mean second moment of a layer's units."""


@dataclass(frozen=True)
class HiddenLayer:
    """The maps of one hidden layer, by module name."""

    out: str
    """Its columns are units."""
    into: tuple[str, ...]
    """Their rows are units."""


@dataclass(frozen=True)
class UnitReading:
    """What was seen of the units of one layer, float64."""

    A: Tensor
    """(h, h)."""
    G: Tensor
    """(d, d)."""
    mean: Tensor
    """E a: (h,)."""
    fisher: Tensor
    """(h,)."""


def hidden_layers(model: nn.Module) -> list[HiddenLayer]:
    """Every module with linear maps `up` and `down`, and perhaps `gate`, in the order of the model."""
    results = []
    for name, module in model.named_modules():
        maps = {part: getattr(module, part, None) for part in ("gate", "up", "down")}
        if isinstance(maps["up"], nn.Linear) and isinstance(maps["down"], nn.Linear):
            into = tuple(f"{name}.{part}" for part in ("gate", "up") if isinstance(maps[part], nn.Linear))
            results.append(HiddenLayer(f"{name}.down", into))
    if not results:
        raise GeometryError(
            "the model has no module with linear maps called up and down: it has no units", setting="model"
        )
    return results


def read_units(
    model: nn.Module,
    layers: Sequence[HiddenLayer],
    batches: Batch | Iterable[Batch],
    fisher: Fisher = "monte-carlo",
    generator: torch.Generator | None = None,
) -> dict[str, UnitReading]:
    """The readings of hidden layers under cross-entropy, by the name of their outer map."""
    if fisher == "expected":
        raise GeometryError(
            "fisher is 'expected'",
            setting="fisher",
            given=fisher,
            remedy="units are read with 'monte-carlo' or 'empirical'",
        )
    sums = _UnitSums({layer.out: _linear(model, layer.out).weight.detach() for layer in layers})
    _, samples = reduce_batches(
        model, batches, sums, loss_named("cross-entropy"), fisher, generator=generator
    )
    return {layer.out: sums.reading(layer.out, samples) for layer in layers}


class _UnitSums:
    """A reducer: sums over rows of a, a aᵀ, δ δᵀ and (a_j ⟨w_j, δ⟩)²."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._units: dict[str, Tensor] = {}
        self._rows = dict.fromkeys(weights, 0)
        self._sums: dict[tuple[str, str], Tensor] = {}

    def refuses(self, layer: str, sides: tuple[int, int]) -> str | None:
        return None if layer in self._weights else "not the outer map of a hidden layer that was asked for"

    def see_inputs(self, layer: str, call: Call) -> None:
        rows = call.inputs(call.source.detach())
        self._units[layer] = rows
        self._rows[layer] += len(rows)
        self._add(layer, "A", gram(rows))
        self._add(layer, "mean", rows.double().sum(0))

    def see_gradients(self, layer: str, rows: Tensor) -> None:
        self._add(layer, "G", gram(rows))
        moved = self._units.pop(layer) * (rows @ self._weights[layer])
        self._add(layer, "fisher", moved.double().square().sum(0))

    def _add(self, layer: str, what: str, value: Tensor) -> None:
        key = (layer, what)
        self._sums[key] = self._sums[key] + value if key in self._sums else value.double()

    def reading(self, layer: str, samples: int) -> UnitReading:
        A, mean = (self._sums[layer, what] / self._rows[layer] for what in ("A", "mean"))
        G, fisher = (self._sums[layer, what] / samples for what in ("G", "fisher"))
        return UnitReading(A, G, mean, fisher)


def _magnitude(model: nn.Module, layer: HiddenLayer, reading: UnitReading) -> Tensor:
    squares = _linear(model, layer.out).weight.detach().double().square().sum(0)
    for name in layer.into:
        squares = squares + _linear(model, name).weight.detach().double().square().sum(1)
    return squares.sqrt()


def _variance(model: nn.Module, layer: HiddenLayer, reading: UnitReading) -> Tensor:
    return reading.A.diagonal() - reading.mean.square()


def _product(model: nn.Module, layer: HiddenLayer, reading: UnitReading) -> Tensor:
    return reading.A.diagonal().sqrt() * _linear(model, layer.out).weight.detach().double().norm(dim=0)


def _fisher(model: nn.Module, layer: HiddenLayer, reading: UnitReading) -> Tensor:
    return reading.fisher


def _kfac(model: nn.Module, layer: HiddenLayer, reading: UnitReading) -> Tensor:
    W = _linear(model, layer.out).weight.detach().double()
    return reading.A.diagonal() * (W * (reading.G @ W)).sum(0)


def _unexplained(model: nn.Module, layer: HiddenLayer, reading: UnitReading) -> Tensor:
    W = _linear(model, layer.out).weight.detach().double()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(_ridged(reading.A)))
    return (W * (reading.G @ W)).sum(0) / inverse.diagonal()


SCORES: Mapping[str, Callable[[nn.Module, HiddenLayer, UnitReading], Tensor]] = {
    "magnitude": _magnitude,
    "variance": _variance,
    "product": _product,
    "kfac": _kfac,
    "fisher": _fisher,
    "unexplained": _unexplained,
}
"""(model, layer, reading) -> (h,): units with the least go first."""


@contextmanager
def without_units(
    model: nn.Module, removed: Mapping[HiddenLayer, Tensor], repair: Mapping[str, UnitReading] | None = None
) -> Iterator[None]:
    """The model without the units at these indices, smaller maps in their place; afterwards it is as before.

    With `repair`, what the kept units know of the removed ones goes into the kept columns.
    """
    before = {name: _linear(model, name).weight for layer in removed for name in (*layer.into, layer.out)}
    biases = {name: _linear(model, name).bias for layer in removed for name in layer.into}
    try:
        for layer, units in removed.items():
            reading = None if repair is None else repair[layer.out]
            _shrink(model, layer, units, reading)
        yield
    finally:
        for name, weight in before.items():
            _place(model, name, weight, biases.get(name, _linear(model, name).bias))


@torch.no_grad()
def _shrink(model: nn.Module, layer: HiddenLayer, units: Tensor, reading: UnitReading | None) -> None:
    outer = _linear(model, layer.out)
    W = outer.weight
    mask = torch.ones(W.shape[1], dtype=torch.bool, device=W.device)
    mask[units.to(W.device)] = False
    if not mask.any():
        raise GeometryError(
            f"{layer.out} would keep no unit of {len(mask)}",
            setting="mask",
            given=layer.out,
            remedy="remove fewer",
        )
    retained = W[:, mask]
    if reading is not None and not mask.all():
        A = _ridged(reading.A)
        known = torch.linalg.solve(A[mask][:, mask], A[mask][:, ~mask])
        retained = retained + W[:, ~mask] @ known.T.to(W)
    _place(model, layer.out, nn.Parameter(retained, W.requires_grad), outer.bias)
    for name in layer.into:
        inner = _linear(model, name)
        bias = None if inner.bias is None else nn.Parameter(inner.bias[mask], inner.bias.requires_grad)
        _place(model, name, nn.Parameter(inner.weight[mask], inner.weight.requires_grad), bias)


def _place(model: nn.Module, name: str, weight: Tensor, bias: Tensor | None) -> None:
    linear = _linear(model, name)
    linear.weight, linear.bias = weight, bias  # type: ignore[assignment]
    linear.out_features, linear.in_features = weight.shape


def _ridged(A: Tensor) -> Tensor:
    return A + RIDGE * A.diagonal().mean().clamp_min(1e-30) * torch.eye(
        len(A), dtype=A.dtype, device=A.device
    )


def _linear(model: nn.Module, name: str) -> nn.Linear:
    result = model.get_submodule(name)
    if not isinstance(result, nn.Linear):
        raise GeometryError(
            f"{name} is a {type(result).__name__}",
            setting="model",
            given=name,
            remedy="its units are read where it is a Linear",
        )
    return result
