"""The chunked scan against one position at a time: values, states, every gradient, and transforms of it."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

from raising import refused
from tests.oracles.recurrence import scan_by_steps
from topograd.errors import StackError
from topograd.nn.mamba.ssd import decay_scan, ssd


def parts(
    length: int, heads: int = 4, groups: int = 2, batch: int = 2, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """v, a, B, C and an initial state, p = 3 and n = 5; decays from nearly none to nearly all."""
    torch.manual_seed(length)
    v, B, C, S = (
        torch.randn(batch, *shape, dtype=dtype)
        for shape in ((length, heads, 3), (length, groups, 5), (length, groups, 5), (heads, 3, 5))
    )
    return v, -3 * torch.rand(batch, length, heads, dtype=dtype) ** 2, B, C, S


def chunked(inputs: Sequence[Tensor], chunk: int = 64) -> tuple[Tensor, Tensor]:
    v, a, B, C, *state = inputs
    return decay_scan(v, a, B, C, state[0] if state else None, chunk)


def stepwise(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    v, a, B, C, *state = inputs
    return scan_by_steps(v, a, B, C, state[0] if state else None)


def assert_near(ours: Tensor, theirs: Tensor, bound: float = 1e-12) -> None:
    """Relative to the norm: sums in another order differ where terms cancel."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= bound * theirs.norm()


