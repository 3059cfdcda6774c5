"""Checkpoints of Hugging Face from a folder: what is loaded, what is read, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from topograd.convert import huggingface
from topograd.errors import CheckpointError

transformers = pytest.importorskip("transformers")
TINY = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}


def save(folder: Path, kind: str, **settings: Any) -> Path:
    """A tiny random model of this class."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)
    model(model.config_class(**TINY | settings)).save_pretrained(folder)
    return folder


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save(tmp_path / "bert", "BertModel", intermediate_size=16, max_position_embeddings=16)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(tmp_path / "llama", "LlamaForCausalLM", intermediate_size=16, max_position_embeddings=32)


def test_a_causal_model_has_its_head_and_others_their_body(bert: Path, llama: Path) -> None:
    ids = torch.arange(10).view(2, 5)
    for folder, causal, width in ((bert, False, 8), (llama, True, 40)):
        loaded = huggingface.load(folder)
        assert (loaded.causal, loaded.fresh) == (causal, ())
        assert not loaded.model.training
        found = loaded.hidden(loaded.model, ids)
        assert (found.shape, found.dtype) == ((2, 5, width), torch.float64)


def test_weights_come_in_the_type_that_is_asked_for_and_are_counted_before(llama: Path) -> None:
    loaded = huggingface.load(llama, torch.float32)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    held = sum(p.numel() for p in loaded.model.parameters())
    assert huggingface.stored_parameters(llama) == held
    (llama / "more.safetensors").write_bytes(b"none")
    with pytest.raises(CheckpointError, match=r"more\.safetensors cannot be read"):
        huggingface.stored_parameters(llama)


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path, "BertForMaskedLM", intermediate_size=16)
    assert huggingface.load(folder).fresh == ("pooler.dense.bias", "pooler.dense.weight")


def test_text_through_the_tokenizer_or_random_ids(bert: Path) -> None:
    loaded = huggingface.load(bert)
    ids, source = huggingface.token_rows(bert, loaded.config, 8)
    assert ids.shape == (256, 16)
    assert source.startswith("random ids")
    assert torch.equal(ids, huggingface.token_rows(bert, loaded.config, 8)[0])
    letters = {letter: i for i, letter in enumerate("?etaoinsrhldc")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.enable_truncation(4)
    tokenizer.save(str(bert / "tokenizer.json"))
    ids, source = huggingface.token_rows(bert, loaded.config, 8)
    assert ids.shape == (256, 16), "the tokenizer's own truncation is not used"
    assert int(ids.max()) < 13
    assert source.startswith("Python's standard library")
    loaded.config.vocab_size = 5
    with pytest.raises(CheckpointError, match=r"ids up to .* and the model has 5"):
        huggingface.token_rows(bert, loaded.config, 8)
    (bert / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        huggingface.token_rows(bert, loaded.config, 8)


def test_pickles_are_never_read(bert: Path) -> None:
    (bert / "model.safetensors").rename(bert / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has only pytorch_model\.bin, a pickle"):
        huggingface.load(bert)
    (bert / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        huggingface.load(bert)


def test_code_of_the_folder_is_never_run(bert: Path) -> None:
    config = json.loads((bert / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    (bert / "config.json").write_text(json.dumps(config))
    (bert / "evil.py").write_text("raise SystemExit('code of the folder ran')")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        huggingface.load(bert)


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors"])
def test_damaged_files_are_one_line(bert: Path, damage: str) -> None:
    (bert / damage).write_bytes(b"{ not this")
    with pytest.raises(CheckpointError, match="cannot be loaded") as problem:
        huggingface.load(bert)
    assert "\n" not in str(problem.value)


def test_two_stacks_are_refused(tmp_path: Path) -> None:
    shape = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    torch.manual_seed(0)
    transformers.T5Model(transformers.T5Config(**shape)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="an encoder with a decoder"):
        huggingface.load(tmp_path)
