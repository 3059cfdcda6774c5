"""Training records: chats with loss masks, or any text, as packed sequences of tokens.

    chat.jsonl     a line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}
    pairs.jsonl    or {"prompt": "...", "completion": "..."}: the completion alone is learned
    text           everything else that `data.corpus` reads: .txt, folders, {"text": "..."} a line

A conversation is spelled by the base's own chat template, or by PLAIN_TEMPLATE where it has none. Its loss
mask covers the assistant's messages and the token that ends each: the text before a message (ready for the
answer) and the text up to its end are rendered, and the difference is learned. Of any text every token is
learned.

Documents become rows by best-fit packing (`data/packing.py`); a position without a target has -100. Cost: one
rendering for each message that is learned and one before it, 256 in a process.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topograd.convert.chat import render_chats
from topograd.data import Prepared, Tokenizer
from topograd.data.corpus import Document, digest_documents, read_corpus, split_documents
from topograd.data.loader import IGNORED
from topograd.data.packing import pack
from topograd.data.shards import shards_in_memory
from topograd.errors import ConfigError, DataError
from topograd.files import read_bytes
from topograd.specialists.attach import Attached
from topograd.specialists.tokens import Vocabulary

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""How conversations are spelled for a base without a template of its own."""
ROLES = ("system", "user", "assistant", "tool")
MAX_BYTES = 2**30
CONTEXT = 256
"""Default length of a sequence, where the base's context allows it."""
Message = dict[str, str]


@dataclass(frozen=True)
class Record:
    """One document: its tokens, and which of them are learned."""

    tokens: list[int]
    learned: list[bool]


def template_of(vocabulary: Vocabulary) -> str:
    """The base's own chat template, or the plain one."""
    template = vocabulary.tokenizer.chat_template
    return PLAIN_TEMPLATE if template is None else template


def read_records(path: Path, vocabulary: Vocabulary, template: str | None = None) -> list[Record]:
    """The documents at `path`: chats, pairs or text. An error names the line."""
    if (lines := _chat_lines(path)) is not None:
        return _read_chats(path, lines, vocabulary, template)
    corpus = read_corpus(path)
    documents = vocabulary.tokenizer.encode_batch([d.text for d in (*corpus.train, *corpus.heldout)])
    return [Record(ids.tolist(), [True] * len(ids)) for ids in documents]


def prepare_chats(path: Path, tokenizer: Tokenizer | None) -> Prepared | None:
    """Conversations as the data of a run, in memory; None where the file holds none.

    Some are held out, as of any text. Training has a loss on the assistant's messages; held-out conversations
    are read whole.
    """
    lines = _chat_lines(path)
    if lines is None:
        return None
    if tokenizer is None or len(lines) < 2:
        what = "one conversation" if len(lines) == 1 else "conversations"
        raise DataError(
            f"{path} holds {what}",
            setting="data",
            given=str(path),
            remedy="give init, the run to fine-tune, and at least two conversations; a model that begins "
            'with random weights learns from lines {"text": ...}',
        )
    records = _read_chats(path, lines, Vocabulary(tokenizer, tokenizer.vocab), None)
    named = {f"{path.name}:{number}": record for (number, _), record in zip(lines, records, strict=True)}
    # The digest of a run's data is that of tokens and masks, so another chat template is other data.
    documents = [Document(name, json.dumps([r.tokens, r.learned])) for name, r in named.items()]
    train, heldout = ([named[d.name] for d in side] for side in split_documents(documents))
    shards = [
        shards_in_memory([r.tokens for r in side], tokenizer.vocab, separator=tokenizer.separator)
        for side in (train, heldout)
    ]
    marks = [False, *(mark for record in train for mark in _with_separator(record))]
    learning = replace(shards[0], learned=np.array(marks))
    return Prepared(tokenizer, learning, shards[1], path.name, digest_documents(documents), (), None)


def _with_separator(record: Record) -> list[bool]:
    """The mask of a document and of the separator behind it, which ends its last message."""
    return [*record.learned, bool(record.learned) and record.learned[-1]]


def _chat_lines(path: Path) -> list[tuple[int, dict[str, Any]]] | None:
    """The records of a file of chats or pairs, with their line numbers; None of any other."""
    if path.suffix.lower() != ".jsonl" or not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return None
    is_chat = isinstance(record, dict) and ("messages" in record or "prompt" in record)
    return _lines(path) if is_chat else None


def _read_chats(
    path: Path, lines: Sequence[tuple[int, dict[str, Any]]], vocabulary: Vocabulary, template: str | None
) -> list[Record]:
    chats = [_messages(path, number, record) for number, record in lines]
    return chat_records(chats, vocabulary, template, where=lambda i: f"{path}, line {lines[i][0]}")


def spelled(vocabulary: Vocabulary, questions: Sequence[str], template: str | None = None) -> list[str]:
    """Each question as a conversation of one message, ready for the answer."""
    chats = [([{"role": "user", "content": question}], True) for question in questions]
    return render_chats(template or template_of(vocabulary), chats, vocabulary.tokenizer.special_tokens)


