"""The settings in a GGUF file's metadata as those of a Hugging Face config.json, for `families.config_of`.

A file names its sizes `<architecture>.block_count` and so on. What it does not name is read off its tensors
(a head of its own, biases, Llama 3's table of rotary factors) or is what llama.cpp computes with (Gemma's
scale of queries). Numbers of type f32 are given as the shortest decimals that mean them: 1e-05.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from topograd.convert.gguf_file import GGUFFile
from topograd.errors import CheckpointError

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
"""GGUF's architectures that are read: Hugging Face's `model_type` and class."""
_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "intermediate_size": "feed_forward_length",
}
_GPT2_SIZES = {
    "n_layer": "block_count",
    "n_embd": "embedding_length",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "n_inner": "feed_forward_length",
}
_DEEPEST_GEMMAS = {"gemma2": 46, "gemma3": 62}  # the 27B models, whose queries have a scale of their own


def config_dict(file: GGUFFile) -> dict[str, Any]:
    """The config.json that this file implies."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        problem = f"{file.path} has the architecture {ascii(architecture)[:60]}"
        raise CheckpointError(problem, remedy=f"read: {', '.join(ARCHITECTURES)}")
    given = _Given(file, architecture)
    kind, name = ARCHITECTURES[architecture]
    config: dict[str, Any] = {
        "model_type": kind,
        "architectures": [name],
        "vocab_size": given.vocab(),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if given.number("expert_count", 0):
        config["num_local_experts"] = given.size("expert_count")
    if kind == "gpt2":
        config |= {theirs: given.size(own) for theirs, own in _GPT2_SIZES.items()}
        return config | {"layer_norm_epsilon": given.number("attention.layer_norm_epsilon", 1e-5)}
    config |= {theirs: given.size(own) for theirs, own in _SIZES.items()}
    config |= _attention(given, config)
    config["rms_norm_eps"] = given.number("attention.layer_norm_rms_epsilon", 1e-6)
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if kind in ("gemma2", "gemma3_text"):
        config |= _late_gemma(given, config, architecture)
    return config | _rope(given, config)


class _Given:
    """A file's metadata of its architecture, read with one clear line for what is missing or of no use."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self._architecture = file, architecture

    def get(self, name: str) -> Any:
        return self.file.metadata.get(f"{self._architecture}.{name}")

    def size(self, name: str, default: int | None = None) -> int:
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # some files state it for each layer
        if type(value) is not int or value < 1:
            raise self._refused(name, value, "a whole number above 0, the same for all layers")
        return value

    def number(self, name: str, default: float) -> float:
        value = default if self.get(name) is None else self.get(name)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._refused(name, value, "a finite number")
        return float(str(np.float32(value)))

    def vocab(self) -> int:
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        return self.size("vocab_size", len(tokens) if isinstance(tokens, list) else None)

    def _refused(self, name: str, value: object, wanted: str) -> CheckpointError:
        shown = ascii(value).replace("\n", " ")[:60]
        return CheckpointError(
            f"{self.file.path} has {self._architecture}.{name} {shown}", remedy=f"it must be {wanted}"
        )


def _attention(given: _Given, config: Mapping[str, Any]) -> dict[str, Any]:
    heads, width = config["num_attention_heads"], config["hidden_size"]
    rotated = given.size("rope.dimension_count") if given.get("rope.dimension_count") else None
    head = given.size("attention.key_length", rotated or max(1, width // heads))
    if given.size("attention.value_length", head) != head:
        problem = f"{given.file.path} has keys and values of different widths"
        raise CheckpointError(problem, remedy="they must be equal")
    found = {"head_dim": head, "num_key_value_heads": given.size("attention.head_count_kv", heads)}
    return found if rotated in (None, head) else found | {"partial_rotary_factor": rotated / head}


def _late_gemma(given: _Given, config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    deepest = config["num_hidden_layers"] == _DEEPEST_GEMMAS[architecture]
    scalar = config["hidden_size"] // config["num_attention_heads"] if deepest else config["head_dim"]
    found: dict[str, Any] = {"query_pre_attn_scalar": scalar}
    if given.get("attention.sliding_window") is not None:
        found["sliding_window"] = given.size("attention.sliding_window")
    if architecture == "gemma2":
        found["attn_logit_softcapping"] = given.number("attn_logit_softcapping", 50.0)
        found["final_logit_softcapping"] = given.number("final_logit_softcapping", 30.0)
    return found


def _rope(given: _Given, config: Mapping[str, Any]) -> dict[str, Any]:
    base = given.number("rope.freq_base", 1e6 if config["model_type"] == "gemma3_text" else 1e4)
    found: dict[str, Any] = {"rope_theta": base}
    kind = given.get("rope.scaling.type")
    if kind not in (None, "none"):  # those that are not supported are refused by `config_of`, by their name
        factor = given.number("rope.scaling.factor", 1.0)
        found["rope_scaling"] = {"rope_type": ascii(kind)[1:-1][:60], "factor": factor}
    if "rope_freqs.weight" in given.file.tensors:
        found["rope_scaling"] = _llama3_scaling(given.file, base, config["head_dim"])
    return found


def _llama3_scaling(file: GGUFFile, base: float, head: int) -> dict[str, Any]:
    """Llama 3's scaling, of which the file has the factor of each frequency, once they follow its rule."""
    found = file.tensor("rope_freqs.weight").flatten().double().numpy()
    factor = float(str(np.float32(found.max())))
    low, high, context = 1.0, 4.0, 8192
    wavelength = 2 * math.pi * base ** (np.arange(0, head, 2) / head)
    smooth = ((context / wavelength - low) / (high - low)).clip(0, 1)
    if found.shape != wavelength.shape or not np.allclose(found, 1 / ((1 - smooth) / factor + smooth), 1e-4):
        problem = f"{file.path} has a rope_freqs.weight that is not by Llama 3's rule: not supported"
        raise CheckpointError(problem)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
