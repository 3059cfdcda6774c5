"""Hugging Face tokenizers: tokenizer.json, run by the `tokenizers` library.

Its file is the given tokenizer.json, byte for byte; the rest (which token ends a text, whether one
is put before it, the chat template) is in tokenizer_config.json, which is read and saved beside
it where there is one. A chat_template.jinja, where transformers keeps the template today, is read too and
wins.

`pieces` are the bytes of each token, so a text can be decoded token by token. They exist for tokenizers whose
decoder takes each token by itself: byte-level, and SentencePiece's "▁" with bytes as a fallback. The decoder
of the second kind drops the space before a text, and so does `decode`; a stream that continues a text must
not, and does not. Bytes that are not UTF-8 decode to U+FFFD as in Python; transformers differs there for the
fallback (it replaces every byte of such a run, the valid ones too).

Limits. The bytes of the tokens are those of the normalised text: where a tokenizer normalises (NFC, a space
before the text), they can differ from the document's by a few. Patterns in a tokenizer.json are run as they
are: a hostile one can be slow.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import processors

from topograd.data.bpe import bytes_of
from topograd.data.tokenizer import FILE, TextKind, Tokenizer, check_kind, utf8, without_pool
from topograd.errors import DataError
from topograd.files import dump_json, read_bytes, read_json

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
MAX_TOKENS = 2**21
_MAX_BYTES = 2**28
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Tokens by which known models end a document or their turn, the ends of documents first.
_ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>",
    "<end_of_turn>", "<|end|>",
)  # fmt: skip


class HFTokenizer(Tokenizer):
    """A tokenizer given by the text of a tokenizer.json and the content of a tokenizer_config.json."""

    def __init__(self, text: str, config: Mapping[str, Any] | None = None) -> None:
        self._text = text
        self.config = dict(config or {})
        """What tokenizer_config.json holds; empty where there is none."""
        self._prompts = _built(text, self.config)
        content = json.loads(text)
        self.kind = str(content["model"].get("type") or "BPE").lower()
        self._decoder = _Decoder(content.get("decoder"))
        self.pieces = _pieces(self._prompts, self._decoder)
        tokens = {role: token for role in ROLES if (token := _token(self.config, role)) is not None}
        ids = {role: self._prompts.token_to_id(token) for role, token in tokens.items()}
        self.special_ids = {role: i for role, i in ids.items() if i is not None}
        texts = {role: str(self._prompts.id_to_token(i)) for role, i in self.special_ids.items()}
        self.special_tokens = {f"{role}_token": text for role, text in texts.items()}
        self.chat_template = _template(self.config)
        self.start_tokens = _ids(self._prompts, "", add=True)
        added = self._prompts.get_added_tokens_decoder()
        special = {token.content: i for i, token in sorted(added.items()) if token.special}
        ends = [special[name] for name in _ENDS if name in special]
        ends += [self.special_ids["eos"]] if "eos" in self.special_ids else []
        self.stop_tokens = frozenset([*self.declared_ends, *ends])
        self.separator = self._find_separator(special, ends)

    @property
    def declared_ends(self) -> list[int]:
        """The stop tokens of the model's own settings, which a tokenizer does not know (`load`)."""
        ids = self.config.get("stop_token_ids")
        return [i for i in ids if type(i) is int] if isinstance(ids, list) else []

    @cached_property
    def digest(self) -> str:
        """The SHA-256 (hex) of the file and of what the config changes about it."""
        what = {key: self.config[key] for key in ("add_bos_token", "add_eos_token") if key in self.config}
        settings = json.dumps([what, self.special_tokens], sort_keys=True)
        return hashlib.sha256(f"{settings}\n{self._text}".encode()).hexdigest()

    def encode(self, text: str, kind: TextKind = "document") -> list[int]:
        """The ids of a text; of a prompt as transformers gives them by default."""
        check_kind(kind)
        with without_pool():
            if kind == "document":
                return _ids(self._documents, text)
            return _ids(self._prompts, text, add=kind == "prompt")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each document as a uint32 array."""
        documents = self._documents  # made here, not by several threads at once
        with without_pool(), ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda text: np.array(_ids(documents, text), dtype=np.uint32), texts))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens. Bytes that are not UTF-8 become U+FFFD."""
        numbers = [int(i) for i in ids]
        text = super().decode(numbers)
        first = next((i for i in numbers if 0 <= i < self.vocab and self.pieces[i]), None)
        return text if first is None else self._decoder.begin(text, str(self._prompts.id_to_token(first)))

    def files(self) -> dict[str, str]:
        """The tokenizer.json as it was given, and a tokenizer_config.json if it has one."""
        config = {CONFIG_FILE: dump_json(self.config, indent=2) + "\n"} if self.config else {}
        return config | {FILE: self._text}

    def to_hf(self) -> "HFTokenizer":
        """Itself."""
        return self

    @classmethod
    def load(cls, path: Path, stop_token_ids: Sequence[int] = ()) -> "HFTokenizer":
        """Read a tokenizer.json, and the config and the chat template beside it if they are there.

        `stop_token_ids` are the stop tokens of the model's own settings.
        """
        text = _read(path)
        beside, template = path.with_name(CONFIG_FILE), path.with_name(TEMPLATE_FILE)
        config = read_json(beside, DataError) if beside.is_file() else {}
        if not isinstance(config, dict):
            problem, remedy = f"{beside} is damaged, it holds no JSON object", "restore it or remove it"
            raise DataError(problem, setting="path", given=beside, remedy=remedy)
        if template.is_file():
            config |= {"chat_template": _read(template)}
        if stop_token_ids:
            config |= {"stop_token_ids": list(stop_token_ids)}
        return cls(text, config)

    @cached_property
    def _documents(self) -> tokenizers.Tokenizer:
        tokenizer = _built(self._text, self.config)
        tokenizer.encode_special_tokens = True  # the library's name for: spelled ones are encoded as text
        return tokenizer

    def shared_ids(self) -> list[tuple[str, str]]:
        """Pairs of tokens that have one id, which no sound tokenizer has."""
        first: dict[int, str] = {}
        vocabulary = self._prompts.get_vocab(with_added_tokens=True)
        return [(first[i], token) for token, i in vocabulary.items() if first.setdefault(i, token) != token]

    def _find_separator(self, special: Mapping[str, int], ends: Sequence[int]) -> int:
        """What the tokenizer itself puts before a text, or else what ends one."""
        before = [i for i in self.start_tokens[:1] if i in special.values()]
        bos = [self.special_ids["bos"]] if "bos" in self.special_ids else []
        separator = next(iter([*before, *ends, *bos, *special.values()]), None)
        if separator is None:
            raise _unusable("it has no special token that could stand between documents")
        return separator


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            problem = f"{path} has more than {_MAX_BYTES} bytes: that is no {path.name}"
            raise DataError(problem, setting="path", given=path)
        return read_bytes(path).decode()
    except OSError as problem:
        text, remedy = f"{path} cannot be read ({problem.strerror})", f"give a {path.name}"
        raise DataError(text, setting="path", given=path, remedy=remedy) from None
    except UnicodeDecodeError:
        raise DataError(setting="path", given=path, allowed=f"a {path.name} in UTF-8") from None


