"""Heads of the attentions of transformers: without its own entries a head adds nothing, the others stay."""

from typing import Any

import pytest
import torch
from torch import nn

from topograd.geometry.heads import find_heads
from topograd.geometry.singular.parts import head_parts

SIZES: dict[str, Any] = {
    "vocab_size": 17,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
}


def model_of(kind: str) -> nn.Module:
    import transformers

    sizes = dict(SIZES)
    if kind == "GPT2":
        sizes = {"vocab_size": 17, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    elif kind in ("Llama", "Phi3"):
        sizes |= {"num_key_value_heads": 2, "pad_token_id": 0}
    elif kind == "OPT":
        sizes |= {"ffn_dim": 8, "word_embed_proj_dim": 16}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model: nn.Module = getattr(transformers, f"{kind}Model")(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("kind", ["GPT2", "GPTNeoX", "Llama", "Phi3", "OPT", "Bert"])
def test_a_head_owns_what_makes_its_columns(kind: str) -> None:
    model, ids = model_of(kind), torch.arange(8)[None]
    heads = find_heads(model)
    assert len(heads) == 4
    layer = heads[0].name.rsplit(".head.", 1)[0]
    path, columns = next(iter(heads[2].columns.items()))
    seen: list[torch.Tensor] = []
    model.get_submodule(path).register_forward_hook(
        lambda module, args, out: seen.append(args[0].flatten(0, -2))
    )
    model(ids)
    part = head_parts(model, layer)[2]
    with torch.no_grad():
        for name in part.masks:
            if not name.startswith(f"{path}."):
                model.get_parameter(name).mul_(1 - part.masks[name])
    model(ids)
    before, after = seen
    assert not after[:, columns].any()
    shared = [head for head in heads if head.group != heads[2].group]
    for head in shared:
        kept = next(iter(head.columns.values()))
        assert torch.equal(before[:, kept], after[:, kept])
    assert len(shared) == (2 if kind in ("Llama", "Phi3") else 3)


def test_other_modules_have_none() -> None:
    assert find_heads(nn.Sequential(nn.Linear(2, 2))) == []
