"""What is found on small networks of every kind, what is not, and that each thing found holds."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

from raising import refused
from topograd.convert.families import stack_of
from topograd.errors import OptimError
from topograd.geometry.symmetry_search import TOLERANCE
from topograd.nn.gpt import GPT
from topograd.optim import DDCAdam, find_gauges
from topograd.optim.discovery import Found, SetAside, _Choice
from topograd.optim.gauges import (
    CEShiftBias,
    CEShiftRowShift,
    ChainedReLURescale,
    Gauge,
    HeadShift,
    LNScale,
    ReLURescale,
)


class Functional(nn.Module):
    """ReLU² and ReLU that are no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.second(F.relu(self.first(x)).square())))


def filled(model: nn.Module) -> Any:
    """The model with random numbers where it starts at zero, as after some training."""
    torch.manual_seed(1)
    for tensor in model.parameters():
        if not tensor.any():
            nn.init.normal_(tensor, std=0.1)
    return model


def gpt(heads: int = 0, **settings: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(layers=2, width=8, heads=2, vocab=11, context=8, **settings)
    model.add_heads(range(heads))
    return model


def llama(kv_heads: int = 2, **settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": kv_heads, "vocab_size": 11}
    return LlamaForCausalLM(LlamaConfig(**sizes, **settings))


def gpt2(**settings: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, **settings))


def mlp(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return nn.Sequential(*layers)


def relu_mlp() -> nn.Sequential:
    return mlp(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))


def mlp_pair(layer: int, degree: float = 2.0) -> ReLURescale:
    return ReLURescale(f"layers.{layer}.mlp.up.weight", f"layers.{layer}.mlp.down.weight", degree=degree)


def values(layer: int) -> ReLURescale:
    path = f"layers.{layer}.attention"
    return ReLURescale(f"{path}.value.weight", f"{path}.output.weight")


def reasons(found: Found, words: str) -> list[str]:
    """Why things that are called so are undecided."""
    return [one.reason for one in found.undecided if words in one.what]


MODELS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: filled(gpt()),
    "gpt swiglu": lambda: filled(gpt(mlp="swiglu")),
    "gpt heads": lambda: filled(gpt(heads=2)),
    "mamba": lambda: filled(gpt(architecture="mamba2")),
    "hybrid": lambda: filled(gpt(architecture="hybrid")),
    "llama": llama,
    "llama grouped": lambda: llama(kv_heads=1),
    "stack of a llama": lambda: stack_of(llama()),
    "gpt2": gpt2,
    "mlp": relu_mlp,
    "functional": Functional,
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_found_holds_and_an_optimizer_takes_it(name: str) -> None:
    model = MODELS[name]()
    before = copy.deepcopy(model.state_dict())
    mode, random = model.training, torch.get_rng_state()
    found = find_gauges(model)
    assert torch.equal(random, torch.get_rng_state())
    assert model.training == mode
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert found.gauges
    DDCAdam(model.named_parameters(), found.gauges)  # disjoint, present, with norms
    for gauge in found.gauges:
        if not isinstance(gauge, HeadShift):  # whose stages one output does not show
            assert gauge.residual(model, seed=3) <= TOLERANCE
    for one in found.set_aside:
        assert set(one.gauge.names) & set(one.preferred.names)
        assert one.preferred in found.gauges
    assert all(one.residual > TOLERANCE for one in found.rejected)


def test_a_gpt_has_squared_relus_values_and_a_head() -> None:
    found = find_gauges(filled(gpt()))
    assert found.gauges == (mlp_pair(0), mlp_pair(1), values(0), CEShiftRowShift("head.weight"))
    (rejected,) = found.rejected  # the last layer adds an embedding to its values
    assert rejected.gauge == values(1)
    assert rejected.residual > 1e-3
    (why, _) = reasons(found, "attention.query")
    assert why.startswith("the size of 'layers.0.attention.query.weight' does not show: a norm takes it out")
    assert "an invertible matrix for each head" in reasons(found, "attention")[0]


def test_what_starts_at_zero_is_undecided_with_a_remedy() -> None:
    found = find_gauges(gpt())
    assert found.gauges == (CEShiftRowShift("head.weight"),)
    (why,) = reasons(found, "layers.0.mlp")
    assert why.startswith("it holds, but 'layers.0.mlp.down.weight' has norm zero")
    assert why.endswith("look again after some steps without it")


def test_swiglu_rescales_its_linear_half() -> None:
    found = find_gauges(filled(gpt(mlp="swiglu", value_embeddings="none")))
    wanted = (mlp_pair(0, 1.0), mlp_pair(1, 1.0), values(0), values(1), CEShiftRowShift("head.weight"))
    assert found.gauges == wanted
    llama_found = find_gauges(llama())
    gates = [one.gauge.names[0] for one in llama_found.rejected]
    assert gates == [f"model.layers.{layer}.mlp.gate_proj.weight" for layer in range(2)]


def test_heads_of_stages_shift_together() -> None:
    deltas = ["head.deltas.0.weight", "head.deltas.1.weight"]
    assert find_gauges(gpt(heads=2)).gauges == (HeadShift("head.weight", deltas, rows=True),)
    capped = find_gauges(gpt(heads=2, softcap=15.0))
    assert capped.gauges == (HeadShift("head.weight", deltas),)
    assert capped.rejected[0].gauge == HeadShift("head.weight", deltas, rows=True)


def test_heads_of_low_rank_are_undecided() -> None:
    found = find_gauges(gpt(heads=2, head_rank=2))
    assert not any(isinstance(gauge, HeadShift) for gauge in found.gauges)
    assert "low rank" in reasons(found, "per-stage heads")[0]


@pytest.mark.parametrize(
    ("settings", "name"), [({"softcap": 15.0}, "head.weight"), ({"tied": True}, "embedding.weight")]
)
def test_a_cap_or_a_tie_breaks_the_head_shift(settings: dict[str, Any], name: str) -> None:
    found = find_gauges(gpt(**settings))
    assert found.gauges == ()
    residual = {one.gauge: one.residual for one in found.rejected}[CEShiftRowShift(name)]
    assert residual > 1e-5


def test_a_gated_norm_of_mamba_scales_its_reader() -> None:
    found = find_gauges(filled(gpt(architecture="mamba2")))
    scales = [f"layers.{layer}.mixer.norm.weight" for layer in range(2)]
    readers = [f"layers.{layer}.mixer.out_proj.weight" for layer in range(2)]
    assert found.gauges[:2] == tuple(map(LNScale, scales, readers))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_llama_has_its_gains(kv_heads: int) -> None:
    found = find_gauges(llama(kv_heads))
    wanted: list[Gauge] = []
    for layer in range(2):
        path = f"model.layers.{layer}"
        heard = [f"{path}.self_attn.{name}_proj.weight" for name in "qkv"]
        wanted.append(LNScale(f"{path}.input_layernorm.weight", heard))
        heard = [f"{path}.mlp.{name}_proj.weight" for name in ("gate", "up")]
        wanted.append(LNScale(f"{path}.post_attention_layernorm.weight", heard))
    assert found.gauges == (*wanted, LNScale("model.norm.weight", "lm_head.weight"))
    aside = [one.gauge for one in found.set_aside]
    path = "model.layers.1.self_attn"
    assert ReLURescale("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight") in aside
    assert ReLURescale(f"{path}.q_proj.weight", f"{path}.k_proj.weight") in aside
    assert (ReLURescale(f"{path}.v_proj.weight", f"{path}.o_proj.weight") in aside) == (kv_heads == 2)
    assert len(reasons(found, "v_proj")) == (0 if kv_heads == 2 else 2)  # grouped: shapes do not pair
    assert CEShiftRowShift("lm_head.weight") in aside


def test_norms_of_queries_and_keys_make_their_sizes_invisible() -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "head_dim": 4}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 11, "pad_token_id": 0}
    found = find_gauges(Qwen3(Qwen3Config(**sizes, rms_norm_eps=1e-14)))
    assert "does not show" in reasons(found, "q_proj")[0]
    assert any(isinstance(gauge, LNScale) and len(gauge.readers) == 3 for gauge in found.gauges)
    rounded = find_gauges(Qwen3(Qwen3Config(**sizes, rms_norm_eps=1e-6)))  # whose ε sees sizes after all
    (pair,) = [one for one in rounded.rejected if "q_proj" in one.gauge.names[0]]
    assert TOLERANCE < pair.residual < 1e-2


