"""Beginnings of texts: functions of a seed, and turns of a chat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from topograd.convert.prompts import Chat, Prompts
from topograd.data.hf_tokenizer import HFTokenizer


def test_beginnings_lead_elsewhere(prompts: Prompts) -> None:
    first = [prompts.row(i, 16).next(ended=False) for i in range(20)]
    assert first == [prompts.row(i, 16).next(ended=False) for i in range(20)]
    assert len({tuple(tokens) for tokens in first}) > 3
    assert all(tokens[0] == prompts.tokenizer.separator for tokens in first)
    assert Chat.of(prompts.tokenizer) is None


def test_chats_are_rendered_once(source: Callable[[str], tuple[Path, Any]]) -> None:
    """The turns around the questions, split off one rendering of the model's own template."""
    folder, _ = source("llama")
    tokenizer = HFTokenizer.load(folder / "tokenizer.json")
    chat = Chat.of(tokenizer)
    assert chat is not None
    assert tokenizer.decode(chat.first).endswith("<|user|>")
    assert tokenizer.decode(chat.behind) == "\n<|assistant|>"
    row = next(row for i in range(40) if (row := Prompts(tokenizer, [], 0).row(i, 64)).chats)
    opening, later = row.next(ended=False), row.next(ended=True)
    assert tokenizer.decode(opening).startswith("<|user|>")
    assert tokenizer.decode(later).count("<|user|>") == 1
