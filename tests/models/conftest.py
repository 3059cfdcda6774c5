"""Small models of transformers in folders, with tokenizers made here; a tiny run and its own text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from topograd.data.corpus import Document
from topograd.depth.modes import engine_of
from topograd.models.own_text import OwnText, OwnTextConfig, write_own_text
from topograd.models.prompts import Prompts
from topograd.runs.session import Session

SIZES = {"vocab_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def read(self): return self.x\n" * 20], trainer)
    return tokenizer


def model_of(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=4, n_head=4, vocab_size=320, n_positions=64, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config).eval()
    name = {"llama": "Llama", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, intermediate_size=64, max_position_embeddings=64, head_dim=8, **SIZES
    )
    config.tie_word_embeddings = family == "llama"
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A Hugging Face folder of a family and its model; made once."""
    made: dict[str, tuple[Path, Any]] = {}
    place = tmp_path_factory.mktemp("sources")

    def make(family: str) -> tuple[Path, Any]:
        if family not in made:
            folder, model = place / family, model_of(family)
            model.save_pretrained(folder)
            byte_level().save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text(
                '{"eos_token": "<|endoftext|>", "chat_template": ' + repr(TEMPLATE).replace("'", '"') + "}",
                encoding="utf-8",
            )
            made[family] = folder, model
        return made[family]

    return make


SHAPE = OwnTextConfig(length=16, rows=8)


@pytest.fixture(scope="module")
def session(make_session: Callable[..., Session]) -> Session:
    """A run of three stages on bytes."""
    return make_session(3)


@pytest.fixture(scope="module")
def prompts(session: Session) -> Prompts:
    documents = [Document("a", "stage loss relay\n" * 40), Document("b", "loss\n" * 90)]
    return Prompts(session.tokenizer, documents)


@pytest.fixture(scope="module")
def text(session: Session, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> OwnText:
    """512 tokens of the run's own."""
    folder = tmp_path_factory.mktemp("text")
    return write_own_text(folder, engine_of(session), prompts, session.weights, 512, SHAPE)
