"""Freeze-probe of a unit of any model: measured beside predicted exponents, layer by layer.

Statement. The weights of a chosen unit go to zero with t, all others stay as they are. A layer z = W h has

    dead rows R alone       W[R, :] ← t W[R, :]       (and its bias)
    dead columns C alone    W[:, C] ← t W[:, C]
    both                    W[R, C] ← t W[R, C], and exactly 0 beside it: blockdiag(live, t)

The rows are those that were named; a column is dead where its input vanishes with t while the rows do
(`geometry/powers.py` finds it). Then the second moments along the dead channels are powers of t,

    A ~ t^{2f}  of the inputs h_C,      G ~ t^{2b}  of the gradients δ_R,      A G ~ t^{2(f+b)} of the layer,

f and b are *predicted* by the min-plus pass over the model's own operators, and *measured* as slopes of log A
and log G at small t, by `fit_rate` with its guards.

Units. `PATH.J`, several with commas between; PATH is a module's name or the last parts of it, in every block
where it occurs. Of a linear map or convolution or embedding J is an output channel, of an attention the J-th
head of keys and values with its query heads, of another module with an inner layer a unit of that.

Symbols and shapes. δ is the gradient for one random draw at the outputs: labels with noise (noisy regime).
Cost: at most four passes with powers, and 7 to 21 passes forward and backward in float64.
Source: "Dead Directions: Geometric Singular Learning", §3 (approach), §12 and §15 (deviation from the
prediction); appendix B.2 has hand-set networks only.
Limits. Those of `geometry/powers.py`. Straight lines to t = 0: no trained model comes that way by itself.
Maps that are no modules (`nn.MultiheadAttention`, einsum) cannot be named. A float64 copy of the weights is
made.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from topograd.errors import GeometryError
from topograd.geometry.factors import Outputs, refuse_random
from topograd.geometry.heads import find_heads, is_transposed, linear_sides
from topograd.geometry.paths import Replaced, as_double, in_double
from topograd.geometry.powers import powered, powers_of
from topograd.geometry.rates import fit_rate, log_grid

WINDOWS = ((1e-5, 1e-3), (1e-7, 1e-5), (1e-3, 1e-1))
"""Of t, tried in this order until a rate can be read."""
SMALL = 1e-2
"""The t at which the pass with powers has its values."""
MAX_PASSES = 4
"""Until no further column is dead."""
Channels = dict[str, set[int]]


@dataclass(frozen=True)
class Exponent:
    """A predicted and a measured power of t; None where the values are exactly zero, or by `reason`."""

    predicted: float | None
    measured: float | None
    reason: str | None = None


@dataclass(frozen=True)
class ProbedLayer:
    """The exponents of one layer along its dead channels."""

    name: str
    whole: Exponent
    """Of A G, of the sides that have dead channels."""
    inputs: Exponent | None
    """Of A; None without dead inputs."""
    gradients: Exponent | None
    """Of G; None without dead outputs."""


def freeze_probe(
    model: nn.Module, inputs: Any, unit: str, *, outputs: Outputs | None = None, seed: int = 0
) -> list[ProbedLayer]:
    """Freeze a unit and read the exponents of every layer that it touches.

    >>> _ = torch.manual_seed(0)
    >>> chain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    >>> found = freeze_probe(chain, torch.randn(16, 6), "0.2,2.2")
    >>> [(layer.name, layer.whole.predicted, round(layer.whole.measured, 2)) for layer in found]
    [('0', 4.0, 4.0), ('2', 4.0, 4.0), ('4', 4.0, 4.0)]
    """
    refuse_random(model)
    probe = _Probe(model, as_double(inputs), outputs, seed)
    frozen = probe.freeze(named_channels(model, unit))
    predicted = probe.predicted(frozen)
    measured: dict[str, dict[str, Exponent]] = {}
    for window in WINDOWS:
        missing = [name for name in predicted if not _is_read(measured.get(name))]
        if missing:
            measured |= probe.measured(frozen, predicted, window, missing)
    return [
        ProbedLayer(name, sides["whole"], sides.get("inputs"), sides.get("gradients"))
        for name, sides in measured.items()
    ]


def _is_read(sides: Mapping[str, Exponent] | None) -> bool:
    """Whether every side has a rate, or is exactly zero as predicted."""
    return sides is not None and all(
        one.measured is not None or one.predicted is None for one in sides.values()
    )


def named_channels(model: nn.Module, unit: str) -> Channels:
    """The output channels that a unit names, by module."""
    found: Channels = {}
    for part in unit.split(","):
        path, _, number = part.strip().rpartition(".")
        if not path or not number.isdecimal():
            raise _no_unit(model, part)
        modules = {name: one for name, one in model.named_modules() if f".{name}".endswith(f".{path}")}
        units = [_unit_of(model, name, module, int(number)) for name, module in modules.items()]
        if not any(units):
            raise _no_unit(model, part)
        found = _joined([found, *units])
    return found


def _joined(parts: Iterable[Channels]) -> Channels:
    """All channels of every module."""
    found: Channels = {}
    for part in parts:
        for where, channels in part.items():
            found.setdefault(where, set()).update(channels)
    return found


def _unit_of(model: nn.Module, name: str, module: nn.Module, number: int) -> Channels:
    """Channels of the maps of one module: its own, a head's, or a unit's of its inner layer."""
    if (site := _site(module)) is not None:
        return {name: {number}} if number < site.channels else {}
    heads = [
        head
        for head in find_heads(model, name)
        if head.group == number and head.name.startswith(f"{name}.head")
    ]
    if heads:
        return _joined({where: set(rows.tolist()) for where, rows in head.rows.items()} for head in heads)
    maps = [
        (where, sides) for where, one in module.named_modules() if (sides := linear_sides(one)) is not None
    ]
    if len(maps) < 2 or number >= maps[-1][1][0]:
        return {}
    inner = maps[-1][1][0]
    return {
        f"{name}.{where}": set(range(number, width, inner))  # gate and up may be one map
        for where, (_, width) in maps[:-1]
        if width % inner == 0
    }


def _no_unit(model: nn.Module, given: str) -> GeometryError:
    names = [name for name, module in model.named_modules() if _site(module) is not None]
    shown = ", ".join([*names[:3], *(["…"] if len(names) > 4 else []), *names[3:][-1:]])
    return GeometryError(
        f"no unit of the model is called {given}",
        setting="unit",
        given=given,
        allowed=f"PATH.NUMBER, with a module's name or its last parts: {shown}",
        remedy="name a map and a channel, an attention and a head, or an mlp and a unit",
    )


@dataclass(frozen=True)
class _Site:
    """A module that multiplies by a weight: the weight's axes, and the axis of channels in activations."""

    rows: int
    columns: int | None
    axis: int
    channels: int


