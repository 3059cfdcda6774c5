"""K-FAC factors of any model: A = E[h hᵀ] and G = E[δ δᵀ] of every layer, summed over batches.

Statement. Each layer z = W h of a model (`layers.py`) has an approximate Fisher block

    E[vec(δ hᵀ) vec(δ hᵀ)ᵀ]  ≈  G ⊗ A,        A = (1/M) Σ_m h_m h_mᵀ,      G = (1/N) Σ_m δ_m δ_mᵀ

in the order of W.flatten(): rows of W outside, columns inside. M counts the rows that went through the
layer: batch · positions, of all its calls (the convention "expand"). N counts loss terms (`losses.py`): δ is
the gradient of the sum of the loss terms, and the block is that of one term. Where each row has its own
term, as in a perceptron or a language model, M = N and G is a mean too; in a convolutional classifier G is a
sum over positions. A is not centred and has no coordinate for the bias, whose own block is G. It is exact
where δ and h are independent, as in a linear network under squared error.

Symbols and shapes. A (d_in, d_in), G (d_out, d_out), float64. Each batch is multiplied in the precision of
its activations (float32 at least) and added up in float64; with a float64 model everything is float64.
Cost. A forward pass, the part of a backward pass that leads to the layers' outputs (no weight gradient is
computed), and the sums of `gram_sums.py`: layers that read the same tensor, as queries, keys and values do,
share one A.
Source: "Dead Directions: Geometric Singular Learning", §2 and §7; "Optimizing neural networks with
Kronecker-factored approximate curvature" (J. Martens, R. Grosse); "expand" after "Kronecker-Factored
Approximate Curvature for Modern Neural Network Architectures" (R. Eschenhagen et al.). Slow version:
`tests/oracles/fisher.py`.
Limits. The model stays in the mode it is in: with dropout the factors are of one draw. Padding counts among
the M rows of A. Eigenvalues below 1e-14 of the largest are rounding. A parameter's requires_grad is off while
the pass runs, and put back: no other thread may train the model meanwhile.
"""

from __future__ import annotations

import inspect
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from topograd.errors import GeometryError
from topograd.files import write_atomic
from topograd.geometry.gram_sums import WIDEST, GramSums
from topograd.geometry.heads import Head
from topograd.geometry.host_copy import first_not_finite
from topograd.geometry.layers import CallTracer, Reducer
from topograd.geometry.losses import Fisher, Loss, OwnLoss, check_fisher, loss_named

Batch = tuple[Any, Tensor | None]
"""Inputs (a tensor; a mapping is passed by name, a tuple by position) and targets."""
Outputs = Callable[[Any, Any], Tensor]
"""From the model and the inputs to the outputs that the loss reads."""


@dataclass(frozen=True)
class LayerFactors:
    """A and G of one layer."""

    A: Tensor
    G: Tensor
    rows: int
    """M, the rows that A is the mean of."""

    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """Of A and of G, smallest first; below 1e-14 of the largest they are rounding."""
        return torch.linalg.eigvalsh(self.A), torch.linalg.eigvalsh(self.G)


