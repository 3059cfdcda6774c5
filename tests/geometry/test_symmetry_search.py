"""The search: what it finds in known networks, and that an optimizer's gauges lie within."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from topograd.geometry import symmetry_search
from topograd.geometry.paths import Replaced
from topograd.geometry.symmetries import ChannelScale, HeadShift, Mixing, Shift, without_symmetries
from topograd.geometry.symmetry_search import FoundSymmetries, find_symmetries
from topograd.nn.gpt import GPT
from topograd.optim import find_gauges


def search(model: nn.Module, inputs: Tensor, softmax: bool = True) -> FoundSymmetries:
    network = Replaced(model)
    with torch.no_grad():
        return find_symmetries(model, lambda moved: network(moved, inputs), softmax=softmax)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 20}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    found: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
    return found.double().eval()


def test_linear_maps_mix_wholly_and_rectified_ones_by_unit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3)
    ).double()
    found = search(model, torch.randn(6, 4).double()).symmetries
    mixings = {one.producer: one.size for one in found if isinstance(one, Mixing)}
    assert mixings == {"0.weight": 6, "1.weight": 1}, "and nothing goes through a GELU"
    assert {one.weight for one in found if isinstance(one, Shift)} == {"5.weight", "5.bias"}
    assert not [one for one in search(model, torch.randn(6, 4).double(), False).symmetries if "5" in str(one)]


def test_weights_of_zero_and_diagonal_ones_have_no_more_symmetries_than_others() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))).double()
    for linear in model:
        linear.weight.data = torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0]).double())
    found = search(model, torch.randn(6, 4).double(), softmax=False).symmetries
    assert [(one.names, one.size) for one in found if isinstance(one, Mixing)] == [
        (("0.weight", "1.weight"), 4),
        (("1.weight", "2.weight"), 4),
    ]


def test_a_llama_has_heads_rotations_units_channels_and_a_shift() -> None:
    model = llama()
    found = search(model, torch.arange(8)[None] % 20).symmetries
    first = {one.producer.rpartition("layers.0.")[2]: one for one in found if isinstance(one, Mixing)}
    assert first["self_attn.v_proj.weight"].group == "GL(4) for each block", "grouped heads share one"
    assert first["self_attn.k_proj.weight"].form == "half", "a rotation of positions is in between"
    assert first["mlp.up_proj.weight"].size == 1
    assert len([one for one in found if isinstance(one, Mixing)]) == 6
    assert len([one for one in found if isinstance(one, ChannelScale)]) == 5
    assert [one.weight for one in found if isinstance(one, Shift)] == ["lm_head.weight"]


def exhaustive(model: nn.Module, inputs: Tensor, monkeypatch: pytest.MonkeyPatch) -> FoundSymmetries:
    """Every pair in every way, and one by one."""
    search_class = symmetry_search._Search
    together = search_class.confirmed
    with monkeypatch.context() as patched:
        patched.setattr(search_class, "_idle", lambda self, pair: False)
        patched.setattr(
            search_class,
            "confirmed",
            lambda self, every: [it for one in every for it in together(self, [one])],
        )
        return search(model, inputs)


def test_pairs_that_are_left_out_have_nothing_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ids = torch.arange(8)[None] % 20
    tied: Any = llama()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    square = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    for model, inputs in ((tied, ids), (square, torch.randn(6, 4).double())):
        found = search(model, inputs)
        assert found == exhaustive(model, inputs, monkeypatch)
        assert len(found.symmetries) > 2


def test_every_gauge_of_an_optimizer_lies_along_the_tangents() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 5)).double()
    inputs = torch.randn(6, 4).double()
    nn.init.normal_(model[2].weight)  # type: ignore[arg-type]
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = search(model, inputs).symmetries
    gauges = find_gauges(model, inputs).gauges
    assert gauges
    for gauge in gauges:
        moved = gauge.act(parameters, 1e-6 * gauge.element(parameters, torch.Generator().manual_seed(0)))
        step = {name: (moved[name] - parameters[name]) for name in moved}
        assert without_symmetries(step, found, parameters)[1] > 1 - 1e-6, gauge


def test_bert_has_full_heads_and_shifts_before_its_norms() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**shape, vocab_size=20)).double().eval()
    network = Replaced(model, lambda m, x: m(input_ids=x).last_hidden_state)
    with torch.no_grad():
        found = find_symmetries(model, lambda moved: network(moved, torch.arange(8)[None]), softmax=False)
    mixings = [one for one in found.symmetries if isinstance(one, Mixing)]
    sizes = {one.producer.rpartition(".self.")[2]: one.size for one in mixings}
    assert sizes == {"query.weight": 4, "value.weight": 4}
    shifts = {one.weight for one in found.symmetries if isinstance(one, Shift)}
    maps = [f"encoder.layer.0.{name}output.dense" for name in ("attention.", "")]
    assert shifts == {f"{name}.{kind}" for name in maps for kind in ("weight", "bias")}


def test_matrices_the_other_way_and_squared_units_are_found() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 20, "activation_function": "relu"}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).double().eval()
    found = search(model, torch.arange(8)[None]).symmetries
    mixings = [one for one in found if isinstance(one, Mixing)]
    assert [one.producer for one in mixings] == [f"transformer.h.{layer}.mlp.c_fc.weight" for layer in (0, 1)]
    assert all(one.turned and one.size == 1 and one.bias is not None for one in mixings)
    assert [one.dim for one in found if isinstance(one, ChannelScale)] == [0] * 4
    squared = GPT(layers=2, width=8, heads=2, vocab=20, context=8).double()
    units = [one for one in search(squared, torch.arange(8)[None]).symmetries if isinstance(one, Mixing)]
    assert {one.producer: one.degree for one in units} == {
        "layers.0.mlp.up.weight": 2,
        "layers.1.mlp.up.weight": 2,
        "layers.0.attention.value.weight": 1,
    }


class Mixed(nn.Module):
    """Units that a fixed matrix mixes share one factor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("between", torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)) @ self.get_buffer("between"))


