"""Line scans from a checkpoint: KL divergence of a probe batch along a direction of the weights.

Statement. K(t) = KL(p_{w*} ‖ p_{w* + tv}) on a few samples at every t of a grid, in float64, whatever the
type of the model. Nothing is written to the model: its values are replaced for a call.

Two things make it cheap. Layers before the first that moves return their outputs at w* (`replay.py`). And of
the outputs' change at the smallest t only a sketch is stored (random signs into `BUCKETS` sums), of which
inner products are those of the Fisher: ⟨s_i, s_j⟩ ≈ v_iᵀF v_j.

The resolution of K is measured: the second difference of the outputs for a random change of all weights by a
millionth of themselves is zero up to rounding; `FLOOR` times its own K is the floor.

Symbols and shapes. Outputs (samples, ..., outputs). Cost: one forward pass of the probe for each t, from the
first layer that moves on.
Source: "Dead Directions: Geometric Singular Learning" §12.1 (readings of one checkpoint); the sketch after
Charikar, Chen and Farach-Colton, "Finding frequent items in data streams".
Limits. A model that rounds by itself, as quantised activations do, has a higher floor.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import GeometryError
from topograd.geometry.factors import Outputs, mapped
from topograd.geometry.host_copy import check_finite
from topograd.geometry.jets import FixedMaps, Jet, read_jet
from topograd.geometry.paths import Likelihood, Replaced, as_double, divergence, each_divergence, in_double
from topograd.geometry.replay import Replay

BUCKETS = 2048
FLOOR = 30.0
CHANGE = 1e-6
"""Of all weights, to measure rounding."""
TOKENS = 256
"""Positions of a probe of tokens, at most."""
SAMPLES = 64
"""Rows of a probe of other inputs, at most."""
LARGE = 4.5e9
"""Parameters times tokens of a probe: a large model is read on fewer, 16 at least."""


class InDouble:
    """A model in float64 on a few samples, at values of all its parameters that are given with each call."""

    def __init__(self, model: nn.Module, inputs: Any, outputs: Outputs | None) -> None:
        self._network, self._inputs = Replaced(model, outputs), as_double(inputs)
        self._buffers = {name: as_double(buffer.detach()) for name, buffer in model.named_buffers()}

    def with_graph(self, values: Mapping[str, Tensor]) -> Tensor:
        """The outputs, as torch's autograd sees them."""
        with in_double():
            return self._network({**self._buffers, **values}, self._inputs)

    def __call__(self, values: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return self.with_graph(values)


class Probe:
    """A model in float64 on a few samples, around its own weights."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        likelihood: Likelihood,
        outputs: Outputs | None,
        layers: Sequence[nn.Module] | str | None,
    ) -> None:
        self._run = InDouble(model, inputs, outputs)
        self._likelihood = likelihood
        self.parameters = {name: as_double(p.detach()) for name, p in model.named_parameters()}
        check_finite(self.parameters)
        self._replay = Replay(model, layers)
        with self._replay.recording():
            self.before = self.outputs_with({})
        self.floor = FLOOR * self._rounding()

    def outputs_with(self, moved: Mapping[str, Tensor]) -> Tensor:
        """The outputs with these values in the place of the model's own."""
        return self._run({**self.parameters, **moved})

    def scan(
        self, parts: Mapping[str, Tensor], grid: Tensor, held: Mapping[str, Tensor] | None = None
    ) -> tuple[list[float], Tensor]:
        """K at w* + held + t parts for every t of the grid, and a sketch of the change at its first t."""
        first, *rest = grid.tolist()
        (after,) = self._outputs_along(parts, [first], held)
        values = [divergence(self.before, after, self._likelihood)]
        values += self.curve(parts, grid[1:], held).mean(1).tolist() if rest else []
        return values, self._sketch(after) / first

    def curve(
        self, parts: Mapping[str, Tensor], grid: Tensor, held: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """K of every sample (points, samples) at the same places; t may be below 0."""
        return torch.stack(
            [
                each_divergence(self.before, after, self._likelihood)
                for after in self._outputs_along(parts, grid.tolist(), held)
            ]
        )

    def _outputs_along(
        self, parts: Mapping[str, Tensor], grid: Sequence[float], held: Mapping[str, Tensor] | None
    ) -> Iterator[Tensor]:
        held = held or {}
        base = {name: self.parameters[name] + part for name, part in held.items()}
        with self._replay.behind({*parts, *held}):
            for t in grid:
                moved = {
                    name: base.get(name, self.parameters[name]) + t * part for name, part in parts.items()
                }
                after = self.outputs_with({**base, **moved})
                if not torch.isfinite(after).all():
                    raise GeometryError(
                        f"the outputs are not finite at t = {t:.2g} along {', '.join(parts)}", setting="model"
                    )
                yield after

    def jet(self, parts: Mapping[str, Tensor]) -> Jet:
        """The order at the checkpoint itself, by derivatives."""

        def along(t: Tensor) -> Tensor:
            moved = {name: self.parameters[name] + t.to(part) * part for name, part in parts.items()}
            return self._run.with_graph({**self.parameters, **moved})

        with self._replay.behind(set(parts)), FixedMaps(self.parameters.values()):
            return read_jet(along, lambda c: float(self._centred(c).square().sum()) / 2, self.floor)

    def _sketch(self, after: Tensor) -> Tensor:
        """Random sums of √p (d - E_p d), or of d, over √samples: squares add up to the Fisher."""
        d = self._centred(after - self.before).flatten()
        generator = torch.Generator().manual_seed(0)
        places = torch.randint(BUCKETS, (len(d),), generator=generator).to(d.device)
        signs = torch.randint(2, (len(d),), generator=generator).to(d) * 2 - 1
        return d.new_zeros(BUCKETS).index_add_(0, places, signs * d)

    def _centred(self, d: Tensor) -> Tensor:
        """A change of the outputs as the Fisher weights it, (samples, outputs) over √samples."""
        d, before = d.flatten(0, -2), self.before.flatten(0, -2)
        if self._likelihood == "cross-entropy":
            p = before.softmax(-1)
            d = p.sqrt() * (d - (p * d).sum(-1, keepdim=True))
        return d / len(d) ** 0.5

    def _rounding(self) -> float:
        """K of a second difference of the outputs, which is zero in exact arithmetic."""

        def moved(side: float) -> dict[str, Tensor]:  # one copy of the weights at a time
            generator = torch.Generator().manual_seed(0)
            found = {}
            for name, p in self.parameters.items():
                signs = torch.randint(2, p.shape, generator=generator, dtype=torch.int8).to(p.device) * 2 - 1
                found[name] = p.addcmul(p, signs, value=side)
            return found

        up, down = (self.outputs_with(moved(side)) for side in (CHANGE, -CHANGE))
        return float(self._centred(up + down - 2 * self.before).square().sum()) / 2


def short_example(inputs: Any, parameters: int, most: int = TOKENS) -> Any:
    """The first rows of a batch: of tokens (rows, positions) the first positions of one row or a few."""
    tensors = _tensors(inputs)
    if not tensors or any(value.dim() == 0 or len(value) == 0 for value in tensors):
        raise GeometryError(
            "the first batch has no samples", setting="batches", remedy="give at least one input"
        )
    if all(value.dim() == 2 and not value.is_floating_point() for value in tensors):
        tokens = min(most, max(16, int(LARGE / max(parameters, 1))))
        length = min(tensors[0].shape[1], tokens)
        return mapped(inputs, lambda value: value[: max(1, tokens // length), :length])
    return mapped(inputs, lambda value: value[:SAMPLES])


def each_sample(batch: Any) -> Iterator[Any]:
    """The samples of a batch (inputs, targets), as batches of one each."""
    count = min(len(value) for value in _tensors(batch) if value.dim())
    for i in range(count):
        yield mapped(batch, lambda value, i=i: value[i : i + 1] if value.dim() else value)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def see(x: Tensor) -> Tensor:
        found.append(x)
        return x

    mapped(value, see)
    return found
