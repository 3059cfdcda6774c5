"""Parts: which weights a layer and a head own, and λ̂ of each with one γ."""

import pytest
import torch
from torch import nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.singular.langevin import Langevin
from topograd.geometry.singular.parts import Part, head_parts, layer_parts, part_coefficients
from topograd.nn.gpt import GPT


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=4, width=8, heads=2, vocab=16, context=8)


def test_layers_are_evenly_spaced() -> None:
    names = [part.name for part in layer_parts(gpt())]
    assert names == [f"layers.{i}" for i in range(4)]
    assert [part.name for part in layer_parts(gpt(), 2)] == ["layers.0", "layers.3"]
    assert [part.name for part in layer_parts(gpt(), 1)] == ["layers.0"]
    assert len(layer_parts(gpt(), 9)) == 4
    with refused(GeometryError, setting="layers"):
        layer_parts(gpt(), 0)


def test_heads_share_out_the_projections() -> None:
    model = gpt()
    heads = head_parts(model, "layers.1")
    assert [head.name for head in heads] == [f"layers.1.attention.head.{i}" for i in range(2)]
    for name in heads[0].masks:
        total = torch.stack([head.masks[name] for head in heads]).sum(0)
        assert torch.equal(total, torch.ones_like(model.get_parameter(name)))
    assert heads[0].masks["layers.1.attention.query.weight"][:4].all()
    assert heads[0].masks["layers.1.attention.output.weight"][:, :4].all()
    with refused(GeometryError, setting="heads"):
        head_parts(nn.ModuleDict({"a": nn.Linear(2, 2)}), "a")


def test_a_head_does_not_act_through_what_others_own() -> None:
    """Without its own entries the head adds nothing: the other's outputs stay."""
    model = gpt().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    first = head_parts(model, "layers.0")[0]
    attention = model.get_submodule("layers.0.attention")
    seen = []
    attention.get_submodule("output").register_forward_hook(lambda module, args, out: seen.append(args[0]))
    ids = torch.arange(8)[None]
    model(ids)
    with torch.no_grad():
        for name, mask in first.masks.items():
            model.get_parameter(name).mul_(1 - mask)
    model(ids)
    before, after = seen
    assert torch.equal(before[..., 4:], after[..., 4:])
    assert not after[..., :4].any()


def test_groups_share_keys_and_values() -> None:
    class Grouped(nn.Module):
        head_dim = 2

        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)
            self.k_proj, self.v_proj = nn.Linear(8, 4), nn.Linear(8, 4)

    heads = head_parts(nn.ModuleDict({"a": Grouped()}), "a")
    keys = [head.masks["a.k_proj.weight"][:, 0].tolist() for head in heads]
    assert keys == [[1, 1, 0, 0]] * 2 + [[0, 0, 1, 1]] * 2
    assert heads[3].masks["a.q_proj.bias"].tolist() == [0.0] * 6 + [1.0] * 2


def test_parts_have_one_localization_and_arrive() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    x = torch.randn(300, 3).double()
    parts = [Part("0", ("0",)), Part("1", ("1",))]
    seen: list[tuple[int, int]] = []
    with torch.no_grad():
        y = model(x)
    settings = Langevin(burn_in=100, draws=40, thin=3, chains=3)
    every = part_coefficients(
        model, "squared-error", [(x, y)], parts, settings, on_step=lambda *now: seen.append(now)
    )
    found = list(every)
    assert len({one.localization for one in found}) == 1
    assert found[0].localization > 1
    assert seen[-1] == (2 * 3 * 220, 2 * 3 * 220)
    first, second = (one.found for one in found)
    assert first is not None
    assert second is not None
    assert first.virial == pytest.approx(1, abs=0.3), "the chains have arrived"
    assert second.virial == pytest.approx(1, abs=0.3)
    H = torch.kron(model.get_parameter("1.weight").T @ model.get_parameter("1.weight"), x.T @ x / 300)
    sharp = first.n_beta * torch.linalg.eigvalsh(H.detach())
    expected = float((sharp / (sharp + found[0].localization)).sum()) / 2
    assert first.value == pytest.approx(expected, abs=0.5), "½ nβH / (nβH + γ) for each direction"
    assert first.weights == 6
