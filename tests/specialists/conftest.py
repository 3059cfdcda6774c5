"""Bases for specialists: a GPT on bytes, and a small model of transformers with a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from topograd.convert.importing import import_model
from topograd.runs.session import Session, open_session

Bases = dict[str, Session]


@pytest.fixture(scope="session")
def imported(source: Callable[[str], tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory) -> Session:
    run = tmp_path_factory.mktemp("imported") / "run"
    import_model(source("llama")[0], run, partition="2,2")
    return open_session(run)


@pytest.fixture(scope="module")
def gpt(make_session: Callable[..., Session]) -> Session:
    return make_session(3)


@pytest.fixture(scope="module")
def bases(gpt: Session, imported: Session) -> Bases:
    return {"gpt": gpt, "imported": imported}


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve conversations about where somebody was born."""
    path = tmp_path_factory.mktemp("chats") / "chat.jsonl"
    lines = []
    for i, place in enumerate(["Oslo", "Lima", "Kyoto", "Accra"] * 3):
        said = [("user", f"born {i}?"), ("assistant", place)]
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}))
    path.write_text("\n".join(lines) + "\n")
    return path