def test_our_llama_is_as_the_one_it_is_made_of() -> None:
    model = llama(kv_heads=1)
    stack = stack_of(model)
    kinds = [type(gauge) for gauge in find_gauges(stack).gauges]
    assert kinds == [type(gauge) for gauge in find_gauges(model).gauges] == [LNScale] * 5
    stack.add_heads(range(2))
    found = find_gauges(stack)
    assert isinstance(found.gauges[0], HeadShift)
    assert found.set_aside[0].gauge.names[0] == "norm.weight"


def test_gpt2_keeps_its_matrices_the_other_way() -> None:
    found = find_gauges(gpt2())
    assert [(type(gauge), getattr(gauge, "dim", None)) for gauge in found.gauges] == [(LNScale, 0)] * 4
    rejected = {type(one.gauge): one for one in found.rejected}
    assert rejected[CEShiftRowShift].gauge.names == ("transformer.wte.weight",)  # tied
    assert rejected[ReLURescale].residual > 1e-4  # GELU
    assert "one matrix" in reasons(found, "c_attn")[0]
    assert "it was off" in reasons(found, "dropout")[0]
    relu = find_gauges(gpt2(activation_function="relu", tie_word_embeddings=False))
    assert LNScale("transformer.ln_f.weight", "lm_head.weight", bias="transformer.ln_f.bias") in relu.gauges
    assert all(why.startswith("it holds, but") for why in reasons(relu, "mlp.c_fc"))
    assert len(reasons(relu, "mlp.c_fc")) == 2
    assert not any(isinstance(one.gauge, ReLURescale) for one in relu.rejected)


