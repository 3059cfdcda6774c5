"""Families: configs as they are published, what is refused, names of tensors, and loading."""

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import topograd as tg
from raising import refused
from topograd.convert.families import ARCHITECTURES, config_of, load_tensors
from topograd.convert.importing import import_model
from topograd.convert.tensor_names import tensor_names
from topograd.errors import CheckpointError, ConfigError
from topograd.nn.transformer.config import TransformerConfig
from topograd.nn.transformer.stack import Transformer

VOCAB = 31


def tokens(rows: int, time: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (rows, time), generator=torch.Generator().manual_seed(seed))


def test_gguf_orders_the_rows_of_llama_as_llama_cpp_does() -> None:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py, written out."""
    config = config_of(SMOLLM2 | {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2})
    sources = tensor_names(config, "gguf")
    for name, heads in (("query", 4), ("key", 2)):
        theirs = torch.randn(heads * 6, 24)
        permuted = theirs.reshape(heads, 2, 3, 24).swapaxes(1, 2).reshape(theirs.shape)
        source = sources[f"layers.0.attention.{name}.weight"]
        assert source.read is not None
        assert source.write is not None
        assert torch.equal(source.read(permuted), theirs)
        assert torch.equal(source.write(theirs), permuted)


SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 49152,
}
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}
GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": False,
    "vocab_size": 262144,
}
PUBLISHED = {
    "SmolLM2-135M": (
        SMOLLM2,
        {"layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "head_width": 64, "mlp_width": 1536}
        | {"vocab": 49152, "context": 8192, "rope_base": 1e5, "norm_eps": 1e-5, "tied": True, "windows": ()},
        134_515_008,
    ),
    "Qwen2-0.5B": (
        QWEN2,
        {"qkv_bias": True, "output_bias": False, "windows": (), "rope_base": 1e6},
        494_032_768,
    ),
    "Qwen3-0.6B": (QWEN3, {"qk_norm": True, "head_width": 128, "qkv_bias": False, "tied": True}, 596_049_920),
    "Mistral-7B": (MISTRAL, {"windows": (4096,), "tied": False, "head_width": 128}, 7_241_732_096),
    "GPT-2": (
        GPT2,
        {"context": 1024, "tied": True, "activation": "gelu_new", "mlp_width": 3072},
        124_439_808,
    ),
    "Gemma-2-2B": (
        GEMMA2,
        {"windows": (4096, 0) * 13, "softcap": 30.0, "attention_softcap": 50.0, "tied": True},
        2_614_341_888,
    ),
    "Gemma-3-270M": (
        GEMMA3,
        {"windows": ((512,) * 5 + (0,)) * 3, "rope_base": 1e6, "local_rope_base": 1e4, "qk_norm": True},
        268_098_176,
    ),
}


@pytest.mark.parametrize(("settings", "expected", "size"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_configs(settings: dict[str, Any], expected: dict[str, Any], size: int) -> None:
    config = config_of(settings)
    assert {name: getattr(config, name) for name in expected} == expected
    with torch.device("meta"):
        stack = Transformer(config)
    assert sum(parameter.numel() for parameter in stack.parameters()) == size


@pytest.mark.parametrize("settings", [settings for settings, _, _ in PUBLISHED.values()], ids=PUBLISHED)
def test_published_configs_mean_to_transformers_what_they_mean_here(settings: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(settings)).to_dict()
    assert config_of(theirs | {"architectures": settings["architectures"]}) == config_of(settings)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        "architecture 'BertForMaskedLM' is not supported; supported are gemma, .*llama",
    ),
    "no list": ({"architectures": "LlamaForCausalLM"}, "architectures 'LlamaForCausalLM'; it must be a list"),
    "no name": (SMOLLM2 | {"architectures": [["a"]]}, "not supported; of llama only LlamaForCausalLM is"),
    "none": ({}, "architecture None is not supported"),
    "experts": (
        {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
        "architecture 'MixtralForCausalLM' is not supported",
    ),
    "hidden experts": (SMOLLM2 | {"num_local_experts": 8}, "a mixture of experts .num_local_experts."),
    "encoder-decoder": ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is an encoder and a decoder"),
    "class": (
        SMOLLM2 | {"architectures": ["LlamaForSequenceClassification"]},
        "'LlamaForSequenceClassification' is not supported; of llama only LlamaForCausalLM is",
    ),
    "pictures": (
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
        "'Gemma3ForConditionalGeneration' is not supported",
    ),
    "quantized": (SMOLLM2 | {"quantization_config": {"bits": 4}}, "quantized weights"),
    "yarn": (
        SMOLLM2 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope scaling 'yarn' is not supported; supported are default, linear, llama3",
    ),
    "dynamic": (SMOLLM2 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
    "longrope": (
        SMOLLM2 | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "rope scaling 'longrope' is not supported",
    ),
    "partial": (SMOLLM2 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    "rope": (SMOLLM2 | {"rope_scaling": 3}, "rope_scaling 3; it must be a table"),
    "activation": (SMOLLM2 | {"hidden_act": "xielu"}, "hidden_act 'xielu' is not supported"),
    "layer types": (
        QWEN3 | {"layer_types": ["linear_attention"] * 28},
        "layer_types 'linear_attention' are not supported",
    ),
    "window of llama": (
        SMOLLM2 | {"layer_types": ["full_attention", "sliding_attention"] * 15},
        "layer_types 'sliding_attention' are not supported for llama",
    ),
    "mixture of mistral": (
        MISTRAL | {"layer_types": ["full_attention", "sliding_attention"] * 16},
        "layer_types 'full_attention' are not supported for mistral",
    ),
    "too few layer types": (QWEN3 | {"layer_types": ["full_attention"]}, "one for each layer"),
    "window off": (
        QWEN2 | {"layer_types": ["sliding_attention"] * 24},
        "use_sliding_window is false; make them agree",
    ),
    "both ways": (GEMMA3 | {"use_bidirectional_attention": True}, "attention to later tokens"),
    "capped gemma 3": (GEMMA3 | {"attn_logit_softcapping": 50.0}, "gemma3_text does not support"),
    "unscaled": (GPT2 | {"scale_attn_weights": False}, "attention is not scaled"),
    "cross": (GPT2 | {"add_cross_attention": True}, "cross attention"),
    "missing": (SMOLLM2 | {"hidden_size": None}, "hidden_size None; it must be a whole number above 0"),
    "text": (SMOLLM2 | {"hidden_size": "576"}, "hidden_size '576'; it must be a whole number"),
    "negative": (SMOLLM2 | {"num_hidden_layers": -3}, "num_hidden_layers -3"),
    "giant": (SMOLLM2 | {"num_hidden_layers": 10**9}, "layers is 1000000000; .* 1..4096"),
    "giant width": (SMOLLM2 | {"vocab_size": 10**15}, "vocab is 1000000000000000"),
    "heads": (SMOLLM2 | {"num_attention_heads": 7}, "hidden_size 576, no multiple of its 7 heads"),
    "kv heads": (SMOLLM2 | {"num_key_value_heads": 2}, "kv_heads is 2; it must be a divisor of the 9 heads"),
    "epsilon": (SMOLLM2 | {"rms_norm_eps": float("nan")}, "rms_norm_eps nan; it must be a finite number"),
    "tied": (SMOLLM2 | {"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes'; it must be true or false"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config_of(settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_has_these_classes(name: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    assert getattr(transformers, name).config_class.model_type == ARCHITECTURES[name]


def small(**changes: Any) -> TransformerConfig:
    return replace(
        config_of(SMOLLM2 | {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}),
        layers=2,
        vocab=31,
        **changes,
    )


def tensors_of(config: TransformerConfig) -> dict[str, Tensor]:
    torch.manual_seed(0)
    own = dict(Transformer(config).named_parameters())
    return {source.name: own[name].detach() for name, source in tensor_names(config).items()}


def empty(config: TransformerConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


def test_loading_takes_tensors_as_they_are() -> None:
    tensors = tensors_of(small())
    stack = empty(small())
    load_tensors(stack, tensors.__getitem__, tensors)
    assert {p.data_ptr() for p in stack.parameters()} == {x.data_ptr() for x in tensors.values()}
    assert all(p.requires_grad for p in stack.parameters())
    assert stack.head.weight is stack.embedding.weight
    stack(tokens(1, 4)).sum().backward()


def test_a_head_beside_a_tied_embedding_is_left_out() -> None:
    tensors = tensors_of(small())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    stack = empty(small())
    load_tensors(stack, tensors.__getitem__, tensors)
    assert stack.head.weight.data_ptr() == tensors["model.embed_tokens.weight"].data_ptr()


def test_other_floating_types_are_converted() -> None:
    tensors = {name: x.bfloat16() for name, x in tensors_of(small()).items()}
    stack = empty(small())
    load_tensors(stack, tensors.__getitem__, tensors)
    assert {p.dtype for p in stack.parameters()} == {torch.float32}
    half = empty(small()).to(torch.bfloat16)
    load_tensors(half, tensors.__getitem__, tensors)
    assert {p.data_ptr() for p in half.parameters()} == {x.data_ptr() for x in tensors.values()}


DOWN = "model.layers.1.mlp.down_proj.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop(DOWN), f"tensor '{DOWN}' is missing"),
    "extra": (
        lambda t: t.update({"model.layers.2.mlp.down_proj.weight": torch.ones(2), "z": torch.ones(2)}),
        r"tensor 'model.layers.2.mlp.down_proj.weight' \(and 1 more\) is not part of this llama model",
    ),
    "shape": (
        lambda t: t.update({DOWN: torch.ones(24, 7)}),
        rf"tensor '{DOWN}' has shape \(24, 7\); by the model's config it must have \(24, 1536\)",
    ),
    "transposed": (lambda t: t.update({DOWN: t[DOWN].t()}), r"has shape \(1536, 24\)"),
    "type": (
        lambda t: t.update({DOWN: t[DOWN].to(torch.int8)}),
        "has type torch.int8; it must be a floating",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_wrong_tensors_are_refused_by_name(damage: Callable[[Any], Any], message: str) -> None:
    tensors = tensors_of(small())
    damage(tensors)
    with pytest.raises(CheckpointError, match=message):
        load_tensors(empty(small()), tensors.__getitem__, tensors)


def test_gpt2_shapes_are_named_as_the_file_has_them() -> None:
    config = config_of(GPT2 | {"n_embd": 24, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 31})
    sources = tensor_names(config)
    own = dict(Transformer(config).named_parameters())
    tensors = {
        s.name: own[n].detach() if s.write is None else s.write(own[n].detach()) for n, s in sources.items()
    }
    assert tensors["transformer.h.0.attn.c_attn.weight"].shape == (24, 72)
    tensors["transformer.h.0.attn.c_attn.weight"] = torch.ones(72, 24)
    with pytest.raises(
        CheckpointError, match=r"c_attn.weight' has shape \(72, 24\); .* must have \(24, 72\)"
    ):
        load_tensors(empty(config), tensors.__getitem__, tensors)


def test_unknown_names_are_refused() -> None:
    with refused(ConfigError, setting="naming", given="onnx"):
        tensor_names(small(), "onnx")  # type: ignore[arg-type]


def test_each_tensor_is_asked_for_once_and_kept_where_it_is() -> None:
    tensors, asked = tensors_of(small()), []

    def get(name: str) -> Tensor:
        asked.append(name)
        return tensors[name]

    stack = empty(small())
    load_tensors(stack, get)
    assert sorted(asked) == sorted(tensors)
    assert {p.data_ptr() for p in stack.parameters()} == {x.data_ptr() for x in tensors.values()}


def test_names_without_the_first_word() -> None:
    """As in the file of GPT-2 itself, with the masks that it carries along."""
    config = config_of(GPT2 | {"n_embd": 24, "n_head": 2, "n_layer": 3, "n_positions": 16, "vocab_size": 31})
    own = dict(Transformer(config).named_parameters())
    tensors = {
        s.name.removeprefix("transformer."): own[n].detach() if s.write is None else s.write(own[n].detach())
        for n, s in tensor_names(config).items()
    }
    assert "h.2.attn.c_attn.weight" in tensors
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    stack = empty(config)
    load_tensors(stack, tensors.__getitem__, tensors)
    assert all(torch.equal(parameter, own[name]) for name, parameter in stack.named_parameters())
    assert tensor_names(config, available=tensors)["embedding.weight"].name == "wte.weight"


def test_a_file_with_names_without_the_first_word_is_imported(
    source: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, model = source("gpt2")
    other = shutil.copytree(folder, tmp_path / "short")
    tensors = load_file(other / "model.safetensors")
    short = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    save_file(short, other / "model.safetensors", metadata={"format": "pt"})
    import_model(other, tmp_path / "run", partition="2,2")
    inputs = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(tg.load(tmp_path / "run").logits(inputs), model(inputs, use_cache=False).logits)
