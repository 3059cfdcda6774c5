"""Freeze-probes: the closed rules are those of the min-plus pass, and both are measured."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.freeze_probe import ProbedLayer, freeze_probe, named_channels
from topograd.geometry.rules import Attention, Chain, predict


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def check(found: list[ProbedLayer]) -> dict[str, float | None]:
    """What was predicted, layer by layer, once it is what was measured."""
    assert found
    for layer in found:
        for one in (layer.whole, layer.inputs, layer.gradients):
            if one is not None and one.predicted is not None:
                assert one.measured == pytest.approx(one.predicted, abs=0.02), (layer.name, one)
            elif one is not None:
                assert one.measured is None
    return {layer.name: layer.whole.predicted for layer in found}


@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU, nn.Identity])
def test_the_ladder_of_a_chain(activation: type[nn.Module]) -> None:
    torch.manual_seed(0)
    parts = [part for _ in range(4) for part in (nn.Linear(6, 6), activation())]
    found = freeze_probe(nn.Sequential(*parts[:-1]), numbers(9, 6), "0.5,2.5,4.5")
    check(found)
    said = {p.node: p.slope for p in predict(Chain(4))}
    for place, layer in enumerate(found, 1):
        assert layer.whole.predicted == said[f"product_{place}"]
        if layer.gradients is not None:
            assert layer.gradients.predicted == said[f"G_{place}"]


class Attend(nn.Module):
    """One attention block of plain maps; heads may share keys and values, and be turned by position."""

    def __init__(self, groups: int = 2, rotary: bool = False) -> None:
        super().__init__()
        self.head_dim, self.rotary = 4, rotary
        self.q_proj, self.o_proj = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(8, 4 * groups, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in maps)
        if self.rotary:
            q, k = turned(q), turned(k)
        made = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(made.transpose(1, 2).flatten(2))


def turned(x: Tensor) -> Tensor:
    """Channels i and i + 2 of every head by the angle of the position."""
    angles = torch.arange(x.shape[-2]).double()[:, None] * torch.tensor([1.0, 0.4]).double()
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


@pytest.mark.parametrize(
    ("groups", "rotary", "wide", "narrow", "rule"),
    [
        (2, False, (7,), (7,), Attention(3)),
        (1, False, (3, 7), (3,), Attention(3, 12, heads=4, kv_heads=2)),
        (2, True, (5, 7), (5, 7), Attention(3, positions="rope")),
        (2, True, (7,), (7,), Attention(3, positions="rope-single")),
    ],
)
def test_chains_of_attention_follow_the_closed_rules(
    groups: int, rotary: bool, wide: tuple[int, ...], narrow: tuple[int, ...], rule: Attention
) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(Attend(groups, rotary) for _ in range(3)))
    for parameter in model.parameters():
        nn.init.orthogonal_(parameter)
    units = [f"{name}.{j}" for name in ("q_proj", "o_proj") for j in wide]
    units += [f"{name}.{j}" for name in ("k_proj", "v_proj") for j in narrow]
    found = {layer.name: layer for layer in freeze_probe(model, numbers(4, 5, 8), ",".join(units))}
    for said in predict(rule):
        part, _, place = said.node.partition("_")
        if part in "QKVO":
            one = found[f"{int(place) - 1}.{part.lower()}_proj"].gradients
            assert one is not None
            assert one.predicted == said.slope, said.node
            assert one.measured == pytest.approx(said.slope, abs=0.05), said.node


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "vocab_size": 17,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("mlp.0", {"gate_proj": 4, "up_proj": 4, "down_proj": 4}),
        ("self_attn.1", {"q_proj": 6, "k_proj": 6, "v_proj": 2, "o_proj": 2}),
        ("layers.1.mlp.0,v_proj.1", {"v_proj": 2, "o_proj": 2, "gate_proj": 4, "up_proj": 4, "down_proj": 4}),
    ],
)
def test_a_llama_with_shared_keys_rotary_pairs_and_gates(unit: str, expected: dict[str, float]) -> None:
    said = check(freeze_probe(llama(), torch.arange(8)[None], unit))
    assert {name.rsplit(".", 1)[1]: power for name, power in said.items()} == expected
    assert len(said) == (7 if "layers.1" in unit else 2 * len(expected))


def test_the_stream_of_a_llama_with_a_unit_of_its_mlps() -> None:
    """Maps with dead rows and columns have both, and norms between them keep the channel dead."""
    said = check(freeze_probe(llama(), torch.arange(8)[None], "embed_tokens.3,o_proj.3,down_proj.3,mlp.0"))
    assert said["model.layers.1.mlp.gate_proj"] == 10
    assert said["model.embed_tokens"] == said["lm_head"] == 2


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.inner, self.outer = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.inner(self.first(x)), inplace=True)
        return F.relu(x + self.outer(self.second(inner)))


def test_a_residual_network_of_convolutions() -> None:
    torch.manual_seed(0)
    stem, pool = nn.Conv2d(3, 4, 3, stride=2), nn.MaxPool2d(2, 1)
    blocks = nn.Sequential(
        stem, pool, Residual(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )
    for module in blocks.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.randn(4)
            nn.init.normal_(module.bias)
    said = check(freeze_probe(blocks.eval(), numbers(2, 3, 12, 12), "first.2"))
    assert said == {"2.first": 2, "2.second": 2, "3.first": 2, "3.second": 2}
    stream = check(freeze_probe(blocks, numbers(2, 3, 12, 12), "0.1,second.1"))
    assert stream["6"] == 2
    assert stream["2.first"] == stream["0"] == 2


def test_a_unit_without_a_reader_that_never_opens_is_exactly_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model.get_parameter("0.weight")[1], model.get_parameter("0.bias")[1] = 0.0, -1.0
    (layer,) = freeze_probe(model, numbers(6, 3), "0.1")
    assert layer.whole.predicted is None
    assert layer.whole.measured is None
    assert layer.whole.reason


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    freeze_probe(model, numbers(6, 3), "0.1")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert model[0].weight.requires_grad


@pytest.mark.parametrize("unit", ["mlp", "nothing.1", "0.7", "0.-1", "1.0", "", "0.1,2.9"])
def test_units_that_are_none(unit: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with refused(GeometryError, setting="unit"):
        named_channels(model, unit)