@given(
    length=st.integers(1, 23),
    chunk=st.integers(1, 30),
    groups=st.sampled_from([1, 2, 4]),
    cuts=st.lists(st.integers(1, 22), max_size=3),
    resumed=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_chunks_and_resumed_pieces_are_the_recurrence(
    length: int, chunk: int, groups: int, cuts: list[int], resumed: bool
) -> None:
    *inputs, start = parts(length, groups=groups)
    before = [start] if resumed else []
    expected, last = stepwise([*inputs, *before])
    ends = sorted({cut for cut in cuts if cut < length} | {length})
    pieces = []
    for begin, end in zip([0, *ends], ends, strict=False):
        y, state = chunked([*(x[:, begin:end] for x in inputs), *before], chunk)
        pieces.append(y)
        before = [state]
    assert_near(torch.cat(pieces, 1), expected)
    assert_near(before[0], last)


@pytest.mark.parametrize(
    ("length", "chunk", "groups"),
    [(1, 4, 2), (2, 1, 4), (7, 3, 1), (12, 4, 2), (13, 5, 4), (5, 64, 1)],
)
def test_every_gradient(length: int, chunk: int, groups: int) -> None:
    inputs = [x.requires_grad_() for x in parts(length, groups=groups)]
    fast, slow = chunked(inputs, chunk), stepwise(inputs)
    weights = [torch.randn_like(x) for x in slow]
    ours = torch.autograd.grad(fast, inputs, weights)
    theirs = torch.autograd.grad(slow, inputs, weights)
    for left, right in zip(ours, theirs, strict=True):
        assert_near(left, right)


def test_ssd_is_the_formula() -> None:
    x, a, B, C, start = parts(9)
    dt, A = -a, -torch.tensor([0.1, 1.0, 4.0, 16.0], dtype=a.dtype)
    D = torch.randn(4, dtype=a.dtype)
    inputs = [t.requires_grad_() for t in (x, dt, A, B, C, D, start)]
    fast = ssd(x, dt, A, B, C, D, start, chunk=4)
    y, last = scan_by_steps(dt[..., None] * x, dt * A, B, C, start)
    slow = (y + D[:, None] * x, last)
    weights = [torch.randn_like(part) for part in slow]
    for ours, theirs in zip(fast, slow, strict=True):
        assert_near(ours, theirs)
    ours_all, theirs_all = (torch.autograd.grad(out, inputs, weights) for out in (fast, slow))
    for ours, theirs in zip(ours_all, theirs_all, strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("kind", ["strong", "none", "mixed", "minus zero"])
def test_extreme_decays_have_finite_gradients(kind: str) -> None:
    v, a, B, C, start = parts(300, dtype=torch.float32)
    extremes = torch.where(torch.arange(300) % 3 == 0, -1e4, 0.0)[None, :, None].expand_as(a)
    decays = {"strong": torch.full_like(a, -1e4), "none": torch.zeros_like(a), "mixed": extremes}
    a = decays.get(kind, -torch.zeros_like(a)).clone()
    inputs = [x.requires_grad_() for x in (v, a, B, C, start)]
    y, state = chunked(inputs)
    slow, last = stepwise([x.double() for x in inputs])
    assert_near(y.double(), slow, 1e-6)
    assert_near(state.double(), last, 1e-6)
    gradients = torch.autograd.grad((y.square().mean(), state.square().mean()), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_long_scans_stay_finite_and_right_in_float32() -> None:
    v, a, B, C, _ = parts(3000, heads=1, groups=1, batch=1, dtype=torch.float32)
    inputs = [x.requires_grad_() for x in (v, a * 0.01, B, C)]
    y, _ = chunked(inputs)
    slow, _ = stepwise([x.detach().double() for x in inputs])
    assert_near(y.double(), slow, 2e-6)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.square().mean(), inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 40])
def test_low_precision_only_rounds_the_ends(dtype: torch.dtype, length: int) -> None:
    low = [x.to(dtype) for x in parts(length)]
    y, state = chunked(low, 16)
    wide, wide_state = chunked([x.float() for x in low], 16)
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    assert torch.equal(y, wide.to(dtype))
    assert torch.equal(state, wide_state)


@pytest.mark.parametrize("length", [1, 40])
def test_autocast_changes_nothing(length: int) -> None:
    inputs = parts(length, dtype=torch.float32)
    expected = chunked(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = chunked(inputs)
    assert all(torch.equal(left, right) for left, right in zip(ours, expected, strict=True))
    assert ours[0].dtype == ours[1].dtype == torch.float32


def test_heads_share_the_products_of_their_group() -> None:
    b, L, h, p, g, n, Q = 2, 32, 4, 3, 2, 5, 8
    v, a, B, C, _ = parts(L)
    with FlopCounterMode(display=False) as counter:
        decay_scan(v, a, B, C, chunk=Q)
    assert counter.get_total_flops() == 2 * b * L * (h * p * (Q + 2 * n) + g * n * Q)


def total(v: Tensor, a: Tensor, B: Tensor, C: Tensor, state: Tensor) -> Tensor:
    y, last = decay_scan(v, a, B, C, state, chunk=4)
    return y.sin().sum() + last.cos().sum()


def every(*inputs: Tensor) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = grad(total, argnums=(0, 1, 2, 3, 4))(*inputs)
    return gradients


def test_forward_mode_is_the_gradient_along_a_direction() -> None:
    inputs = parts(11)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    along = jvp(total, inputs, tangents)[1]
    expected = sum((g * t).sum() for g, t in zip(every(*inputs), tangents, strict=True))
    torch.testing.assert_close(along, expected, rtol=1e-12, atol=1e-12)


def test_forward_over_reverse_is_double_backward() -> None:
    inputs = parts(11)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    ours = jvp(every, inputs, tangents)[1]
    leaves = [x.detach().requires_grad_() for x in inputs]
    first = torch.autograd.grad(total(*leaves), leaves, create_graph=True)
    theirs = torch.autograd.grad(first, leaves, tangents)
    for left, right in zip(ours, theirs, strict=True):
        assert_near(left, right)


def test_gradients_of_each_member_by_vmap() -> None:
    members = [parts(length=10) for _ in range(2)] + [tuple(2 * x for x in parts(10))]
    stacked = tuple(torch.stack(same) for same in zip(*members, strict=True))
    together = vmap(every)(*stacked)
    for index, member in enumerate(members):
        for ours, theirs in zip(together, every(*member), strict=True):
            assert_near(ours[index], theirs)


def test_vmap_over_the_last_axis_and_some_inputs_only() -> None:
    v, a, B, C, state = parts(10)
    scaled = torch.stack([v, 2 * v, -v], dim=-1)
    y = vmap(lambda w: decay_scan(w, a, B, C, state)[0], in_dims=-1)(scaled)
    for index in range(3):
        assert_near(y[index], scan_by_steps(scaled[..., index], a, B, C, state)[0])


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"chunk": 0}, "chunk"),
        ({"a": torch.zeros(2, 6, 3)}, "v"),
        ({"B": torch.zeros(2, 6, 3, 5), "C": torch.zeros(2, 6, 3, 5)}, "groups"),
        ({"initial_state": torch.zeros(2, 4, 5, 3)}, "initial_state"),
        ({name: x[:, :0] for name, x in zip("vaBC", parts(6), strict=False)}, "groups"),
    ],
    ids=["chunk", "shapes", "groups", "state", "empty"],
)
def test_what_does_not_fit_is_said(change: dict[str, object], setting: str) -> None:
    given = dict(zip(("v", "a", "B", "C", "initial_state"), parts(6), strict=True))
    with refused(StackError, setting=setting):
        decay_scan(**{**given, "initial_state": None, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (9, 4), (8, 16)])
def test_reading_before_writing(length: int, chunk: int) -> None:
    """y without what the token itself writes; not a bit of it is left."""
    v, a, B, C, S = parts(length, groups=4)
    v.requires_grad_()
    y, state = decay_scan(v, a, B, C, S, chunk, before=True)
    full, last = scan_by_steps(v, a, B, C, S)
    assert_near(y, full - v * (B * C).sum(-1)[..., None])
    assert_near(state, last)
    for t in range(1, length):
        (gradient,) = torch.autograd.grad(y[:, t].sum(), v, retain_graph=True)
        assert gradient[:, t:].count_nonzero() == 0