def _ids(tokenizer: tokenizers.Tokenizer, text: str, *, add: bool = False) -> list[int]:
    utf8(text)
    with _library():
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add)
    return encoding.ids


@contextmanager
def _library() -> Iterator[None]:
    """Errors of the library as one line; it panics on some files, which is no Exception."""
    try:
        yield
    except BaseException as problem:
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":
            raise
        raise _unusable(" ".join(str(problem).split())[:200]) from None


def is_tokenizer_json(content: object) -> bool:
    """Whether the content of a JSON file is that of a tokenizer.json."""
    return isinstance(content, dict) and isinstance(content.get("model"), dict) and "added_tokens" in content


class _Decoder:
    """The decoder of a tokenizer.json: text replacements, and bytes of one kind."""

    def __init__(self, content: Any) -> None:
        self._strip = 0
        self._mark = ""
        self._replace: list[tuple[str, str]] = []
        self._bytes = ""
        steps = content.get("decoders") if _kind(content) == "Sequence" else [content]
        for step in steps if isinstance(steps, list) else [None]:
            self._add(_kind(step), step)

    def piece(self, token: str) -> bytes:
        if self._bytes == "ByteLevel":
            content = bytes_of(token)
            return token.encode() if content is None else content
        for old, new in self._replace:
            token = token.replace(old, new)
        if self._bytes == "ByteFallback" and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.encode()

    def begin(self, text: str, token: str) -> str:
        """A whole text as the decoder begins it, given its first token: without the space put before it."""
        if self._mark and self._mark in token:  # Metaspace drops every one of the first token
            return token.replace(self._mark, "") + text[len(token) :]
        lead = len(text) - len(text.lstrip(" "))
        return text[min(lead, self._strip) :]

    def _add(self, kind: str, step: Any) -> None:
        if kind in ("ByteLevel", "ByteFallback"):
            self._bytes = kind
        elif kind == "Replace" and isinstance(step.get("pattern", {}).get("String"), str):
            self._replace.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            self._strip = step["start"]
        elif kind == "Metaspace":
            self._replace.append((step["replacement"], " "))
            self._mark = step["replacement"] if step.get("prepend_scheme", "always") != "never" else ""
        elif kind != "Fuse":
            raise _unusable(f"its decoder {kind} does not take each token by itself")


def _kind(step: Any) -> str:
    return str(step.get("type")) if isinstance(step, dict) else "None"


def _pieces(tokenizer: tokenizers.Tokenizer, decoder: _Decoder) -> tuple[bytes, ...]:
    """The bytes of each id up to the last; nothing for special tokens, and for ids that nothing has."""
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    last = max(tokens.values(), default=-1)
    if not 0 <= last < MAX_TOKENS:
        raise _unusable(f"its ids go up to {last}; at least one and at most {MAX_TOKENS} ids are allowed")
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    pieces = [b""] * (last + 1)
    for token, i in tokens.items():
        if i not in special:
            pieces[i] = decoder.piece(token)
    return tuple(pieces)


def _built(text: str, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The library's tokenizer, without cutting and padding, with the config's own choice of bos and eos."""
    with _library():
        tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if "add_bos_token" in config or "add_eos_token" in config:
        tokenizer.post_processor = _processor(tokenizer, config)
    return tokenizer


def _processor(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> processors.TemplateProcessing:
    parts, ids = ["$A"], []
    for role, place in (("bos", 0), ("eos", 2)):
        token = _token(config, role)
        number = None if token is None else tokenizer.token_to_id(token)
        if config.get(f"add_{role}_token") is True and token is not None and number is not None:
            parts.insert(place, token)
            ids.append((token, number))
    return processors.TemplateProcessing(single=parts, special_tokens=ids)


def _token(config: Mapping[str, Any], role: str) -> str | None:
    """The text of the token with a role: given as such, or as the content of a table."""
    entry = config.get(f"{role}_token")
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _template(config: Mapping[str, Any]) -> str | None:
    """The chat template, which may be one of several by name."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def _unusable(reason: str) -> DataError:
    return DataError(
        f"this tokenizer.json cannot be used: {reason}",
        setting="tokenizer",
        remedy="give one of a byte-level or ▁ tokenizer",
    )
