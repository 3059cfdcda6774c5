"""The counter against allocations that are known, and the promise of stages: less held at once."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from topograd.exec.train_step import train_step
from topograd.memory import peak_bytes, peak_step_bytes
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.topology.dag import Topology


def zeros(elements: int) -> Tensor:
    return torch.zeros(elements, dtype=torch.float64)


def one_after_the_other() -> None:
    for elements in (100, 300, 200):
        zeros(elements)


def side_by_side() -> None:
    held = [zeros(100), zeros(300)]
    del held[0]
    zeros(50)


def views_and_writes_in_place() -> None:
    x = zeros(400)
    x.view(20, 20).t()[3:].add_(1.0)
    x[10:20].mul_(2.0)


def a_chain() -> None:
    y = ((zeros(100) + 1) * 2).exp()  # each result is made while the one before it lives
    del y


@pytest.mark.parametrize(
    ("run", "elements"),
    [(one_after_the_other, 300), (side_by_side, 400), (views_and_writes_in_place, 400), (a_chain, 200)],
)
def test_known_allocations(run: Callable[[], None], elements: int) -> None:
    assert peak_bytes(run) == 8 * elements


def test_what_was_there_before_and_what_is_kept_outside() -> None:
    before = zeros(1000)
    kept: list[Tensor] = []

    def run() -> None:
        before.add_(1.0)
        kept.append(before[:500])  # a view of what was there
        kept.append(zeros(10))

    assert peak_bytes(run) == 80
    assert peak_bytes(lambda: None) == 0


def test_what_autograd_saves_is_counted_until_the_backward() -> None:
    """x → exp → exp keeps both results for the backward; then come the gradients."""
    x = zeros(1000).requires_grad_()

    def forward() -> None:
        x.exp().exp().sum()

    def detached() -> None:
        with torch.no_grad():
            x.exp().exp().sum()

    assert peak_bytes(forward) == 8 * 2001
    assert peak_bytes(detached) == 8 * 2000, "without a graph the sum is made when the first exp is gone"


@cache
def step_peak(partition: str) -> int:
    return measured(partition)


def measured(partition: str) -> int:
    torch.manual_seed(0)
    stack = GPT(layers=8, width=16, heads=2, vocab=32, context=32)
    topology = Topology.chain(partition)
    prepare(stack, topology)
    inputs, targets = torch.randint(32, (2, 4, 32))
    return peak_step_bytes(lambda: train_step(stack, topology, inputs, targets), list(stack.parameters()))


def test_a_staged_step_holds_less_than_backprop_and_less_with_every_cut() -> None:
    peaks = [step_peak(partition) for partition in ("8", "4,4", "2,2,2,2", "1,1,1,1,1,1,1,1")]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4
    backprop, two, four, _ = peaks
    assert two < 0.7 * backprop
    assert four < 0.45 * backprop


def test_the_largest_stage_decides() -> None:
    """Activation memory is O(max d_k): "Stage-Partitioned Learning" P4."""
    assert step_peak("4,4") == pytest.approx(step_peak("2,2,4"), rel=0.05)
    assert step_peak("2,2,4") > 1.3 * step_peak("2,2,2,2")


def test_the_count_is_exact() -> None:
    assert measured("2,2,2,2") == measured("2,2,2,2")


def test_gradients_are_allocated_before_the_count() -> None:
    weight = torch.nn.Parameter(zeros(1000))
    assert peak_step_bytes(lambda: weight.sum().backward(), [weight]) < 8 * 1000
    assert torch.equal(weight.grad if weight.grad is not None else zeros(0), torch.ones(1000).double())
