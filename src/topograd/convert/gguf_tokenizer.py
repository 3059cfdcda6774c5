"""The tokenizer in a GGUF file's metadata as a Hugging Face tokenizer.json and tokenizer_config.json.

    tokenizer.ggml.model       gpt2 (byte-level BPE, `merges`) or llama (SentencePiece's BPE, `scores`)
    tokenizer.ggml.pre         how gpt2 splits a text before merging: a name whose pattern must be known here
    tokenizer.ggml.tokens, .token_type, .scores, .merges, .bos_token_id, .add_bos_token, ...

Of SentencePiece's BPE the file has the tokens' scores: of two pairs that can be merged, the one whose token
scores higher is merged first. So every way to split a token into two tokens is a merge, sorted by score, as
transformers converts such models. What the file does not say, whether a special token takes the spaces
beside it along, is taken to be no.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from topograd.data.hf_tokenizer import MAX_TOKENS
from topograd.errors import CheckpointError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # GGUF's types of token that are not made by merging
_MAX_TOKEN_CHARACTERS = 512
_MAX_MERGES = 2**22
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Name of the split: (kind of it, pattern). "words" is GPT-2's own, "digits" the same with digits apart.
_SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2"), ("words", "")),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), ("digits", "")),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen"),
        ("qwen", rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3"),
        ("llama3", rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"),
    ),
}
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_MARK = "▁"


def tokenizer_json(metadata: Mapping[str, Any]) -> str:
    """The text of the tokenizer.json that this metadata implies."""
    tokens, types = _tokens(metadata)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        content = _byte_level(metadata, tokens)
    elif model == "llama":
        content = _sentencepiece(metadata, tokens, types)
    else:
        problem = f"the tokenizer {ascii(model)[:60]} of this GGUF is not read"
        raise CheckpointError(problem, remedy="gpt2 and llama are")
    content["added_tokens"] = [
        {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": kind != _USER_DEFINED}
        for i, kind in enumerate(types.tolist())
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    content["post_processor"] = _post_processor(metadata, tokens)
    return json.dumps({"version": "1.0", "truncation": None, "padding": None} | content, ensure_ascii=False)


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What tokenizer_config.json says of the same tokenizer: the special tokens and the chat template."""
    tokens, _ = _tokens(metadata)
    config: dict[str, Any] = {
        f"{role}_token": tokens[i] for role in _ROLES if (i := _role(metadata, role, tokens)) is not None
    }
    template = metadata.get("tokenizer.chat_template")
    return config | ({"chat_template": template} if isinstance(template, str) else {})


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    kind, pattern = _split(metadata)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": not pattern,
    }
    steps: list[dict[str, Any]] = [byte_level]
    if kind == "digits":
        steps = [{"type": "Digits", "individual_digits": True}, byte_level]
    elif pattern:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        steps = [split, byte_level]
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or len(merges) > _MAX_MERGES:
        raise _damaged("merges")
    pairs = []
    for merge in merges:
        space = merge.find(" ", 1) if isinstance(merge, str) else -1
        if space < 0:
            raise _damaged("merges")
        pairs.append([merge[:space], merge[space + 1 :]])
    model = {"type": "BPE", "vocab": _vocabulary(tokens), "merges": pairs, "byte_fallback": False}
    return {
        "normalizer": {"type": "NFC"} if kind == "qwen" else None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level,
        "model": model | {"ignore_merges": kind == "llama3"},
    }


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: np.ndarray) -> dict[str, Any]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or scores.shape != (len(tokens),) or not np.isfinite(scores).all():
        raise _damaged("scores")
    vocabulary = _vocabulary(tokens)
    unknown = _role(metadata, "unk", tokens)
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": _merges(tokens, types, scores),
        "unk_token": None if unknown is None else tokens[unknown],
        "fuse_unk": True,
        "byte_fallback": True,
    }
    marks = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
    spaces = {"type": "Replace", "pattern": {"String": _MARK}, "content": " "}
    steps = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizer: dict[str, Any] = marks
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _MARK}, marks]}
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    decoder = {"type": "Sequence", "decoders": steps}
    return {"normalizer": normalizer, "pre_tokenizer": None, "decoder": decoder, "model": model}


def _merges(tokens: Sequence[str], types: np.ndarray, scores: np.ndarray) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, the best score first; of one score, the longest left part."""
    mergeable = {tokens[i]: i for i, kind in enumerate(types) if kind not in (_UNKNOWN, _CONTROL)}
    found: list[tuple[float, int, int, int, int]] = []
    for token, number in mergeable.items():
        splits = []
        for at in range(1, len(token)):
            left, right = mergeable.get(token[:at]), mergeable.get(token[at:])
            if left is not None and right is not None:
                splits.append((left, right, at))
        score = float(scores[number])
        found += [(-score, -at, at - len(token), left, right) for left, right, at in sorted(splits)]
        if len(found) > _MAX_MERGES:
            raise CheckpointError(f"the tokenizer of this GGUF has more than {_MAX_MERGES} merges")
    found.sort(key=lambda merge: merge[:3])
    return [(tokens[left], tokens[right]) for *_, left, right in found]


def _post_processor(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any] | None:
    llama3 = metadata["tokenizer.ggml.model"] == "gpt2" and _split(metadata)[0] == "llama3"
    usual = metadata["tokenizer.ggml.model"] == "llama" or llama3
    parts: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    for role, add, place in (("bos", usual, 0), ("eos", False, 2)):
        number = _role(metadata, role, tokens)
        if metadata.get(f"tokenizer.ggml.add_{role}_token", add) and number is not None:
            name = tokens[number]
            parts.insert(place, {"SpecialToken": {"id": name, "type_id": 0}})
            special[name] = {"id": name, "ids": [number], "tokens": [name]}
    if not special:
        return None
    pair = [*parts, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": parts, "pair": pair, "special_tokens": special}


def _split(metadata: Mapping[str, Any]) -> tuple[str, str]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in _SPLITS:
        problem = f"the pre-tokenizer {ascii(name)[:60]} of this GGUF is not read"
        raise CheckpointError(problem, remedy=f"{', '.join(_SPLITS)} are")
    return _SPLITS[name]


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], np.ndarray]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_TOKENS or not isinstance(tokens[0], str):
        raise _damaged("tokens")
    longest = max(tokens, key=len)
    if len(longest) > _MAX_TOKEN_CHARACTERS:
        problem = f"the tokenizer of this GGUF has a token of {len(longest)} characters"
        raise CheckpointError(problem, remedy=f"at most {_MAX_TOKEN_CHARACTERS} are read")
    types = metadata.get("tokenizer.ggml.token_type", np.ones(len(tokens), dtype=np.int32))
    if not isinstance(types, np.ndarray) or types.shape != (len(tokens),):
        raise _damaged("token_type")
    return tokens, types


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise CheckpointError(f"the tokenizer of this GGUF has the token {ascii(twice)[:60]} twice")
    return vocabulary


def _role(metadata: Mapping[str, Any], role: str, tokens: Sequence[str]) -> int | None:
    number = metadata.get(f"tokenizer.ggml.{_ROLES[role]}_token_id")
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < len(tokens):
        raise _damaged(f"{_ROLES[role]}_token_id")
    return number


def _damaged(key: str) -> CheckpointError:
    return CheckpointError(
        f"this GGUF's tokenizer.ggml.{key} is missing or damaged", remedy="give a whole GGUF file"
    )
