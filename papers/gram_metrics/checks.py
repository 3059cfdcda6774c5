"""The fields against their witnesses on random networks: the tangent kernel, and descent on the weights.

Statement. Weights are N(0, 2/N_{l-1}), inputs N(0, 1), and the target is the output of another such network,
which is positive, as Y must be. Three comparisons, in float64:

    kernel     max |K - K'| / max |K'|, whole and by layer, K' from Jacobians by torch.func: rounding
    run        max |Y - Y'| over all steps, training and unseen, Y' from autograd on the weights: rounding for
               the exact run, and beside it what the frozen and re-linearised predictions miss
    order      what the first-order changes of u, b and Y miss of one true step, over the same at half the
               step: 4 where no mask changes

The first two name the seconds of either side. Cost: that of the witness.
Limits. Some neurons slide along their kink for hundreds of steps, on at one step and off at the next, and
come as close to zero as the residuals do. Near convergence a mask within rounding of zero may then flip on
one side only: the two counts of crossings differ by a few, the outputs by no more than rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from papers.gram_metrics.field_state import state_of
from papers.gram_metrics.first_order import first_order
from papers.gram_metrics.kernel import kernel
from papers.gram_metrics.network import FieldError
from papers.gram_metrics.prediction import frozen, relinearised
from papers.gram_metrics.simulation import Trajectory, crossings, simulate
from tests.oracles.fields import descend
from tests.oracles.ntk import empirical_ntk, output

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """A random network, what it is trained on, and inputs that it does not see."""

    weights: list[Tensor]
    inputs: Tensor
    targets: Tensor
    unseen: Tensor


def random_problem(
    depth: int,
    width: int,
    examples: int,
    seed: int = 0,
    unseen: int = 8,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """`depth` layers as wide as the inputs, and a teacher of the same kind."""
    for name, value in (("depth", depth), ("width", width), ("examples", examples)):
        if value < 1:
            raise FieldError(setting=name, given=value, allowed="at least 1")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    student, teacher = (
        [(2 / width) ** 0.5 * normal(width, width).to(dtype) for _ in range(depth)] for _ in range(2)
    )
    inputs, others = normal(examples, width).to(dtype), normal(unseen, width).to(dtype)
    return Problem(student, inputs, output(teacher, inputs), others)


def gentle_step(K: Tensor) -> float:
    """η = M / (10 λ), λ the largest eigenvalue of K: a tenth of where a frozen kernel would diverge.

    >>> gentle_step(torch.diag(torch.tensor([4.0, 1.0])))
    0.05
    """
    return K.shape[0] / (10 * float(torch.linalg.matrix_norm(K, 2)))


def compare_with_ntk(depth: int, width: int, examples: int, seed: int = 0) -> dict[str, Any]:
    """K from the fields against the tangent kernel from Jacobians, as plain numbers."""
    problem = random_problem(depth, width, examples, seed)
    kernel(problem.weights, problem.inputs)  # a first call is slow
    empirical_ntk(problem.weights, problem.inputs[:1])
    ours, seconds = _timed(lambda: kernel(problem.weights, problem.inputs))
    theirs, seconds_reference = _timed(lambda: torch.stack(empirical_ntk(problem.weights, problem.inputs)))
    trace = ours.total.trace()
    layers = [
        {
            "layer": i + 1,
            "relative_error": relative_error(ours.layers[i], theirs[i]),
            "share_of_trace": float(ours.layers[i].trace() / trace),
        }
        for i in range(depth)
    ]
    return {
        "relative_error_vs_ntk": relative_error(ours.total, theirs.sum(0)),
        "layers": layers,
        "seconds": seconds,
        "seconds_reference": seconds_reference,
    }


def compare_with_weights(
    depth: int, width: int, examples: int, steps: int, seed: int = 0, eta: float | None = None
) -> dict[str, Any]:
    """A run in the fields against one in the weights, as plain numbers; η is `gentle_step` if not given."""
    problem = random_problem(depth, width, examples, seed)
    weights, inputs, targets, unseen = problem.weights, problem.inputs, problem.targets, problem.unseen
    eta = gentle_step(kernel(weights, inputs).total) if eta is None else eta
    run, seconds = _timed(lambda: simulate(weights, inputs, targets, eta=eta, steps=steps, unseen=unseen))
    true, seconds_weights = _timed(lambda: descend(weights, inputs, targets, eta, steps, unseen))

    def missed(result: Trajectory) -> float:
        pairs = ((result.residuals, true.residuals), (result.unseen, true.unseen))
        return max(float((a - b).abs().max()) for a, b in pairs)

    return {
        "max_abs_error_vs_weights": missed(run),
        "mask_crossings": int(run.crossings.sum()),
        "mask_crossings_in_weights": int(true.crossings.sum()),
        "frozen_max_abs_error": missed(frozen(weights, inputs, targets, eta=eta, steps=steps, unseen=unseen)),
        "relinearised_max_abs_error": missed(
            relinearised(weights, inputs, targets, eta=eta, steps=steps, unseen=unseen)
        ),
        "eta": eta,
        "first_loss": float(run.losses[0]),
        "last_loss": float(run.losses[-1]),
        "seconds": seconds,
        "seconds_weights": seconds_weights,
    }


def measure_order(depth: int, width: int, examples: int, seed: int = 0, eta: float = 1e-3) -> dict[str, Any]:
    """Errors of the first-order changes at η and η / 2, their ratio, and the crossings of both steps.

    One hidden layer has no error but rounding between crossings; the ratio then means nothing.
    """
    problem = random_problem(depth, width, examples, seed)
    whole, half = (_first_order_errors(problem, step) for step in (eta, eta / 2))
    return {
        name: {"error": whole[name], "error_at_half": half[name], "ratio": whole[name] / (half[name] or 1.0)}
        for name in ("u", "b", "Y")
    } | {"crossings": [int(whole["crossings"]), int(half["crossings"])], "eta": eta}


def _first_order_errors(problem: Problem, eta: float) -> dict[str, float]:
    """The largest error of each field over layers, rows and neurons, and the crossings."""
    true = descend(problem.weights, problem.inputs, problem.targets, eta, 1)
    before, after = (state_of(weights, problem.inputs) for weights in true.weights)
    change = first_order(problem.weights, before, true.residuals[0], eta)
    layers = range(1, before.depth + 1)
    return {
        "u": max(float((after.u[i] - before.u[i] - change.u[i]).abs().max()) for i in layers),
        "b": max(float((after.b[i] - before.b[i] - change.b[i]).abs().max()) for i in layers),
        "Y": float((after.Y - before.Y - change.Y).abs().max()),
        "crossings": float(crossings(before, after)),
    }


def relative_error(result: Tensor, expected: Tensor) -> float:
    """max |found - expected| / max |expected|."""
    return float((result - expected).abs().max() / expected.abs().max())


def _timed(run: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    result = run()
    return result, time.perf_counter() - began
