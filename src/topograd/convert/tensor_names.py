"""What the tensors of published transformers are called, in Hugging Face's naming and in GGUF's.

`tensor_names` says for each of our parameters which tensor it is, and how one becomes the other:

    GPT-2, GGUF             matrices are (out, in), and ours (in, out)
    Llama, Mistral, GGUF    rows of queries and keys have the pair (i, i + half) of a head adjacent
    Gemma, GGUF             a norm's gain is 1 + weight
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from topograd.errors import ConfigError
from topograd.nn.transformer.config import TransformerConfig
from topograd.nn.transformer.stack import Transformer

Naming = Literal["hugging-face", "gguf"]
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Source:
    """The tensor that a parameter of ours is, elsewhere."""

    name: str
    read: Map | None = None
    """Theirs to ours; None where they are equal."""
    write: Map | None = None
    """Ours to theirs."""


_HUGGING_FACE = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_GEMMA_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_GPT2 = {
    "embedding": "transformer.wte",
    "layers.0.positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "layers": "transformer.h",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_GGUF = {
    "embedding": "token_embd",
    "layers.0.positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
    "layers": "blk",
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.qkv": "attn_qkv",
    "attention.output": "attn_output",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}


def tensor_names(
    config: TransformerConfig, naming: Naming = "hugging-face", available: Iterable[str] = ()
) -> dict[str, Source]:
    """For each parameter of ours, the tensor that it is; a tied head is the embedding alone.

    Some files of Hugging Face leave out the first word (GPT-2's own says wte.weight, not
    transformer.wte.weight): give the names that are `available`, and they are called so here too.
    """
    if naming not in get_args(Naming):
        raise ConfigError(setting="naming", given=naming, allowed=f"one of {', '.join(get_args(Naming))}")
    with torch.device("meta"):  # layers are alike, but for the first
        few = Transformer(replace(config, layers=min(config.layers, 2)))
    own = [name for name, _ in few.named_parameters()]
    for index in range(2, config.layers):
        own += [f"layers.{index}{name[8:]}" for name in own if name.startswith("layers.1.")]
    first, _, rest = renamed("embedding.weight", config, naming).partition(".")
    short = naming == "hugging-face" and rest in set(available)
    prefix = f"{first}." if short else ""
    return {
        name: Source(renamed(name, config, naming).removeprefix(prefix), *_transform(name, config, naming))
        for name in own
    }


def renamed(name: str, config: TransformerConfig, naming: Naming) -> str:
    """What our parameter `name` is called there."""
    table = _GGUF
    if naming == "hugging-face":
        table = _GPT2 if config.family == "gpt2" else _HUGGING_FACE
        table = table | _GEMMA_NORMS if config.traits.post_norms else table
    module, _, leaf = name.rpartition(".")
    if module in table:
        return f"{table[module]}.{leaf}"
    _, index, part = module.split(".", 2)
    return f"{table['layers']}.{index}.{table[part]}.{leaf}"


def _transform(name: str, config: TransformerConfig, naming: Naming) -> tuple[Map | None, Map | None]:
    """How their tensor becomes ours, and back."""
    module, _, leaf = name.rpartition(".")
    matrix = leaf == "weight" and module.endswith((".qkv", ".output", ".up", ".down"))
    if naming == "hugging-face":
        return None, None
    if config.traits.transposed and matrix:
        return _transposed, _transposed
    if config.traits.norm == "rms-around-one" and module.endswith("norm"):
        return (lambda x: x - 1), (lambda x: x + 1)
    if config.family in ("llama", "mistral") and module.endswith((".query", ".key")):
        width = config.head_width
        return (lambda x: _swapped(x, width // 2, 2)), (lambda x: _swapped(x, 2, width // 2))
    return None, None


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous()


def _swapped(x: Tensor, outer: int, inner: int) -> Tensor:
    """Rows of heads in another order: (half, 2) are adjacent pairs (i, i + half), (2, half) the halves."""
    return x.reshape(-1, outer, inner, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
