"""The networks behind the probe: frames, heads and blocks against plain linear algebra."""

import pytest
import torch
import torch.nn.functional as F

from topograd.geometry.catalogue import Attention, Chain
from topograd.geometry.catalogue.networks import _frames, _weight, layer_norm, rms_norm, trace_chain
from topograd.geometry.catalogue.networks_blocks import attend, trace_attention

T = torch.tensor([1e-2, 0.3, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("chain", [Chain(4, widths=(10, 7, 5, 9, 6)), Chain(3, rotation=0.4)])
def test_weights_hand_the_dead_direction_on(chain: Chain) -> None:
    frames = _frames(chain, T, 0)
    for layer in range(1, chain.depth + 1):
        W, E, below = _weight(chain, layer, frames, T, 0), frames[layer].shared, frames[layer - 1].shared
        core = torch.diag_embed(torch.cat((torch.ones(3, chain.rank - 1).double(), T[:, None]), 1))
        assert torch.allclose(W @ below, E @ core, atol=1e-14)
        assert torch.linalg.matrix_rank(W[0]) == min(W.shape[1:]), "the complement has full rank"
    assert trace_chain(chain, T, 20, 0).alignment_error < 1e-10


def test_a_rotated_nonlinear_chain_is_read_at_its_units_and_not_aligned() -> None:
    assert trace_chain(Chain(3, activation="gelu", rotation=0.1), T, 20, 0).alignment_error > 0.4
    assert trace_chain(Chain(3, activation="gelu"), T, 20, 0).alignment_error == 0


def test_skips_biases_and_norms_are_where_they_should_be() -> None:
    chain = Chain(3, 4, "tanh", skips=((1, 3),), bias=1)
    trace = trace_chain(chain, T, 5, 0)
    W = torch.diag(torch.tensor([1, 1, 1, 0.3], dtype=torch.float64))
    b = torch.tensor([0, 0, 0, 0.3], dtype=torch.float64)
    h1 = torch.tanh(trace.forward["A_0"].at[1] @ W + b)
    h2 = torch.tanh(h1 @ W + b)
    assert torch.allclose(trace.outputs[1], h2 @ W + b + h1)
    normed = trace_chain(Chain(3, 4, norm="layernorm", norm_at=(2,)), T, 5, 0)
    assert torch.allclose(normed.forward["A_2"].at, layer_norm(normed.backward["G_2"].at))


def test_norms_agree_with_torch() -> None:
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).double()
    assert torch.allclose(layer_norm(x), F.layer_norm(x, (6,), eps=0.0))
    assert torch.allclose(rms_norm(x), F.rms_norm(x, (6,), eps=0.0))


def test_a_simplex_head_has_no_common_shift() -> None:
    square = trace_chain(Chain(2, 5, loss="cross-entropy", head="square"), T, 9, 0).outputs
    simplex = trace_chain(Chain(2, 5, loss="cross-entropy"), T, 9, 0).outputs
    assert simplex.shape == (3, 9, 6)
    assert simplex.sum(-1).abs().max() < 1e-13
    assert torch.allclose(simplex.norm(dim=-1), square.norm(dim=-1)), "an isometry"


@pytest.mark.parametrize(("heads", "causal"), [(1, False), (2, True)])
def test_attention_agrees_with_torch(heads: int, causal: bool) -> None:
    x = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0)).double()
    parts = attend(x, T, heads, causal)
    for i, t in enumerate(T):
        y = x[i] @ torch.diag(torch.cat((torch.ones(7).double(), t[None])))
        split = y.unflatten(-1, (heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(split, split, split, is_causal=causal)
        expected = mixed.transpose(1, 2).flatten(-2)
        expected[..., -1] *= t
        assert torch.allclose(parts["O"][i], expected)


def test_wirings_differ_by_the_stream_and_the_norm() -> None:
    chain, residual, normed = (
        trace_attention(Attention(1, wiring=wiring), T, 3, 0) for wiring in ("chain", "residual", "pre-norm")
    )
    x = chain.backward["input gradient"].at
    assert torch.allclose(residual.outputs, chain.outputs + x)
    assert torch.allclose(normed.outputs, attend(layer_norm(x), T)["O"] + x)