def chat_records(
    chats: Sequence[Sequence[Message]],
    vocabulary: Vocabulary,
    template: str | None = None,
    where: Callable[[int], str] = lambda i: f"conversation {i + 1}",
) -> list[Record]:
    """Conversations as tokens with loss masks."""
    template = template_of(vocabulary) if template is None else template
    wanted: list[tuple[Sequence[Message], bool]] = []
    for chat in chats:
        for i, message in enumerate(chat):
            if message["role"] == "assistant":
                wanted += [(chat[:i], True), (chat[: i + 1], False)]
    texts = iter(render_chats(template, wanted, vocabulary.tokenizer.special_tokens))
    records = []
    for number, chat in enumerate(chats):
        pairs = [(next(texts), next(texts)) for message in chat if message["role"] == "assistant"]
        records.append(_masked(pairs, vocabulary, where(number)))
    return records


def _masked(pairs: Sequence[tuple[str, str]], vocabulary: Vocabulary, where: str) -> Record:
    """The tokens of the longest text; those that lie between a `before` and its `through` are learned."""
    tokens = vocabulary.encode_chat(pairs[-1][1])
    vocabulary.check(tokens)
    learned = [False] * len(tokens)
    for before, through in pairs:
        start, stop = len(vocabulary.encode_chat(before)), len(vocabulary.encode_chat(through))
        if not pairs[-1][1].startswith(through) or not through.startswith(before):
            raise DataError(
                f"{where}: the chat template spells earlier messages otherwise when later ones "
                "follow, so the assistant's messages cannot be located",
                remedy="give conversations of one answer",
            )
        learned[start:stop] = [True] * (stop - start)
    return Record(tokens, learned)


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The records of a JSONL file with their line numbers."""
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path} has more than {MAX_BYTES} bytes", remedy="give a smaller file")
    records = []
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8", remedy="mend it") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise DataError(
                f"{path}, line {number} is not JSON ({problem})", remedy="mend or remove it"
            ) from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number} is no JSON object", remedy="mend or remove it")
        records.append((number, record))
    return records


def _messages(path: Path, number: int, record: Mapping[str, Any]) -> list[Message]:
    """The messages of one line, checked."""
    where = f"{path}, line {number}"
    if "prompt" in record:
        pair = [record.get("prompt"), record.get("completion")]
        if not all(isinstance(text, str) for text in pair) or not pair[1]:
            raise DataError(
                f"{where}: prompt and completion must be text, the completion not empty",
                setting="completion",
                given=pair[1],
            )
        return [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where} has no messages",
            setting="messages",
            remedy='give {"messages": [{"role": ..., "content": ...}]}',
        )
    checked = []
    for place, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise DataError(
                f"{where}: message {place} must have a role and a content that are text",
                setting="messages",
                given=message,
            )
        if message["role"] not in ROLES:
            raise DataError(
                f"{where}: the role of message {place} is {message['role']!r}",
                setting="role",
                given=message["role"],
                allowed=f"one of {', '.join(ROLES)}",
            )
        checked.append({"role": message["role"], "content": message["content"]})
    if not any(message["role"] == "assistant" for message in checked):
        raise DataError(
            f"{where} has no message of the assistant",
            setting="messages",
            remedy="there is nothing to learn from it",
        )
    return checked


def packed_records(
    records: Sequence[Record], separator: int, context: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(inputs, targets), each (rows, context): the documents packed, targets that are not learned -100."""
    if context < 1:
        raise ConfigError(setting="context", given=context, allowed="at least 1")
    parts, marks, offsets = [[separator]], [[False]], [0]
    for record in records:
        parts += [record.tokens, [separator]]
        marks.append(_with_separator(record))
        offsets.append(offsets[-1] + len(record.tokens) + 1)
    stream = np.fromiter((t for part in parts for t in part), dtype=np.int64)
    learned = np.fromiter((m for mark in marks for m in mark), dtype=bool)
    if not learned.any():
        raise DataError(
            "no token of the data is learned",
            setting="data",
            remedy="give text, or conversations with answers",
        )
    rows = pack(np.array(offsets), context + 1, np.random.default_rng(seed))
    inputs = np.full((len(rows), context), separator, dtype=np.int64)
    targets = np.full((len(rows), context), IGNORED, dtype=np.int64)
    for row in range(len(rows)):
        column = 0
        for segment in range(rows.first[row], rows.first[row + 1]):
            start, count = int(rows.starts[segment]), int(rows.counts[segment])
            inputs[row, column : column + count] = stream[start : start + count]
            after = slice(start + 1, start + count + 1)
            targets[row, column : column + count] = np.where(learned[after], stream[after], IGNORED)
            column += count
    learning = (targets != IGNORED).any(axis=1)
    return torch.from_numpy(inputs[learning]), torch.from_numpy(targets[learning])


def rows_of(
    path: Path | str,
    attached: Attached,
    context: int | None = None,
    seed: int = 0,
    template: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The text at `path` as packed rows for a base; CONTEXT tokens each unless asked otherwise."""
    if not str(path).strip():
        raise ConfigError(setting="data", given=str(path), allowed="chat records or a text")
    if not Path(path).exists():
        raise ConfigError(setting="data", given=Path(path), allowed="a file or a folder that exists")
    most = attached.base.config.model.context
    context = context or min(CONTEXT, most)
    if context > most:
        raise ConfigError(setting="context", given=context, remedy=f"the base sees {most} tokens at most")
    records = read_records(Path(path), attached.vocabulary, template)
    return packed_records(records, attached.base.tokenizer.separator, context, seed)
