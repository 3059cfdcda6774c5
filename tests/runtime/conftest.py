"""Small float32 stacks of every kind that is written as ONNX operators.

Heads of 16 numbers may be grouped, heads of 6 may not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from topograd.nn.config import SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.stack import Stack
from topograd.nn.transformer.config import TransformerConfig
from topograd.nn.transformer.stack import Transformer

VOCAB, CONTEXT = 23, 20
LLAMA = TransformerConfig(
    family="llama",
    layers=4,
    width=24,
    heads=4,
    kv_heads=2,
    head_width=6,
    mlp_width=37,
    vocab=VOCAB,
    context=CONTEXT,
    norm_eps=1e-3,
)
GEMMA: dict[str, Any] = {"tied": True, "activation": "gelu_pytorch_tanh", "head_width": 16}
FAMILIES = {
    "llama": LLAMA,
    "llama-biases": replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True, kv_heads=4),
    "llama-long": replace(
        LLAMA, rope_scaling="llama3", rope_factor=8.0, rope_original_context=32, activation="gelu"
    ),
    "mistral": replace(LLAMA, family="mistral", windows=(3,), head_width=16),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True, windows=(0, 4, 4)),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_width=16),
    "gpt2": replace(
        LLAMA,
        family="gpt2",
        kv_heads=4,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=True,
        activation="gelu_new",
    ),
    "gemma2": replace(
        LLAMA, family="gemma2", windows=(3, 0), attention_softcap=2.0, softcap=3.0, query_scalar=13, **GEMMA
    ),
    "gemma3": replace(
        LLAMA,
        family="gemma3_text",
        windows=(3, 3, 0),
        local_rope_base=70.0,
        rope_base=1e6,
        qk_norm=True,
        **GEMMA,
    ),
}
GPTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt-windows": {"windows": (0, 3), "kv_heads": 1, "softcap": 4.0, "value_embeddings": "all"},
    "gpt-plain": {
        "mlp": "swiglu",
        "smear": False,
        "x0_blend": False,
        "value_embeddings": "none",
        "tied": True,
    },
}


def noisy(stack: Stack) -> Stack:
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return stack.eval()


def build(name: str) -> Stack:
    torch.manual_seed(3)
    if name in FAMILIES:
        return noisy(Transformer(FAMILIES[name]))
    sizes = {"layers": 4, "width": 32, "heads": 2, "vocab": VOCAB, "context": CONTEXT}
    stack = GPT(**sizes | GPTS[name])
    if name == "gpt":
        stack.add_heads(range(4), rank=2)
        add_interfaces(stack, SegmentInterface(segments=4, rank=4, pool="cumulative"), 3, 32, CONTEXT)
    noisy(stack)
    for parameter in (p for relay in stack.learned_relays().values() for p in relay.parameters()):
        nn.init.normal_(parameter, std=0.3)
    return stack


@pytest.fixture(scope="session")
def stack_of() -> Callable[[str], Stack]:
    """A stack by name, made once; not to be changed."""
    made: dict[str, Stack] = {}

    def get(name: str) -> Stack:
        if name not in made:
            made[name] = build(name)
        return made[name]

    return get