@dataclass(frozen=True)
class Factors(Mapping[str, LayerFactors]):
    """The factors by layer, in the order of the model's parameters."""

    layers: Mapping[str, LayerFactors]
    uncovered: Mapping[str, str]
    """Parameters without factors, or with a use that the factors leave out (a tied embedding); and why."""
    loss: str
    fisher: Fisher
    samples: int
    """N, the loss terms that G is the mean of."""

    def __getitem__(self, name: str) -> LayerFactors:
        if name not in self.layers:
            raise KeyError(f"{name}; layers with factors are {', '.join(self.layers)}")
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def of_head(self, head: Head) -> dict[str, LayerFactors]:
        """Those of one attention head (`heads.find_heads`): blocks of G where it reads, of A where it writes.

        Maps without factors are left out.
        """
        found = {name: one for name, one in self.layers.items() if name in {**head.rows, **head.columns}}
        for name, one in found.items():
            if name in head.rows:
                found[name] = replace(one, G=one.G[head.rows[name]][:, head.rows[name]])
            else:
                found[name] = replace(one, A=one.A[head.columns[name]][:, head.columns[name]])
        return found

    def save(self, path: Path | str) -> None:
        """Write them to a file, whole or not at all; torch reads it, without running code."""
        layers = {name: {"A": one.A, "G": one.G, "rows": one.rows} for name, one in self.layers.items()}
        labels = {"loss": self.loss, "fisher": self.fisher, "samples": self.samples}
        buffer = io.BytesIO()
        torch.save({"layers": layers, "uncovered": dict(self.uncovered), **labels}, buffer)
        write_atomic(Path(path), buffer.getvalue())

    @staticmethod
    def load(path: Path | str) -> Factors:
        """Those that `save` wrote."""
        try:
            read = torch.load(path, map_location="cpu", weights_only=True)
            layers = {name: LayerFactors(**one) for name, one in read.pop("layers").items()}
            return Factors(layers=layers, **read)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, TypeError, LookupError) as problem:
            reason = " ".join(str(problem).split())[:120]
            raise GeometryError(
                f"{path} holds no factors ({reason})",
                setting="path",
                given=str(path),
                allowed="a file that Factors.save wrote",
            ) from None


def kfac_factors(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    loss: str | Loss | OwnLoss = "cross-entropy",
    fisher: Fisher = "empirical",
    *,
    outputs: Outputs | None = None,
    generator: torch.Generator | None = None,
    widest: int = WIDEST,
) -> Factors:
    """A and G of every layer, over one batch (inputs, targets) or an iterable of them.

    `outputs` says how to get the outputs; by default the model is called, and `logits` taken if it has them.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> factors = kfac_factors(model, (torch.ones(5, 3), torch.zeros(5, 2)), "squared-error", "expected")
    >>> {name: (tuple(f.A.shape), tuple(f.G.shape)) for name, f in factors.items()}
    {'0': ((3, 3), (4, 4)), '2': ((4, 4), (2, 2))}
    """
    sums = GramSums(widest)
    chosen = loss_named(loss)
    tracer, samples = reduce_batches(
        model, batches, sums, chosen, fisher, outputs=outputs, generator=generator
    )
    if not tracer.layers():
        raise _nothing_covered(tracer)
    layers = {}
    for name in tracer.layers():
        A, G = (sums.mean(name, side, samples) for side in "AG")
        assert A is not None
        assert G is not None, "a gradient reached this layer"
        layers[name] = LayerFactors(A, G, sums.rows[name])
    check_finite_factors({name: {"inputs": f.A, "gradients": f.G} for name, f in layers.items()})
    return Factors(layers, tracer.uncovered(), chosen.name, fisher, samples)


