"""The blocks behind the probe: attention against torch's, dead channels, wirings."""

import pytest
import torch
import torch.nn.functional as F

from papers.dead_directions.catalogue.networks import layer_norm
from papers.dead_directions.catalogue.networks_blocks import Maps, attend, trace_attention
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.rules import Attention

T = torch.tensor([1e-2, 0.3, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(("heads", "causal"), [(1, False), (2, True)])
def test_attention_agrees_with_torch(heads: int, causal: bool) -> None:
    x = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0)).double()
    parts = attend(x, Maps(T, 8, 0), heads, causal)
    again = Maps(T, 8, 0)
    weights = [again.draw() for _ in range(4)]
    for i in range(len(T)):
        q, k, v = ((x[i] @ W[i].mT).unflatten(-1, (heads, -1)).transpose(1, 2) for W in weights[:3])
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert torch.allclose(parts["O"][i], mixed.transpose(1, 2).flatten(-2) @ weights[3][i].mT)


def test_keys_may_share_the_weight_of_the_queries() -> None:
    x = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0)).double()
    own, shared = (attend(x, Maps(T, 8, 0), shared=shared) for shared in (False, True))
    assert torch.equal(shared["Q"], shared["K"])
    assert torch.equal(shared["Q"], own["Q"])
    assert not torch.allclose(own["Q"], own["K"])


def test_every_head_may_have_a_dead_channel() -> None:
    net = Attention(1, 8, heads=2, powers=(1, 3))
    assert net.dead == {3: 1, 7: 3}
    W = Maps(T, 8, 0, net.dead).draw()
    for place, power in net.dead.items():
        row = torch.zeros(3, 8, dtype=T.dtype)
        row[:, place] = T**power
        assert torch.equal(W[:, place], row)
        assert torch.equal(W[:, :, place], row)
    readings = trace_attention(net, T, 3, 0).backward
    assert {name for name in readings if name.startswith("Q")} == {"Q_1[1]", "Q_1[2]"}
    assert readings["Q_1[1]"].along.nonzero().tolist() == [[3]]
    with refused(GeometryError, setting="powers"):
        Attention(1, 8, heads=2, powers=(1,))


def test_wirings_differ_by_the_stream_and_the_norm() -> None:
    chain, residual, normed = (
        trace_attention(Attention(1, wiring=wiring), T, 3, 0) for wiring in ("chain", "residual", "pre-norm")
    )
    x = chain.backward["input gradient"].at
    assert torch.allclose(residual.outputs, chain.outputs + x)
    assert torch.allclose(normed.outputs, attend(layer_norm(x), Maps(T, 16, 0))["O"] + x)
