"""Factors of transformers' models: fused projections, Conv1D, a head that is also the embedding."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from topograd.geometry.factors import kfac_factors

transformers = pytest.importorskip("transformers")
VOCAB, LENGTH = 23, 6


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).double().eval()


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double().eval()


def inputs_of(module: nn.Module, model: nn.Module, ids: Tensor) -> Tensor:
    """E[h hᵀ] of one module, by a hook."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        model(ids)
    handle.remove()
    return seen[0].T @ seen[0] / len(seen[0])


@pytest.mark.covers("adapted", feature="inspect")
@pytest.mark.parametrize(
    ("make", "layer", "sides"),
    [
        (gpt2, "transformer.h.1.attn.c_attn", (8, 24)),
        (gpt2, "transformer.h.0.mlp.c_proj", (32, 8)),
        (llama, "model.layers.1.self_attn.k_proj", (8, 4)),
        (llama, "model.layers.0.mlp.down_proj", (12, 8)),
    ],
)
def test_every_projection_has_factors(make: Any, layer: str, sides: tuple[int, int]) -> None:
    model, ids = make(), torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    factors = kfac_factors(
        model, (ids, ids), fisher="monte-carlo", generator=torch.Generator().manual_seed(2)
    )
    found = factors[layer]
    assert (found.A.shape[0], found.G.shape[0]) == sides
    assert torch.allclose(found.A, inputs_of(model.get_submodule(layer), model, ids), rtol=1e-12, atol=1e-14)
    assert torch.linalg.eigvalsh(found.G)[-1] > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    linear = [n for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")]
    assert set(linear) <= {*factors, "lm_head"}
    assert "lm_head" in factors, "a head has factors, tied or not"


def test_a_tied_embedding_is_named_beside_its_head() -> None:
    model, ids = gpt2(), torch.randint(VOCAB, (2, LENGTH))
    factors = kfac_factors(model, (ids, ids))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert factors.uncovered["transformer.wte.weight"] == "used by embedding"
