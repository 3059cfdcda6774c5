"""The tokenizer protocol.

    BPETokenizer    bpe.py            ours: bytes, or byte pair encoding trained on a corpus
    HFTokenizer     hf_tokenizer.py   a tokenizer.json of Hugging Face's

`load_tokenizer` (tokenizer_file.py) reads the file of either. Three kinds of text are encoded:

    document    nothing is added, and text that spells a special token is text
    prompt      as transformers does by default: special tokens that it spells are recognised, and those that
                the tokenizer puts around a text are added
    chat        what a chat template gave: special tokens are recognised, and none is added

Ours has no special tokens that text can spell, so there the three are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import numpy as np

from topograd.errors import ConfigError, DataError
from topograd.files import write_atomic

if TYPE_CHECKING:
    from topograd.data.hf_tokenizer import HFTokenizer

FILE = "tokenizer.json"
TextKind = Literal["document", "prompt", "chat"]


class Tokenizer(Protocol):
    """The interface of a tokenizer. Subclasses inherit the methods that are written here."""

    kind: str
    """Its kind of model: "bytes", "bpe", "unigram"."""
    pieces: tuple[bytes, ...]
    """What each id decodes to; a special token to nothing."""
    separator: int
    """The id that stands before each document."""
    start_tokens: list[int]
    """The tokens before a text that is scored whole; none if the model was trained without."""
    stop_tokens: frozenset[int]
    """The ids that end generation; none if the model continues with the next document."""
    special_ids: dict[str, int]
    """The ids of the tokens that have a role: {"eos": 2}."""
    special_tokens: dict[str, str]
    """The texts of the same, by their names in chat templates: {"eos_token": "</s>"}."""
    chat_template: str | None

    @property
    def digest(self) -> str:
        """The SHA-256 (hex) of all that decides how it encodes."""
        ...

    def encode(self, text: str, kind: TextKind = "document") -> list[int]:
        """The ids of a text; a document has no separator."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each document as a uint32 array."""
        ...

    def files(self) -> dict[str, str]:
        """The files that it is saved as: the content of each by its name. One is tokenizer.json."""
        ...

    def to_hf(self) -> HFTokenizer:
        """The tokenizer as Hugging Face's, for export."""
        ...

    @property
    def vocab(self) -> int:
        """The number of ids."""
        return len(self.pieces)

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """(vocab,) int64: the number of bytes that each id decodes to, 0 for special tokens."""
        return np.array([len(piece) for piece in self.pieces], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens. Bytes that are not UTF-8 become U+FFFD."""
        numbers = [int(i) for i in ids]
        wrong = next((i for i in numbers if not 0 <= i < self.vocab), None)
        if wrong is not None:
            raise DataError(setting="ids", given=wrong, allowed=f"in 0..{self.vocab - 1}")
        return b"".join(self.pieces[i] for i in numbers).decode("utf-8", "replace")

    def get_chat_template(self) -> str:
        """The chat template; raises ConfigError if there is none."""
        if self.chat_template is None:
            problem = "the model's tokenizer has no chat template"
            raise ConfigError(
                problem, setting="chat_template", remedy="continue a text instead (topograd generate)"
            )
        return self.chat_template

    def save(self, path: Path) -> None:
        """Write tokenizer.json as `path`, and the other files beside it, each atomically."""
        for name, content in self.files().items():
            write_atomic(path if name == FILE else path.with_name(name), content)


def check_kind(kind: str) -> None:
    """Raise ConfigError for an unknown kind of text."""
    if kind not in get_args(TextKind):
        raise ConfigError(setting="kind", given=kind, allowed=f"one of {', '.join(get_args(TextKind))}")


def utf8(text: str) -> bytes:
    """The text's bytes; half a surrogate pair raises DataError."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"text holds half a surrogate pair at character {error.start}: only valid Unicode can be encoded",
            setting="text",
            given=error.start,
        ) from error


@contextmanager
def without_pool() -> Iterator[None]:
    """Keep the `tokenizers` library from starting its thread pool, and leave the environment as it was."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