def check_finite_factors(factors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise GeometryError where the inputs or gradients of a layer are not finite."""
    bad = first_not_finite({(name, what): x for name, parts in factors.items() for what, x in parts.items()})
    if bad is not None:
        raise GeometryError(
            f"the {bad[1]} of layer {bad[0]} are not finite",
            setting="batches",
            given=bad[0],
            remedy="look at the data and the loss",
        )


def reduce_batches(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    reducer: Reducer,
    loss: Loss,
    fisher: Fisher,
    *,
    outputs: Outputs | None = None,
    generator: torch.Generator | None = None,
) -> tuple[CallTracer, int]:
    """Pass every row h and δ of the batches to the reducer; the traced calls and the loss terms."""
    check_fisher(fisher)
    refuse_random(model, (_BatchNorm,))
    tracer, samples = CallTracer(model, reducer), 0
    with _frozen(model), plain_kernels(model), torch.enable_grad():
        for inputs, targets in each_batch(batches):
            with tracer:
                # the graph begins at the layers
                predicted = (outputs or outputs_of)(model, mapped(inputs, Tensor.detach))
            if not isinstance(predicted, Tensor):
                raise GeometryError(
                    f"the model answered with a {type(predicted).__name__}",
                    setting="outputs",
                    given=outputs,
                    remedy="give outputs=, which makes a tensor of it",
                )
            if not tracer.leaves or not predicted.requires_grad:
                raise _nothing_covered(tracer)
            terms, vectors = loss.output_gradients(predicted.detach(), targets, fisher, generator)
            for vector in vectors:
                torch.autograd.grad(
                    predicted, tracer.leaves, vector, retain_graph=fisher == "expected", allow_unused=True
                )
            tracer.leaves.clear()
            samples += terms
    if not samples:
        raise GeometryError(
            "there are no samples", setting="batches", remedy="give a batch with at least one loss term"
        )
    return tracer, samples


def refuse_random(model: nn.Module, kinds: tuple[type[nn.Module], ...] = (_DropoutNd, _BatchNorm)) -> None:
    """Raise GeometryError for dropout and batch statistics that are switched on."""
    for name, module in model.named_modules():
        if module.training and isinstance(module, kinds) and getattr(module, "p", 1) > 0:
            raise GeometryError(
                f"{name} is a {type(module).__name__} in training mode, which draws or mixes samples",
                setting="model",
                given=name,
                remedy="call model.eval() first",
            )


@contextmanager
def plain_kernels(model: nn.Module) -> Iterator[None]:
    """torch's encoder layers, experts of transformers and compiled modules, one operator after the other.

    Their joint kernels have no forward-mode derivative, or no float64, and hide the maps.
    """
    name, fast = "_experts_implementation", torch.backends.mha.get_fastpath_enabled()
    configs = {id(c): c for module in model.modules() if hasattr(c := getattr(module, "config", None), name)}
    own = {key: getattr(config, name) for key, config in configs.items()}
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for config in configs.values():
            setattr(config, name, "eager")
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for key, config in configs.items():
            setattr(config, name, own[key])


def outputs_of(model: nn.Module, inputs: Any) -> Tensor:
    """The model's output, or its `logits`."""
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    placed = () if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else (inputs,)
    try:
        answer = model(*placed, **named)
    except TypeError as problem:
        signature = inspect.signature(model.forward)
        try:
            signature.bind(*placed, **named)
        except TypeError as reason:  # the inputs are not those of the model's signature
            given = ", ".join(named) or f"{len(placed)} by position"
            raise GeometryError(
                f"{type(model).__name__} does not take the inputs of this batch ({given}): {reason}",
                setting="batches",
                given=given,
                allowed=f"({', '.join(signature.parameters)})",
            ) from problem
        raise
    if isinstance(answer, Mapping):
        answer = answer.get("logits", answer)
    logits: Tensor = getattr(answer, "logits", answer)
    return logits


def each_batch(batches: Any) -> Iterator[Batch]:
    """One pair (inputs, targets), or every pair of an iterable."""
    pair = isinstance(batches, tuple | list) and len(batches) == 2
    for batch in [batches] if pair and isinstance(batches[0], Tensor | Mapping) else batches:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            kind = type(batch).__name__
            raise GeometryError(
                f"a batch is a {kind}", setting="batches", given=kind, allowed="pairs (inputs, targets)"
            )
        yield batch[0], batch[1]


def mapped(value: Any, change: Callable[..., Tensor]) -> Any:
    """What a model is given, with every tensor changed: also inside of tuples and mappings."""
    if isinstance(value, Mapping):
        return {name: mapped(part, change) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(mapped(part, change) for part in value)
    return change(value) if isinstance(value, Tensor) else value


def _nothing_covered(tracer: CallTracer) -> GeometryError:
    reasons = "; ".join(f"{name}: {why}" for name, why in tracer.uncovered().items())
    return GeometryError(
        f"the outputs depend on no linear layer that K-FAC covers ({reasons or 'there are no parameters'})",
        setting="model",
    )


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient; afterwards those that did do again."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