def test_layers_in_a_row_are_one_chain() -> None:
    found = find_gauges(relu_mlp())
    chain = ChainedReLURescale(["0.weight", "2.weight", "4.weight"], ["0.bias", "2.bias"])
    assert found.gauges == (chain, CEShiftBias("4.bias"))
    assert [one.gauge for one in found.set_aside] == [CEShiftRowShift("4.weight")]


def test_functions_between_maps_are_tried_not_read() -> None:
    (chain, _) = find_gauges(Functional()).gauges
    assert isinstance(chain, ChainedReLURescale)
    assert chain.degrees == (2.0, 1.0)


def test_a_chain_gives_up_the_end_that_a_norm_has() -> None:
    last = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
    model = mlp(nn.LayerNorm(3), nn.Linear(3, 5), nn.ReLU(), last, nn.Linear(4, 2))
    found = find_gauges(model)
    assert found.gauges == (
        LNScale("0.weight", "1.weight", bias="0.bias"),
        ReLURescale("3.0.weight", "4.weight", bias="3.0.bias"),
        CEShiftBias("4.bias"),
    )
    pair = ReLURescale("1.weight", "3.0.weight", bias="1.bias")
    assert found.set_aside[0].gauge == pair
    assert found.set_aside[0].preferred == found.gauges[0]


def test_of_two_that_overlap_the_first_stays() -> None:
    choice = _Choice()
    pairs = [ReLURescale("a", "b"), ReLURescale("b", "c"), ReLURescale("c", "d")]
    choice.take(pairs)
    assert choice.gauges == [pairs[0], pairs[2]]
    assert choice.set_aside == [SetAside(pairs[1], pairs[0])]


