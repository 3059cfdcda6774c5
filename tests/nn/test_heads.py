"""Shared, per-stage and low-rank heads."""

import pytest
import torch
from torch import nn

from raising import refused
from topograd.errors import StackError
from topograd.nn.heads import FullDelta, Head, LowRankDelta, cap

VOCAB, WIDTH = 7, 5


def make(rank: int | None = None, bias: bool = False, softcap: float | None = None) -> Head:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(VOCAB, WIDTH, dtype=torch.float64))
    offset = nn.Parameter(torch.randn(VOCAB, dtype=torch.float64)) if bias else None
    return Head(weight, offset, rank=rank, softcap=softcap)


def learn(head: Head) -> None:
    with torch.no_grad():
        for parameter in head.deltas.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("rank", [None, 1, 3, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_those_of_the_sum(rank: int | None, bias: bool) -> None:
    head = make(rank, bias, softcap=2.0)
    head.add(range(2))
    learn(head)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    for stage in range(2):
        delta = head.deltas[str(stage)]
        if isinstance(delta, LowRankDelta):
            own = torch.einsum("vr,rd->vd", delta.up, delta.down)
            assert torch.linalg.matrix_rank(own) == min(rank or 0, WIDTH)
        else:
            assert isinstance(delta, FullDelta)
            own = delta.weight
        z = torch.einsum("btd,vd->btv", x, head.weight + own)
        z = z if head.bias is None else z + head.bias
        torch.testing.assert_close(head(x, stage), 2.0 * torch.tanh(z / 2.0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(head.matrix(stage), head.weight + own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [None, 2])
def test_rows(rank: int | None) -> None:
    head = make(rank, bias=True)
    head.add(range(1))
    learn(head)
    x, rows = torch.randn(4, WIDTH, dtype=torch.float64), torch.tensor([6, 0, 6])
    for stage in (0, 1):  # with a delta, and without one
        torch.testing.assert_close(head(x, stage, rows), head(x, stage)[:, rows], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(head.matrix(stage, rows), head.matrix(stage)[rows], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [None, 2])
def test_adding_heads_changes_no_output(rank: int | None) -> None:
    head = make(rank)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    before = head(x, 0)
    assert head.add(range(2)) is True
    assert torch.equal(head(x, 0), before)
    assert torch.equal(head(x, 1), before)
    deltas = list(head.deltas.values())
    assert head.add(range(2)) is False
    assert head.add(range(1)) is False
    assert list(head.deltas.values()) == deltas
    learn(head)
    learned = head(x, 1)
    assert head.add(range(3)) is True
    assert list(head.deltas.values())[:2] == deltas
    assert torch.equal(head(x, 1), learned)
    assert torch.equal(head(x, 2), before)


def test_only_the_stages_that_were_asked_for_have_a_delta() -> None:
    head = make(rank=3)
    assert head.add([0, 3]) is True
    assert [head.has_delta(stage) for stage in range(5)] == [True, False, False, True, False]
    assert head.last_stage == 3
    assert head.own_parameters(1) == []
    learn(head)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    assert torch.equal(head(x, 1), nn.functional.linear(x, head.weight))
    assert not torch.allclose(head(x, 3), head(x, 1))


def test_a_rank_of_its_own_overrides_the_heads() -> None:
    head = make(rank=3)
    head.add([0])
    head.add([1], rank=2)
    delta, other = head.deltas["0"], head.deltas["1"]
    assert isinstance(delta, LowRankDelta)
    assert isinstance(other, LowRankDelta)
    assert (delta.up.shape, other.up.shape) == ((VOCAB, 3), (VOCAB, 2))
    with refused(StackError, setting="head_rank", given=6):
        head.add([2], rank=6)


def test_deltas_follow_the_weight() -> None:
    head = make().to(torch.bfloat16)
    head.add(range(1))
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("rank", [None, 2])
def test_gradients_reach_the_shared_matrix_and_only_the_stage_that_spoke(rank: int | None) -> None:
    head = make(rank)
    head.add(range(2))
    learn(head)
    head(torch.randn(4, WIDTH, dtype=torch.float64), 1).square().sum().backward()
    assert head.weight.grad is not None
    assert all(p.grad is None for p in head.deltas["0"].parameters())
    assert all(p.grad is not None and p.grad.count_nonzero() for p in head.deltas["1"].parameters())


def test_with_one_stage_shared_and_own_matrix_get_the_same_gradient() -> None:
    """The translation gauge of Remark 5.3."""
    head = make()
    head.add(range(1))
    head(torch.randn(4, WIDTH, dtype=torch.float64), 0).square().sum().backward()
    delta = head.deltas["0"]
    assert isinstance(delta, FullDelta)
    assert head.weight.grad is not None
    assert delta.weight.grad is not None
    assert torch.equal(head.weight.grad, delta.weight.grad)


@pytest.mark.parametrize("rank", [0, -1, 6])
def test_bad_rank(rank: int) -> None:
    with refused(StackError, setting="head_rank"):
        make(rank)


def test_cap() -> None:
    z = torch.linspace(-50, 50, 11, dtype=torch.float64)
    assert cap(z, None) is z
    assert cap(z, 3.0).abs().max() <= 3.0
    torch.testing.assert_close(cap(z, 1e6), z, rtol=1e-8, atol=0.0)
