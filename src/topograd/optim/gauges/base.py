"""The `Gauge` interface: a group that moves some parameters of a network and leaves its function alone.

Statement. A gauge is a group G acting on the tensors θ that it names, with f(g·θ) = f(θ) for every g. At θ,

    vertical     the tangent of the orbit G·θ: directions along which f cannot change
    horizontal   a complement of it that G respects; the gradient lives there, ⟨∇L, vertical⟩ = 0
    invariants   functions of θ that are constant on orbits and, together, tell orbits apart

Translations act by θ → θ + a (`translation.py`), rescalings by a positive factor for each
block (`rescaling.py`). The cross-entropy gauges change logits by a constant for each sample: they leave the
probabilities alone, so that `residual` compares these.

Symbols. Tensors are named as `model.named_parameters()` names them, so that a gauge is a few strings that
can be printed, compared and saved. `parameters` is a mapping from those names to tensors.

Cost. `residual` copies the model in float64 and runs it twice.

Source: "Dead Directions: Geometric Singular Learning" section 11.1, definition 82. The paper's projections
are in log-coordinates for rescalings; here they are those of the metric Σ_b ‖X_b‖² / n_b², which is the same.

Limits. Only scalar actions on blocks. Rotations (attention's query and key) are not covered.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import OptimError
from topograd.geometry.factors import outputs_of
from topograd.geometry.paths import Replaced, as_double
from topograd.geometry.symmetries import Parameters
from topograd.geometry.symmetry_search import Response, Run, floating_tensors

Example = Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[nn.Module], Any]
"""One input, positional inputs, inputs by keyword, or a function that runs the model."""


class Gauge(ABC):
    """A symmetry of a network. Subclasses are frozen dataclasses that name tensors."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The tensors that the group moves; no two gauges of one optimizer may share one."""

    @property
    def up_to_softmax(self) -> bool:
        """Whether only the probabilities are invariant, not the logits."""
        return False

    @abstractmethod
    def check(self, parameters: Parameters) -> None:
        """Raise OptimError unless the tensors exist and their shapes pair."""

    @abstractmethod
    def element(self, parameters: Parameters, generator: torch.Generator | None = None) -> Tensor:
        """A random element of the group, near enough to one for float64."""

    @abstractmethod
    def act(self, parameters: Parameters, element: Tensor) -> dict[str, Tensor]:
        """g·θ for the tensors of this gauge, as new tensors."""

    @abstractmethod
    def vertical(self, parameters: Parameters, vectors: Parameters) -> dict[str, Tensor]:
        """The part of a displacement (one tensor for each name) along the orbit of `parameters`."""

    @abstractmethod
    def invariants(self, parameters: Parameters) -> dict[str, Tensor]:
        """Tensors that are the same for all points of an orbit, and different for different orbits."""

    @abstractmethod
    def drift(self, before: Parameters, after: Parameters) -> float:
        """How far the tensors moved along the orbit: a length, in log-norms for rescalings."""

    def horizontal(self, parameters: Parameters, vectors: Parameters) -> dict[str, Tensor]:
        """A displacement without its vertical part."""
        vertical = self.vertical(parameters, vectors)
        return {name: vectors[name] - vertical[name] for name in self.names}

    @torch.no_grad()
    def residual(self, model: nn.Module, example: Example | None = None, seed: int = 0) -> float:
        """‖f(g·θ) - f(θ)‖ / ‖f(θ)‖ for a random g, in a float64 copy of the model in evaluation mode.

        Tensors that are wholly zero, as some are at the start, hide whether a symmetry holds: the copy gives
        them random values first. Without an `example`, the first embedding or linear map decides its shape.
        """
        generator = torch.Generator().manual_seed(seed)
        twin, run = runner(model, example)
        for parameter in twin.parameters():
            if not parameter.any():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        every = dict(twin.named_parameters(remove_duplicate=False))
        self.check(every)
        network = Response(run, dict(twin.named_parameters()))
        if not network.before:
            raise OptimError(
                f"{type(model).__name__} returned no floating tensor",
                setting="example",
                remedy="pass a function of the model",
            )
        names = {id(parameter): name for name, parameter in twin.named_parameters()}
        moved = self.act(every, self.element(every, generator))
        first = {names[id(every[name])]: tensor for name, tensor in moved.items()}
        return network.away(first, self.up_to_softmax)


def runner(model: nn.Module, example: Example | None) -> tuple[nn.Module, Run]:
    """A float64 copy of the model in evaluation mode, and its outputs on the example with other values.

    Of a stack with heads for its stages, on an example that is a tensor, all of them are read.
    """
    twin = copy.deepcopy(model).double().eval().requires_grad_(False)
    given = default_example(twin) if example is None else example

    def read(network: Any, inputs: Any) -> Any:
        if not isinstance(inputs, (Tensor, tuple, Mapping)):
            return inputs(network)
        parts = ("embed", "layer_context", "layers", "readout", "last_stage")
        stages = all(hasattr(network, name) for name in parts)
        if not stages or not isinstance(inputs, Tensor):
            return outputs_of(network, as_double(inputs))
        h = network.embed(inputs)
        ctx = network.layer_context(h, inputs)
        for layer in network.layers:
            h = layer(h, ctx)
        return [network.readout(h, stage) for stage in range(network.last_stage + 1)]

    network = Replaced(twin, read)

    def run(values: Parameters) -> list[Tensor]:
        own = {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()}
        return [tensor.double() for tensor in floating_tensors(network.answer(own, given))]

    return twin, run


def default_example(model: nn.Module) -> Tensor:
    """Tokens for the first embedding, or numbers for the first linear map, of a model."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            ids = torch.randint(module.num_embeddings, (2, 8), generator=generator)
            return ids.to(module.weight.device)
        if isinstance(module, nn.Linear):
            rows = torch.randn(4, module.in_features, generator=generator, dtype=torch.float64)
            return rows.to(module.weight)
    raise OptimError(
        f"there is no default example for {type(model).__name__}",
        setting="example",
        remedy="pass residual(model, example)",
    )


def find(gauge: Gauge, parameters: Parameters) -> list[Tensor]:
    """The gauge's tensors in the order of its names."""
    for name in gauge.names:
        if name not in parameters:
            known = ", ".join(list(parameters)[:4]) or "none"
            raise OptimError(
                f"{gauge} names {name!r}", setting="gauges", given=name, allowed=f"a parameter ({known}, ...)"
            )
    return [parameters[name] for name in gauge.names]


def distinct(gauge: Gauge, minimum: int = 1) -> None:
    """Raise OptimError if a gauge names a tensor twice or too few of them."""
    names = gauge.names
    if len(set(names)) < len(names) or len(names) < minimum:
        raise OptimError(
            f"{gauge} must name at least {minimum} tensors, each once", setting="names", given=names
        )


def names_of(given: str | Iterable[str]) -> tuple[str, ...]:
    """One name or several, as a tuple."""
    return (given,) if isinstance(given, str) else tuple(given)
