"""The mixer of Mamba-2 against one token at a time, a dense convolution and Hugging Face's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.recurrence import mamba2_by_steps
from topograd.nn.mamba.mamba2 import GatedNorm, Mamba2Mixer


def mixer(groups: int = 2, chunk: int = 4, heads: int = 4) -> Mamba2Mixer:
    """Float64, with parameters that are nowhere zero or one."""
    torch.manual_seed(3)
    made = Mamba2Mixer(6, heads, 3, 5, groups=groups, chunk=chunk).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def inputs(time: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, time, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(time))


def assert_near(ours: Tensor, theirs: Tensor, bound: float = 1e-12) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize(
    ("time", "chunk", "groups", "heads"),
    [(1, 4, 1, 4), (2, 4, 2, 4), (3, 64, 4, 4), (13, 4, 1, 4), (13, 5, 2, 4), (12, 1, 4, 4), (9, 3, 1, 1)],
)
def test_outputs_states_and_every_gradient(time: int, chunk: int, groups: int, heads: int) -> None:
    model = mixer(groups, chunk, heads)
    u = inputs(time).requires_grad_()
    state = model.new_state(2)
    y = model(u, state)
    expected, memory = mamba2_by_steps(model, u)
    assert_near(y, expected)
    for name, tensor in memory.items():
        assert_near(state[name], tensor)
    wanted = [u, *model.parameters()]
    weight = torch.randn_like(y)
    fast = torch.autograd.grad(y, wanted, weight, retain_graph=True)
    slow = torch.autograd.grad(expected, wanted, weight)
    names = ["u", *dict(model.named_parameters())]
    for name, ours, theirs in zip(names, fast, slow, strict=True):
        assert (ours - theirs).norm() <= 1e-12 * theirs.norm(), name


def test_parameters_have_the_official_names_and_shapes() -> None:
    made = Mamba2Mixer(6, 4, 3, 5, groups=2)
    assert {name: tuple(p.shape) for name, p in made.state_dict().items()} == {
        "in_proj.weight": (2 * 12 + 2 * 10 + 4, 6),
        "conv.weight": (12 + 2 * 10, 1, 4),
        "conv.bias": (32,),
        "dt_bias": (4,),
        "A_log": (4,),
        "D": (4,),
        "norm.weight": (12,),
        "out_proj.weight": (6, 12),
    }


def test_initial_values() -> None:
    torch.manual_seed(0)
    made = Mamba2Mixer(8, 400, 1, 2)
    steps = F.softplus(made.dt_bias)
    assert 0.000999 < steps.min() < 0.0012
    assert 0.085 < steps.max() < 0.1001
    assert abs(steps.log10().mean() + 2) < 0.1, "log-uniform: the middle is 0.01"
    rates = made.A_log.exp()
    assert 1 <= rates.min() < 1.2
    assert 15.8 < rates.max() <= 16
    assert abs(rates.mean() - 8.5) < 0.7
    assert torch.equal(made.D, torch.ones(400))
    assert torch.equal(made.norm.weight, torch.ones(400))


def test_the_convolution_is_causal_and_its_step_the_same() -> None:
    model = mixer()
    columns = torch.randn(2, 3 + 6, model.columns, dtype=torch.float64)
    whole = model._convolve(columns)
    assert_near(whole, model.conv(columns.mT).mT)
    steps = [model._convolve(columns[:, t : t + 4]) for t in range(6)]
    assert_near(torch.cat(steps, 1), whole)
    own = columns[:, 3:] * model.conv.weight[:, 0, 3]
    before = sum(columns[:, k : k + 6] * model.conv.weight[:, 0, k] for k in range(3))
    assert model.conv.bias is not None
    assert_near(whole, own + before + model.conv.bias)


def test_a_later_token_changes_no_earlier_output() -> None:
    model, u = mixer(), inputs(10)
    changed = u.clone()
    changed[:, 6] += 1
    assert torch.equal(model(u)[:, :4], model(changed)[:, :4])  # other chunks: the same arithmetic
    assert_near(model(u)[:, :6], model(changed)[:, :6])
    assert (model(u) - model(changed))[:, 6:].abs().amin((0, 2)).min() > 0


@pytest.mark.parametrize("groups", [1, 3])
def test_the_norm_comes_after_the_gate_and_knows_groups(groups: int) -> None:
    torch.manual_seed(0)
    norm = GatedNorm(6, groups).double()
    torch.nn.init.normal_(norm.weight)
    y, z = torch.randn(2, 4, 6, dtype=torch.float64).unbind()
    gated = (y * z * torch.sigmoid(z)).view(4, groups, -1)
    scale = (gated.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert_near(norm(y, z), (gated * scale).view(4, 6) * norm.weight)


def test_huge_steps_and_silent_inputs_have_finite_gradients() -> None:
    model = Mamba2Mixer(6, 2, 3, 4, chunk=16)
    with torch.no_grad():
        model.dt_bias.copy_(torch.tensor([1e4, -1e4]))
    for u in (torch.zeros(1, 40, 6), 1e3 * torch.randn(1, 40, 6)):
        gradients = torch.autograd.grad(model(u).square().sum(), list(model.parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_hugging_face_agrees_for_one_group() -> None:
    """Its path without kernels is float32, whatever the parameters are."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as Peer

    config = transformers.Mamba2Config(
        hidden_size=16,
        num_heads=4,
        head_dim=8,
        expand=2,
        state_size=6,
        n_groups=1,
        chunk_size=8,
        conv_kernel=4,
    )
    torch.manual_seed(0)
    peer, ours = Peer(config, layer_idx=0), Mamba2Mixer(16, 4, 8, 6, chunk=5)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ours.load_state_dict({name.replace("conv1d", "conv"): p for name, p in peer.state_dict().items()})
    u = torch.randn(2, 21, 16, requires_grad=True)
    answer, expected = ours(u), peer(u)
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(answer)
    mine = torch.autograd.grad(answer, [u, *ours.parameters()], weight)
    names = [name.replace("conv", "conv1d") for name, _ in ours.named_parameters()]
    others = dict(peer.named_parameters())
    theirs = torch.autograd.grad(expected, [u, *(others[name] for name in names)], weight)
    for left, right in zip(mine, theirs, strict=True):
        assert (left - right).norm() <= 1e-5 * right.norm()
