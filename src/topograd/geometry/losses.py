"""Losses for K-FAC: the vectors at the outputs whose back-propagated Grams add up to G.

Statement. Outputs f (batch, ..., C) are one prediction of C numbers at each of N places: a loss term each.
With

    squared error    ℓ = ½ ‖f - y‖²,   y ~ N(f, σ² I)         E[∂ℓ ∂ℓᵀ] = σ² I
    cross-entropy    ℓ = -log p_y,     p = softmax(f)         E[∂ℓ ∂ℓᵀ] = diag(p) - p pᵀ

the gradient ∂ℓ/∂f is, by the estimator of the Fisher matrix,

    empirical      f - y;            p - e_y                      y the targets: one vector
    monte-carlo    σ ξ, ξ ~ N(0,I);  p - e_c, c ~ p               one vector, right in expectation
    expected       σ e_c;            √p_c (e_c - p)               c = 1..C: together exactly the expectation

Gradients are of the SUM of the terms, so an early position of a sequence has gradients of all later ones.
Labels of different positions are independent given the inputs, so `expected` sends one position at a time:
vectors of several positions in one pass would add products that the expectation does not have.

Symbols and shapes. C outputs of a term, the last dimension; P positions of a sample, all dimensions between
the first and the last. Cost in backward passes for each batch: 1; `expected` P · C.
Source: "Dead Directions: Geometric Singular Learning", §7 (squared error: G keeps the factor σ² of the
noise), Lemma 33 (cross-entropy). Targets of -100 are not terms, under every estimator. A loss of one's own
has no distribution to draw from: only `empirical`.
Limits. Samples of a batch must not influence one another.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from topograd.errors import GeometryError

Fisher = Literal["empirical", "monte-carlo", "expected"]
OwnLoss = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to the loss of each term, not their sum: torch's reduction 'none'."""
IGNORED = -100
MAX_PASSES = 10_000
"""Backward passes for one batch that `expected` may take."""


class Loss(Protocol):
    """A loss with its gradients at the outputs."""

    @property
    def name(self) -> str: ...

    def output_gradients(
        self, outputs: Tensor, targets: Tensor | None, fisher: Fisher, generator: torch.Generator | None
    ) -> tuple[int, Iterable[Tensor]]:
        """The number of loss terms, and the vectors (of the shape of the outputs) to back-propagate."""


@dataclass(frozen=True)
class SquaredError:
    """½ ‖f - y‖² with Gaussian label noise of this variance σ², which `empirical` does not need."""

    variance: float = 1.0
    name = "squared-error"

    def __post_init__(self) -> None:
        if not 0 < self.variance < float("inf"):
            raise GeometryError(setting="variance", given=self.variance, allowed="a positive number")

    def output_gradients(
        self, outputs: Tensor, targets: Tensor | None, fisher: Fisher, generator: torch.Generator | None
    ) -> tuple[int, Iterable[Tensor]]:
        _check_outputs(outputs, targets, fisher)
        if targets is not None and targets.shape != outputs.shape:
            raise GeometryError(
                f"targets {tuple(targets.shape)} for outputs {tuple(outputs.shape)}",
                setting="targets",
                given=tuple(targets.shape),
                remedy="a squared error needs equal shapes",
            )
        terms = outputs[..., 0].numel()
        if fisher == "empirical":
            assert targets is not None
            return terms, [outputs - targets.to(outputs)]
        deviation = self.variance**0.5
        if fisher == "monte-carlo":
            noise = torch.empty_like(outputs).normal_(0, deviation, generator=generator)
            return terms, [noise]
        basis = torch.eye(outputs.shape[-1], device=outputs.device, dtype=outputs.dtype) * deviation
        return terms, _each_position(outputs, (row.expand_as(outputs) for row in basis))


@dataclass(frozen=True)
class CrossEntropy:
    """-log softmax(f)_y, classes last."""

    name = "cross-entropy"

    def output_gradients(
        self, outputs: Tensor, targets: Tensor | None, fisher: Fisher, generator: torch.Generator | None
    ) -> tuple[int, Iterable[Tensor]]:
        _check_outputs(outputs, targets, fisher)
        p = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).softmax(-1)
        terms, counted = outputs[..., 0].numel(), None
        if targets is not None:
            _check_labels(outputs, targets)
            counted = (targets != IGNORED)[..., None]
            terms = int(counted.sum())
        if fisher == "expected":
            return terms, _each_position(outputs, self._columns(p, counted))
        labels = targets
        if fisher == "monte-carlo":
            labels = _drawn(p, generator)
        assert labels is not None
        gradient = p.scatter_add_(-1, labels.clamp(min=0)[..., None], -torch.ones_like(p[..., :1]))
        return terms, [(gradient if counted is None else gradient.mul_(counted)).to(outputs.dtype)]

    @staticmethod
    def _columns(p: Tensor, counted: Tensor | None) -> Iterator[Tensor]:
        """√p_c (e_c - p) for every class c, zero where nothing is counted."""
        for c in range(p.shape[-1]):
            column = -p
            column[..., c] += 1
            column *= p[..., c, None].sqrt()
            yield column if counted is None else column * counted