def test_units_that_are_mixed_have_one_factor() -> None:
    """Not one for each of a few blocks, whatever signs a group element draws."""
    torch.manual_seed(0)
    (found,) = search(Mixed().double(), torch.randn(6, 4).double(), softmax=False).symmetries
    assert found == Mixing("up.weight", "down.weight", 6, "scalar", bias="up.bias")
    assert found.group == "a factor for each block of 6"


def test_stages_share_a_head_and_may_read_one_another_through_modules() -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, width=8, heads=2, vocab=20, context=8).double()
    model.add_heads(range(2))
    stages = ("head.deltas.0.weight", "head.deltas.1.weight")
    found = search(model, torch.arange(8)[None]).symmetries
    assert [one for one in found if isinstance(one, HeadShift)] == [HeadShift("head.weight", stages)]
    inner = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
    nested = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), inner, nn.Linear(4, 3)).double()
    pairs = [one.names[:2] for one in search(nested, torch.randn(6, 3).double(), False).symmetries]
    assert pairs == [("0.weight", "2.0.weight"), ("2.0.weight", "3.weight")]


def test_likely_ones_that_do_not_hold_are_listed() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 5), nn.LayerNorm(5)).double()
    missed = search(model, torch.randn(6, 4).double(), softmax=False).unconfirmed
    assert missed == (Mixing("0.weight", "2.weight", bias="0.bias"),)


def test_what_was_not_tried_is_named() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20)
    )
    notes = search(model.double().eval(), torch.arange(8)[None]).notes
    assert any("c_attn" in note for note in notes)
    conv = nn.Sequential(nn.Conv1d(2, 3, 1), nn.Flatten(), nn.Linear(12, 2)).double()
    assert "convolutions" in search(conv, torch.randn(3, 2, 4).double()).notes[0]
