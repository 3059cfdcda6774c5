"""Files of Hugging Face's tokenizers, of every kind that is read, made on the spot."""

import json
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The capital of France is Paris. It's 1234567 times as old as you think, they've said.",
    "def f(x):\n    return x ** 2  # naïve café, œuvre\n\n\n\tif x:\r\n        pass",
    "Привет, мир! 日本語のテキスト。 안녕하세요 🙂👩‍👩‍👧‍👦 e\u0301 \u00e9",
] * 3
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def _specials(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])


def byte_level(vocab: int = 400) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    )
    _specials(tokenizer)
    return tokenizer


def normalised_byte_level() -> tokenizers.Tokenizer:
    """In the manner of Qwen2: NFC, and a pattern of its own."""
    tokenizer = byte_level()
    pattern = tokenizers.Regex(r"(?i:'s|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return tokenizer


def fallback(prefix: str) -> tokenizers.Tokenizer:
    """In the manner of Llama 2 ("prepend"), its later form ("metaspace") and Gemma ("none")."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        CORPUS[:2] * 3, trainers.BpeTrainer(vocab_size=200, show_progress=False, limit_alphabet=60)
    )
    content = json.loads(trained.to_str())["model"]
    first = ["<unk>", *(f"<0x{value:02X}>" for value in range(256))]
    vocab = {token: i for i, token in enumerate([*first, *content["vocab"]])}
    merges: Any = [tuple(pair) for pair in content["merges"]]  # its annotation lacks pairs
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif prefix == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    if prefix != "none":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    _specials(tokenizer)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def metaspace_decoder() -> tokenizers.Tokenizer:
    tokenizer = fallback("metaspace")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "nfc": normalised_byte_level,
    "prepend": lambda: fallback("prepend"),
    "metaspace": lambda: fallback("metaspace"),
    "no prefix": lambda: fallback("none"),
    "metaspace decoder": metaspace_decoder,
}
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}