def test_layers_that_share_their_tensors_have_one_gauge() -> None:
    """ALBERT's way: two layers, one set of weights."""
    model = filled(gpt(value_embeddings="none"))
    for part in ("mlp", "attention"):
        one, other = (model.get_submodule(f"layers.{layer}.{part}") for layer in range(2))
        for name, child in one.named_children():
            for key, tensor in child.named_parameters(recurse=False):
                setattr(other.get_submodule(name), key, tensor)
    assert find_gauges(model).gauges == (mlp_pair(0), values(0), CEShiftRowShift("head.weight"))


def test_a_batch_norm_scales_through_a_relu() -> None:
    model = mlp(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 2))
    found = find_gauges(model)
    assert found.gauges[0] == LNScale("1.weight", "4.weight", bias="1.bias")
    assert reasons(found, "batch norm")
    assert reasons(found, "dropout")


@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid])
def test_other_activations_are_rejected(activation: type[nn.Module]) -> None:
    found = find_gauges(mlp(nn.Linear(3, 4), activation(), nn.Linear(4, 2)))
    (rejected,) = found.rejected
    assert rejected.gauge.names == ("0.weight", "0.bias", "2.weight")
    assert rejected.residual > 1e-3
    assert found.gauges == (CEShiftRowShift("2.weight"), CEShiftBias("2.bias"))


def test_a_norm_that_something_else_reads_is_rejected() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.map = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return x + self.map(x)

    (rejected,) = [one for one in find_gauges(Residual()).rejected if isinstance(one.gauge, LNScale)]
    assert rejected.residual > 1e-2


def test_what_the_example_does_not_reach_is_not_claimed() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = relu_mlp()
            self.idle = relu_mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    found = find_gauges(Branches())
    assert all(name.startswith("used") for gauge in found.gauges for name in gauge.names)
    assert all("does not show" in why for why in reasons(found, "idle"))
    assert len(reasons(found, "idle")) == 2


def test_frozen_and_half_precision_tensors_are_undecided() -> None:
    model = relu_mlp()
    model.get_parameter("4.weight").requires_grad_(False)
    found = find_gauges(model)
    assert found.gauges[0] == ReLURescale("0.weight", "2.weight", bias="0.bias")
    assert "'4.weight' does not learn" in reasons(found, "4.weight")[0]
    half = find_gauges(relu_mlp().bfloat16())
    assert half.gauges == ()
    assert all("it must be float32 or float64" in one.reason for one in half.undecided)


def test_an_example_may_be_given_as_an_input_or_a_function() -> None:
    model, tokens = filled(gpt()), torch.tensor([[1, 2, 3]])
    gauges = find_gauges(model).gauges
    assert find_gauges(model, tokens).gauges == gauges
    assert find_gauges(model, lambda network: network(tokens)).gauges == gauges
    assert find_gauges(llama(), {"input_ids": tokens}).gauges == find_gauges(llama()).gauges


def test_layers_of_one_kind_cost_a_few_runs_each() -> None:
    """The search tries one of them; each gauge is then tested and read block by block."""
    runs = []
    for layers in (2, 6):
        model, count = filled(GPT(layers=layers, width=8, heads=2, vocab=11, context=8)), 0

        def run(network: Any) -> Tensor:
            nonlocal count
            count += 1
            return network(torch.tensor([[1, 2, 3]]))

        find_gauges(model, run)
        runs.append(count)
    assert runs[0] < 80
    assert runs[1] - runs[0] < 4 * 15


def test_what_cannot_be_looked_at() -> None:
    with refused(OptimError, setting="model", given="ReLU"):
        find_gauges(nn.ReLU())
    with refused(OptimError, setting="example"):
        find_gauges(nn.LayerNorm(3))
    with refused(OptimError, setting="example"):
        find_gauges(relu_mlp(), lambda network: torch.tensor([1]))
    with refused(OptimError, setting="model"):
        find_gauges(relu_mlp(), lambda network: network(torch.randn(2, 3, dtype=torch.float64)))
