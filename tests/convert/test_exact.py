"""Stacks of the families beside transformers: logits bit for bit, gradients, configs and names of tensors."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.convert.families import config_of, family_config, hugging_face_config, load_tensors, stack_of
from topograd.convert.tensor_names import Naming, tensor_names
from topograd.errors import ConfigError
from topograd.nn.transformer.stack import Transformer

Make = Callable[..., Any]
VOCAB = 31
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
GEMMA: dict[str, Any] = {"head_dim": 10, "query_pre_attn_scalar": 13}
CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 0.1}),
    "llama-odd": (
        "llama",
        {"hidden_size": 21, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6},
    ),
    "llama-base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    "llama-long": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 3.0}, "hidden_act": "gelu"},
    ),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral-whole": ("mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 10}),
    "qwen3-biases": ("qwen3", {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 37, "activation_function": "gelu"}),
    "gemma": ("gemma", {"head_dim": 6}),
    "gemma2": ("gemma2", {**GEMMA, "sliding_window": 5}),
    "gemma2-uncapped": (
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": ("gemma3_text", {**GEMMA, "sliding_window": 5, "sliding_window_pattern": 2}),
    "gemma3-untied": ("gemma3_text", {**GEMMA, "tie_word_embeddings": False, "final_logit_softcapping": 3.0}),
}


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """Models by the name of a variant, in evaluation mode, with noise on every parameter."""
    transformers: Any = pytest.importorskip("transformers")

    def make(variant: str, **more: Any) -> Any:
        torch.manual_seed(0)
        family, settings = VARIANTS[variant]
        config, model = (getattr(transformers, name) for name in CLASSES[family])
        sizes = SIZES
        if family == "gpt2":
            sizes = {"vocab_size": VOCAB, "n_embd": 21, "n_layer": 3, "n_head": 3, "n_positions": 64}
            sizes |= {"bos_token_id": 0, "eos_token_id": 0}
        built = model(config(**sizes | settings | more)).eval()
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return built

    return make


def tokens(rows: int, time: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (rows, time), generator=torch.Generator().manual_seed(seed))


def built(model: Any) -> Transformer:
    """A stack built on the meta device from the config's dict, and filled from the model's state dict."""
    state = model.state_dict()
    with torch.device("meta"):
        stack = Transformer(config_of(model.config.to_dict()))
        stack = stack.to(next(model.parameters()).dtype)
    load_tensors(stack, state.__getitem__, state)
    return stack.eval()


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_are_those_of_transformers_bit_for_bit(make_model: Make, variant: str) -> None:
    model = make_model(variant)
    stack = built(model)
    for rows, time in ((1, 1), (3, 2), (1, 3), (1, 5), (3, 7), (1, 17), (3, 33), (1, 64), (3, 64)):
        inputs = tokens(rows, time)
        assert torch.equal(stack(inputs), model(inputs, use_cache=False).logits), (rows, time)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_in_float64_are_equal_up_to_tables_in_float32(make_model: Make, variant: str) -> None:
    model = make_model(variant).double()
    expected = model(tokens(2, 33), use_cache=False).logits
    found = built(model)(tokens(2, 33))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


@pytest.mark.parametrize("variant", ["llama", "gpt2", "qwen3", "gemma2", "gemma3"])
@torch.no_grad()
def test_half_precision_is_that_of_transformers(make_model: Make, variant: str) -> None:
    model = make_model(variant).bfloat16()
    for name, module in model.named_modules():  # which model.to rounds, and from_pretrained does not
        if name.endswith("rotary_emb"):
            fresh = type(module)(config=model.config)
            for key, buffer in fresh.named_buffers():
                setattr(module, key, buffer)
    inputs = tokens(2, 33)
    assert torch.equal(built(model)(inputs), model(inputs, use_cache=False).logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_transformers(make_model: Make, variant: str) -> None:
    model = make_model(variant)
    stack, inputs, targets = stack_of(model), tokens(2, 9), tokens(2, 9, seed=2).flatten()
    F.cross_entropy(stack(inputs).flatten(0, 1), targets).backward()
    own = {name: p.grad for name, p in stack.named_parameters()}
    model.zero_grad()
    F.cross_entropy(model(inputs, use_cache=False).logits.flatten(0, 1), targets).backward()
    theirs = dict(model.named_parameters())
    sources = tensor_names(family_config(stack))
    assert len(own) == len(theirs) == len(sources)
    for name, source in sources.items():
        expected, found = theirs[source.name].grad, own[name]
        assert expected is not None, name
        assert found is not None, name
        expected = expected if source.read is None else source.read(expected)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_stack_of_a_model_shares_its_parameters(make_model: Make, variant: str) -> None:
    model = make_model(variant)
    stack = stack_of(model)
    assert {id(p) for p in stack.parameters()} == {id(p) for p in model.parameters()}
    before = [name for name, _ in model.named_parameters()]
    stack.add_heads(range(2))
    assert [name for name, _ in model.named_parameters()] == before


def test_changed_models_are_refused(make_model: Make) -> None:
    class Adapter(nn.Linear):
        pass

    model = make_model("llama")
    model.model.layers[1].mlp.up_proj = Adapter(24, 37)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj is a Adapter, which is not"):
        stack_of(model)
    model = make_model("llama")
    model.model.layers[2].input_layernorm.variance_epsilon = 0.5
    with pytest.raises(ConfigError, match=r"layers\.2\.input_layernorm has ε 0\.5 and the config 1e-06"):
        stack_of(model)
    with pytest.raises(ConfigError, match="a Linear is not a model of transformers"):
        stack_of(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="'LlamaModel' is not supported; of llama only LlamaForCausalLM is"):
        stack_of(make_model("llama").model)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_config_goes_back_to_transformers(make_model: Make, variant: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = make_model(variant)
    config = config_of(model.config.to_dict())
    written = hugging_face_config(config)
    assert config_of(written) == config
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(written))
    again = getattr(transformers, written["architectures"][0])(theirs).eval()
    again.load_state_dict(model.state_dict())
    inputs = tokens(2, 17)
    assert torch.equal(again(inputs).logits, model(inputs).logits)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("naming", ["hugging-face", "gguf"])
@torch.no_grad()
def test_tensors_go_out_and_come_back(make_model: Make, variant: str, naming: Naming) -> None:
    stack = stack_of(make_model(variant))
    own, sources = dict(stack.named_parameters()), tensor_names(family_config(stack), naming)
    assert own.keys() == sources.keys()
    assert len({source.name for source in sources.values()}) == len(sources)
    out = {
        s.name: own[n].detach() if s.write is None else s.write(own[n].detach()) for n, s in sources.items()
    }
    with torch.device("meta"):
        other = Transformer(stack.config)
    load_tensors(other, out.__getitem__, out, naming)
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(parameter, own[name], rtol=0, atol=2e-7)  # 1 + gain is rounded


GGUF_ARCHITECTURES = {
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "gpt2": "GPT2",
    "gemma": "GEMMA",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gguf_names_are_those_of_the_gguf_package(make_model: Make, variant: str) -> None:
    gguf: Any = pytest.importorskip("gguf")
    config = config_of(make_model(variant).config.to_dict())
    arch = gguf.MODEL_ARCH[GGUF_ARCHITECTURES[config.family]]
    names = gguf.get_tensor_name_map(arch, config.layers)
    theirs = tensor_names(config)
    for name, source in tensor_names(config, "gguf").items():
        expected = names.get_name(theirs[name].name, try_suffixes=(".weight", ".bias"))
        assert expected == source.name, name
