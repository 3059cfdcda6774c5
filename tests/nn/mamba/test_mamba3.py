"""The mixer of Mamba-3 against one token at a time, and the parts that are its own."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, vmap

from raising import refused
from tests.oracles.recurrence import mamba3_by_steps
from topograd.errors import StackError
from topograd.nn.mamba.mamba3 import Mamba3Mixer, decay_rate, rotate_pairs


def mixer(groups: int = 2, fraction: float = 0.5, chunk: int = 4, heads: int = 4) -> Mamba3Mixer:
    """Float64, with parameters that are nowhere zero or one, and steps long enough to turn around."""
    torch.manual_seed(3)
    made = Mamba3Mixer(6, heads, 3, 8, groups, fraction, chunk).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        made.dt_bias.add_(4)
    return made


def inputs(time: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, time, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(time))


def assert_near(ours: Tensor, theirs: Tensor, bound: float = 1e-12) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize(
    ("time", "chunk", "groups", "heads", "fraction"),
    [
        (1, 4, 1, 4, 0.5),
        (2, 4, 2, 4, 1),
        (3, 64, 4, 4, 0.5),
        (13, 4, 1, 4, 1),
        (13, 5, 2, 4, 0.5),
        (12, 1, 4, 4, 1),
        (9, 3, 1, 1, 0.5),
    ],
)
def test_outputs_states_and_every_gradient(
    time: int, chunk: int, groups: int, heads: int, fraction: float
) -> None:
    model = mixer(groups, fraction, chunk, heads)
    u = inputs(time).requires_grad_()
    state = model.new_state(2)
    y = model(u, state)
    expected, memory = mamba3_by_steps(model, u)
    assert_near(y, expected)
    turn = memory.pop("theta")
    assert_near(torch.polar(torch.ones_like(turn), state["theta"]), torch.polar(torch.ones_like(turn), turn))
    for name, tensor in memory.items():
        assert_near(state[name], tensor)
    wanted = [u, *model.parameters()]
    weight = torch.randn_like(y)
    fast = torch.autograd.grad(y, wanted, weight, retain_graph=True)
    slow = torch.autograd.grad(expected, wanted, weight)
    names = ["u", *dict(model.named_parameters())]
    for name, ours, theirs in zip(names, fast, slow, strict=True):
        assert (ours - theirs).norm() <= 1e-12 * theirs.norm(), name


def test_the_stored_angle_is_wrapped() -> None:
    model, u = mixer(), inputs(40)
    _, memory = mamba3_by_steps(model, u)
    assert memory["theta"].abs().max() > 4 * math.pi
    state = model.new_state(2)
    model(u, state)
    assert state["theta"].min() >= 0
    assert state["theta"].max() < 2 * math.pi


def test_parameters_have_the_official_names_and_shapes() -> None:
    made = Mamba3Mixer(6, 4, 3, 8, groups=2)
    assert {name: tuple(p.shape) for name, p in made.state_dict().items()} == {
        "in_proj.weight": (2 * 12 + 2 * 16 + 3 * 4 + 2, 6),
        "dt_bias": (4,),
        "D": (4,),
        "B_norm.weight": (8,),
        "C_norm.weight": (8,),
        "B_bias": (4, 1, 8),
        "C_bias": (4, 1, 8),
        "out_proj.weight": (6, 12),
    }
    for name in ("D", "B_norm.weight", "C_norm.weight", "B_bias", "C_bias"):
        assert torch.equal(made.state_dict()[name], torch.ones_like(made.state_dict()[name]))
    steps = F.softplus(Mamba3Mixer(6, 400, 1, 2, rope_fraction=1).dt_bias)
    assert 0.00099 < steps.min() < 0.0013
    assert 0.08 < steps.max() < 0.1001


def test_the_decay_has_a_heavy_tail_and_one_slope_at_zero() -> None:
    s = torch.tensor([-1e6, -3.0, -1e-9, 0.0, 1e-9, 3.0, 1.0], dtype=torch.float64, requires_grad=True)
    rate = decay_rate(s)
    expected = torch.tensor([1e-4, 0.25, 1.0, 1.0, 1.0, 4.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(rate, expected, rtol=1e-8, atol=0)
    (slope,) = torch.autograd.grad(rate.sum(), s)
    expected = torch.tensor([0, 1 / 16, 1, 1, 1, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(slope, expected, rtol=1e-8, atol=0)


def test_rotations_turn_adjacent_pairs_and_leave_the_rest() -> None:
    x = torch.tensor([1.0, 0.0, 0.0, 2.0, 5.0, 6.0])
    angles = torch.tensor([math.pi / 2, math.pi])
    turned = rotate_pairs(x, torch.polar(torch.ones(2), angles))
    torch.testing.assert_close(turned, torch.tensor([0.0, 1.0, 0.0, -2.0, 5.0, 6.0]))


def test_a_later_token_changes_no_earlier_output() -> None:
    """Though the weight of a token in the scan knows the next one."""
    model, u = mixer(), inputs(10)
    changed = u.clone()
    changed[:, 6] += 1
    assert_near(model(u)[:, :6], model(changed)[:, :6])
    assert (model(u) - model(changed))[:, 6:].abs().amin((0, 2)).min() > 0


def test_the_last_token_writes_once_more_when_the_next_one_comes() -> None:
    """Without any next token the state lacks (1-λ) of it; that is what resuming must add."""
    model, u = mixer(), inputs(6)
    short, long = model.new_state(2), model.new_state(2)
    model(u[:, :5], short)
    model(u, long)
    resumed = model(u[:, 5:], short)
    assert_near(resumed, mamba3_by_steps(model, u)[0][:, 5:])
    assert_near(short["S"], long["S"])


def test_silent_inputs_and_huge_steps_have_finite_gradients() -> None:
    model = Mamba3Mixer(6, 2, 3, 4, chunk=16)
    with torch.no_grad():
        model.dt_bias.copy_(torch.tensor([1e4, -1e4]))
    for u in (torch.zeros(1, 40, 6), 1e3 * torch.randn(1, 40, 6)):
        gradients = torch.autograd.grad(model(u).square().sum(), list(model.parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_long_inputs_in_float32() -> None:
    model, u = mixer(chunk=32), inputs(600, batch=1)
    exact = model(u)
    answer = model.float()(u.float())
    # Angles are sums over all tokens: here up to 10³, with a rounding of 2⁻²⁴ times that.
    assert (answer - exact).norm() <= 1e-3 * exact.norm()


def test_members_stacked_along_the_last_axis() -> None:
    """Their layout reaches the rotation, which views pairs as complex numbers."""
    model, u = mixer(), inputs(5)
    stacked = {name: torch.stack([p, 1.1 * p], -1).detach() for name, p in model.named_parameters()}
    together = vmap(lambda values: functional_call(model, values, (u,)), in_dims=-1)(stacked)
    for index in range(2):
        alone = functional_call(model, {name: p[..., index] for name, p in stacked.items()}, (u,))
        assert_near(together[index], alone)


@pytest.mark.parametrize(("fraction", "state"), [(0.25, 8), (0.5, 6), (0.5, 2), (1, 5), (0, 8)])
def test_rotations_need_whole_pairs(fraction: float, state: int) -> None:
    with refused(StackError, setting="rope_fraction"):
        Mamba3Mixer(6, 4, 3, state, rope_fraction=fraction)