@dataclass(frozen=True)
class Own:
    """A loss function of the caller's."""

    function: OwnLoss
    name = "own"

    def output_gradients(
        self, outputs: Tensor, targets: Tensor | None, fisher: Fisher, generator: torch.Generator | None
    ) -> tuple[int, Iterable[Tensor]]:
        if fisher != "empirical":
            raise GeometryError(
                f"the labels of a loss of one's own have no known distribution for fisher {fisher!r}",
                setting="fisher",
                given=fisher,
                allowed="'empirical'",
            )
        _check_outputs(outputs, targets, fisher)
        assert targets is not None
        leaf = outputs.detach().requires_grad_()
        losses = self.function(leaf, targets)
        if losses.dim() == 0:
            raise GeometryError(
                "the loss is one number", setting="loss", allowed="the loss of each term (reduction='none')"
            )
        return losses.numel(), torch.autograd.grad(losses.sum(), leaf)


def loss_named(loss: str | Loss | OwnLoss) -> Loss:
    """The loss of this name, the loss itself, or a function as one.

    >>> loss_named("squared-error")
    SquaredError(variance=1.0)
    """
    if isinstance(loss, SquaredError | CrossEntropy | Own):
        return loss
    if isinstance(loss, str):
        known: dict[str, Loss] = {"cross-entropy": CrossEntropy(), "squared-error": SquaredError()}
        if loss not in known:
            raise GeometryError(
                setting="loss", given=loss, allowed=f"one of {', '.join(known)}, or a function"
            )
        return known[loss]
    if not callable(loss):
        raise GeometryError(setting="loss", given=loss, allowed="a name or a function")
    return Own(loss)


def _drawn(p: Tensor, generator: torch.Generator | None) -> Tensor:
    """One class for each row of probabilities, by inverting their sums: one random number a row."""
    sums = p.cumsum(-1)
    u = torch.rand((*p.shape[:-1], 1), generator=generator, dtype=p.dtype, device=p.device) * sums[..., -1:]
    return torch.searchsorted(sums, u, right=True)[..., 0].clamp(max=p.shape[-1] - 1)


def check_fisher(fisher: str) -> None:
    """Raise GeometryError for an unknown estimator."""
    if fisher not in get_args(Fisher):
        raise GeometryError(setting="fisher", given=fisher, allowed=f"one of {', '.join(get_args(Fisher))}")


def _each_position(outputs: Tensor, columns: Iterable[Tensor]) -> Iterator[Tensor]:
    """Each vector at one position of the samples, zero at the others."""
    positions = outputs.shape[1:-1].numel()
    passes = positions * outputs.shape[-1]
    if passes > MAX_PASSES:
        raise GeometryError(
            f"the expected Fisher matrix of {positions} positions with {outputs.shape[-1]} "
            f"outputs takes {passes} backward passes a batch, more than {MAX_PASSES}",
            setting="fisher",
            given="expected",
            remedy="use 'monte-carlo'",
        )

    def vectors() -> Iterator[Tensor]:  # a generator of its own, so that the check above comes at once
        for column in columns:
            column = column.to(outputs.dtype)
            if positions == 1:
                yield column
                continue
            flat = column.flatten(1, -2)
            for t in range(positions):
                alone = torch.zeros_like(flat)
                alone[:, t] = flat[:, t]
                yield alone.view_as(outputs)

    return vectors()


def _check_outputs(outputs: Tensor, targets: Tensor | None, fisher: Fisher) -> None:
    if outputs.dim() < 2:
        raise GeometryError(
            f"outputs have the shape {tuple(outputs.shape)}; the last dimension must be that of a prediction",
            setting="outputs",
            given=tuple(outputs.shape),
            remedy="give outputs=lambda model, x: model(x)[:, None]",
        )
    if fisher == "empirical" and targets is None:
        raise GeometryError(
            "the empirical Fisher matrix needs targets", setting="targets", remedy="give (inputs, targets)"
        )


def _check_labels(outputs: Tensor, targets: Tensor) -> None:
    classes = outputs.shape[-1]
    if targets.shape != outputs.shape[:-1] or targets.is_floating_point():
        raise GeometryError(
            f"targets {tuple(targets.shape)} of {targets.dtype} for outputs {tuple(outputs.shape)}",
            setting="targets",
            given=tuple(targets.shape),
            remedy="cross-entropy needs one class number for each prediction, classes last in the outputs",
        )
    wrong = (targets != IGNORED) & ((targets < 0) | (targets >= classes))
    if wrong.any():
        label = int(targets[wrong][0])
        raise GeometryError(
            f"a label is {label}", setting="targets", given=label, allowed=f"0..{classes - 1}, or {IGNORED}"
        )