def _site(module: nn.Module) -> _Site | None:
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Embedding):
        return _Site(1, None, -1, module.embedding_dim)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1:
        return _Site(0, 1, 1 - module.weight.dim(), module.out_channels)
    if linear_sides(module) is None or not isinstance(weight, Tensor):
        return None
    rows = 1 if is_transposed(module) else 0
    return _Site(rows, 1 - rows, -1, weight.shape[rows])


@dataclass
class _Frozen:
    """What goes to zero: rows and columns of maps, and offsets of norms that would bring them back."""

    rows: Channels
    columns: Channels = field(default_factory=dict)
    offsets: Channels = field(default_factory=dict)


@dataclass
class _Seen:
    """Inputs, and places whose gradient is taken, of the calls of one module."""

    inputs: list[Tensor] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)


class _Probe:
    """One model with its inputs, called with other weights."""

    def __init__(self, model: nn.Module, inputs: Any, outputs: Outputs | None, seed: int) -> None:
        self._model, self._inputs = model, inputs
        self._network = Replaced(model, outputs)
        self._sites = {name: site for name, one in model.named_modules() if (site := _site(one)) is not None}
        self._norms = [name for name, one in model.named_modules() if isinstance(one, _BatchNorm)]
        held = (*model.named_parameters(), *model.named_buffers())
        self._base = {name: x.detach().double() for name, x in held if x.is_floating_point()}
        self._names = {id(x): name for name, x in held}
        self._seed = seed

    def freeze(self, rows: Channels) -> _Frozen:
        """Rows as named, and whatever reads them."""
        frozen = _Frozen(rows)
        for _ in range(MAX_PASSES):
            with torch.no_grad():
                seen, _ = self._run(self._powered(frozen), [*self._sites, *self._norms])
            columns, offsets = self._dead(seen, self._sites), self._dead(seen, self._norms)
            if (columns, offsets) == (frozen.columns, frozen.offsets):
                break
            frozen = _Frozen(rows, columns, offsets)
        return frozen

    def _dead(self, seen: Mapping[str, _Seen], names: Any) -> Channels:
        """Input channels that vanish with t, by module."""
        found: Channels = {}
        for name in names:
            if name not in seen or (name in self._sites and self._sites[name].columns is None):
                continue
            least = torch.stack([self._least(name, x) for x in seen[name].inputs]).amin(0)
            if places := torch.nonzero((least > 0) & least.isfinite()).flatten().tolist():
                found[name] = set(places)
        return found

    def _least(self, name: str, x: Tensor) -> Tensor:
        """The least power of each channel."""
        return powers_of(x).movedim(self._axis(name, x), -1).flatten(0, -2).amin(0)

    def _axis(self, name: str, x: Tensor) -> int:
        return self._sites[name].axis if name in self._sites else 1 - x.dim() if x.dim() > 1 else -1

    def _weights(self, frozen: _Frozen, t: float) -> dict[str, tuple[Tensor, Tensor]]:
        """Every weight at t, and its powers."""
        powers = {name: torch.zeros_like(x) for name, x in self._base.items()}
        base = dict(self._base)
        for name in {**frozen.rows, **frozen.columns}:
            module, site = self._model.get_submodule(name), self._sites[name]
            self._thin(module, site, frozen.rows.get(name), frozen.columns.get(name), base, powers)
        for name, channels in frozen.offsets.items():
            for kind in ("bias", "running_mean"):
                if f"{name}.{kind}" in base:
                    base[f"{name}.{kind}"] = base[f"{name}.{kind}"].index_fill(0, _places(channels), 0.0)
        return {name: (x * t ** powers[name], powers[name]) for name, x in base.items()}

    def _powered(self, frozen: _Frozen) -> dict[str, Tensor]:
        return {name: powered(*both) for name, both in self._weights(frozen, SMALL).items()}

    def _thin(
        self,
        module: nn.Module,
        site: _Site,
        rows: set[int] | None,
        columns: set[int] | None,
        base: dict[str, Tensor],
        powers: dict[str, Tensor],
    ) -> None:
        """Powers of one map; of a map with dead rows and columns, zeros beside the dead block."""
        name = self._names[id(module.weight)]
        bias = self._names.get(id(getattr(module, "bias", None)))
        marks = torch.zeros_like(base[name])
        for axis, channels in ((site.rows, rows), (site.columns, columns)):
            if channels and axis is not None:
                marks.index_add_(
                    axis, _places(channels), torch.ones_like(marks.index_select(axis, _places(channels)))
                )
        if rows and columns:
            base[name] = torch.where(marks == 1, 0.0, base[name])
            if bias is not None:
                base[bias] = base[bias].index_fill(0, _places(rows), 0.0)
        elif rows and bias is not None:
            powers[bias].index_fill_(0, _places(rows), 1.0)
        powers[name] = torch.maximum(powers[name], (marks > 0).double())

    def _run(self, weights: Mapping[str, Tensor], names: list[str]) -> tuple[dict[str, _Seen], Tensor]:
        """The outputs, and what the named modules read and where their gradients arrive."""
        seen: dict[str, _Seen] = {}
        with ExitStack() as hooks:
            for name in names:
                module = self._model.get_submodule(name)
                hooks.enter_context(module.register_forward_hook(_hook(name, seen)))
            hooks.enter_context(in_double())  # attention is products and a softmax, each one operator
            outputs = self._network(weights, self._inputs)
        return seen, outputs

    def _backward(self, seen: Mapping[str, _Seen], outputs: Tensor) -> dict[str, list[Tensor]]:
        """δ of every call, for one draw at the outputs."""
        generator = torch.Generator().manual_seed(self._seed)
        draw = torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs.device)
        places = [place for one in seen.values() for place in one.places]
        grads = iter(torch.autograd.grad((outputs * draw).sum(), places, allow_unused=True))
        return {name: [g for _ in one.places if (g := next(grads)) is not None] for name, one in seen.items()}

    def predicted(self, frozen: _Frozen) -> dict[str, dict[str, float | None]]:
        """2f and 2b of every layer that the unit touches; None is exactly zero."""
        names = [name for name in self._sites if name in frozen.rows or name in frozen.columns]
        seen, outputs = self._run(self._powered(frozen), names)
        found: dict[str, dict[str, float | None]] = {}
        for name, deltas in self._backward(seen, outputs).items():
            sides = {}
            for side, channels, tensors in self._read(name, frozen, seen, deltas):
                least = [float(self._least(name, x)[_places(channels)].min()) for x in tensors]
                sides[side] = 2 * min(least, default=float("inf"))
            if sides:
                sides["whole"] = sum(sides.values())
                found[name] = {side: power if power < float("inf") else None for side, power in sides.items()}
        return found

    def _read(
        self, name: str, frozen: _Frozen, seen: Mapping[str, _Seen], deltas: list[Tensor]
    ) -> list[tuple[str, set[int], list[Tensor]]]:
        """Side, dead channels and tensors of a layer."""
        sides = []
        if name in frozen.columns:
            sides.append(("inputs", frozen.columns[name], seen[name].inputs))
        if name in frozen.rows:
            sides.append(("gradients", frozen.rows[name], deltas))
        return sides

    def measured(
        self,
        frozen: _Frozen,
        predicted: Mapping[str, Mapping[str, float | None]],
        window: tuple[float, float],
        names: list[str],
    ) -> dict[str, dict[str, Exponent]]:
        """Slopes over one window of t, beside what was predicted."""
        grid = log_grid(*window)
        values: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        for t in grid.tolist():
            seen, outputs = self._run({name: w for name, (w, _) in self._weights(frozen, t).items()}, names)
            for name, deltas in self._backward(seen, outputs).items():
                whole = 1.0
                for side, channels, tensors in self._read(name, frozen, seen, deltas):
                    moment = sum(self._moment(name, x, channels) for x in tensors)
                    values[name].setdefault(side, []).append(moment)
                    whole *= moment
                values[name].setdefault("whole", []).append(whole)
        return {
            name: {side: _exponent(grid, moments, predicted[name][side]) for side, moments in sides.items()}
            for name, sides in values.items()
        }

    def _moment(self, name: str, x: Tensor, channels: set[int]) -> float:
        return float(
            x.detach().movedim(self._axis(name, x), -1)[..., _places(channels)].double().square().mean()
        )


def _hook(name: str, seen: dict[str, _Seen]) -> Callable[..., Tensor]:
    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        one = seen.setdefault(name, _Seen())
        one.inputs.append(args[0].detach())
        if not torch.is_grad_enabled() or isinstance(module, _BatchNorm):
            return output
        one.places.append(torch.zeros_like(output).detach().requires_grad_())
        return output + one.places[-1]

    return keep


def _places(channels: set[int]) -> Tensor:
    return torch.tensor(sorted(channels))


def _exponent(grid: Tensor, values: list[float], predicted: float | None) -> Exponent:
    if not any(values):
        return Exponent(predicted, None, "the values are exactly zero")
    rate = fit_rate(grid, values, estimator="freeze-probe", noise="noisy")
    return Exponent(predicted, rate.slope, rate.refused)
