"""The chains behind the probe: frames, norms and heads against plain linear algebra."""

import pytest
import torch
import torch.nn.functional as F

from papers.dead_directions.catalogue.networks import _frames, _weight, layer_norm, rms_norm, trace_chain
from topograd.geometry.rules import Chain

T = torch.tensor([1e-2, 0.3, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("chain", [Chain(4, widths=(10, 7, 5, 9, 6)), Chain(3, rotation=0.4)])
def test_weights_hand_the_dead_direction_on(chain: Chain) -> None:
    frames = _frames(chain, T, 0)
    for layer in range(1, chain.depth + 1):
        W, E, below = _weight(chain, layer, frames, T, 0), frames[layer].shared, frames[layer - 1].shared
        core = E.mT @ W @ below
        assert torch.allclose(W @ below, E @ core, atol=1e-14), "the shared subspace stays"
        dead = torch.zeros(3, chain.rank, dtype=T.dtype)
        dead[:, -1] = T
        assert torch.allclose(core[:, -1], dead, atol=1e-14)
        assert torch.allclose(core[:, :, -1], dead, atol=1e-14)
        live = torch.linalg.svdvals(core[:, :-1, :-1])
        assert torch.allclose(live.aminmax(dim=-1).max, torch.tensor(1.3, dtype=T.dtype))
        assert core[0, :-1, :-1].abs().min() > 1e-6, "every live unit hears every other"
        assert torch.linalg.matrix_rank(W[0]) == min(W.shape[1:]), "the complement has full rank"
    assert trace_chain(chain, T, 20, 0).alignment_error < 1e-10


def test_a_rotated_nonlinear_chain_is_read_at_its_units_and_not_aligned() -> None:
    assert trace_chain(Chain(3, activation="gelu", rotation=0.1), T, 20, 0).alignment_error > 0.4
    assert trace_chain(Chain(3, activation="gelu"), T, 20, 0).alignment_error == 0


def test_skips_biases_and_norms_are_where_they_should_be() -> None:
    chain = Chain(3, 4, "tanh", skips=((1, 3),), bias=1, live="identity")
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
