"""Runs without new weights: the very fields of gradient descent, through crossings, at any depth."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from papers.gram_metrics.checks import Problem
from papers.gram_metrics.field_state import state_of
from papers.gram_metrics.history import check_problem, evolve, hidden
from papers.gram_metrics.network import FieldError
from raising import refused
from tests.oracles.fields import descend

Make = Callable[..., Problem]
NETWORKS = [((6, 8), 0.5), ((6, 8, 8), 0.5), ((4, 7, 5, 8), 0.5), ((5, 6, 7, 6, 5), 0.05)]
"""Widths and η; with a step too large for its depth, descent itself multiplies rounding."""
ETA, STEPS = 0.5, 25


@pytest.mark.parametrize(("widths", "eta"), NETWORKS)
def test_every_field_at_every_step(make: Make, widths: tuple[int, ...], eta: float) -> None:
    problem = make(*widths)
    rows = torch.cat([problem.inputs, problem.unseen])
    true = descend(problem.weights, problem.inputs, problem.targets, eta, STEPS)
    states = list(
        evolve(problem.weights, problem.inputs, problem.targets, eta=eta, steps=STEPS, unseen=problem.unseen)
    )
    assert len(states) == STEPS + 1
    assert int(true.crossings.sum()) >= 5, "the case must have crossings"
    for state, weights in zip(states, true.weights, strict=True):
        expected = state_of(weights, rows)
        for layer in state.v:
            assert torch.allclose(state.v[layer], expected.v[layer], rtol=1e-10, atol=1e-12)
            assert torch.allclose(state.b[layer], expected.b[layer], rtol=1e-10, atol=1e-12)


def test_one_hidden_layer_has_no_weights_at_all(make: Make) -> None:
    problem = make(6, 8)
    rows = torch.cat([problem.inputs, problem.unseen])
    true = descend(problem.weights, problem.inputs, problem.targets, ETA, STEPS)
    v = rows @ problem.weights[0].T
    run = list(hidden(v, rows @ problem.inputs.T / 8, problem.targets, ETA, STEPS))
    for found, weights in zip(run, true.weights, strict=True):
        assert torch.allclose(found, rows @ weights[0].T, rtol=1e-11, atol=1e-13)


def test_the_form_in_u_holds_only_until_a_neuron_switches_on(make: Make) -> None:
    """Equation 50 as printed: what is off stays off, since u has forgotten how far below zero it was."""
    problem = make(6, 8)
    true = descend(problem.weights, problem.inputs, problem.targets, ETA, STEPS)
    Q = problem.inputs @ problem.inputs.T / 8
    u = (problem.inputs @ problem.weights[0].T).clamp(min=0)
    off = []
    for t in range(STEPS + 1):
        r = u.mean(-1) - problem.targets
        off.append(float((r - true.residuals[t]).abs().max()))
        a = u > 0
        u = (u - a * ((2 * ETA / 5) * Q @ (r[:, None] * a))).clamp(min=0)
    on = [
        int((after[0] & ~before[0]).sum()) for before, after in zip(true.masks, true.masks[1:], strict=False)
    ]
    first = next(t for t, count in enumerate(on) if count)
    assert max(off[: first + 1]) < 1e-12
    assert max(off) > 1e-3


class _Shapes(TorchDispatchMode):
    """The shapes of every new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in known:
                self.seen.add(tuple(t.shape))
        return result


def test_no_tensor_has_the_shape_of_a_weight(make: Make) -> None:
    problem = make(11, 13, 17, 19)
    with _Shapes() as shapes:
        for _ in evolve(problem.weights, problem.inputs, problem.targets, eta=ETA, steps=3):
            pass
    assert (5, 17) in shapes.seen
    assert not shapes.seen & {(13, 11), (17, 13), (19, 17), (11, 13), (13, 17), (17, 19)}
    with _Shapes() as shapes:
        descend(problem.weights, problem.inputs, problem.targets, ETA, 1)
    assert (17, 13) in shapes.seen, "descent on the weights does"


def test_the_weights_given_stay_as_they_are(make: Make) -> None:
    problem = make(6, 8, 8)
    kept = [W.clone() for W in problem.weights]
    list(evolve(problem.weights, problem.inputs, problem.targets, eta=ETA, steps=5))
    assert all(torch.equal(a, b) for a, b in zip(kept, problem.weights, strict=True))


def test_it_stays_on_its_device(make: Make) -> None:
    problem = make(4, 6, 5)
    given = ([W.to("meta") for W in problem.weights], problem.inputs.to("meta"), problem.targets.to("meta"))
    assert [state.Y.device.type for state in evolve(*given, eta=0.1, steps=2)] == ["meta"] * 3


def test_float32(make: Make) -> None:
    problem = make(6, 8, 8)
    exact = list(evolve(problem.weights, problem.inputs, problem.targets, eta=0.1, steps=5))
    single = [W.float() for W in problem.weights]
    found = list(evolve(single, problem.inputs.float(), problem.targets.float(), eta=0.1, steps=5))
    assert found[-1].Y.dtype == torch.float32
    assert torch.allclose(found[-1].Y.double(), exact[-1].Y, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"inputs": torch.zeros(0, 3)}, "inputs"),
        ({"inputs": torch.zeros(2, 4)}, "inputs"),
        ({"inputs": torch.zeros(3)}, "inputs"),
        ({"inputs": torch.zeros(2, 3).double()}, "inputs"),
        ({"targets": torch.zeros(2, 1)}, "targets"),
        ({"targets": torch.zeros(3)}, "targets"),
        ({"targets": torch.zeros(2).double()}, "targets"),
        ({"unseen": torch.zeros(0, 3)}, "unseen"),
        ({"unseen": torch.zeros(2, 2)}, "unseen"),
    ],
)
def test_bad_problems(change: dict[str, Tensor], setting: str) -> None:
    good = {"inputs": torch.zeros(2, 3), "targets": torch.zeros(2), "unseen": torch.zeros(1, 3)}
    weights = [torch.zeros(4, 3)]
    assert check_problem(weights, **good).shape == (3, 3)
    with refused(FieldError, setting=setting):
        check_problem(weights, **{**good, **change})


def test_a_run_checks_its_problem(make: Callable[..., Problem]) -> None:
    problem: Problem = make(3, 4)
    with refused(FieldError, setting="targets"):
        next(evolve(problem.weights, problem.inputs, problem.targets[:-1], eta=0.1, steps=1))
