"""A tiny run and its own text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from topograd.convert.own_text import OwnText, OwnTextConfig, write_own_text
from topograd.convert.prompts import Prompts
from topograd.data.corpus import Document
from topograd.decode.depths import engine_of
from topograd.runs.session import LoadedTextRun

SHAPE = OwnTextConfig(length=16, rows=8)


@pytest.fixture(scope="module")
def session(make_session: Callable[..., LoadedTextRun]) -> LoadedTextRun:
    """A run of three stages on bytes."""
    return make_session(3)


@pytest.fixture(scope="module")
def prompts(session: LoadedTextRun) -> Prompts:
    documents = [Document("a", "stage loss relay\n" * 40), Document("b", "loss\n" * 90)]
    return Prompts(session.tokenizer, documents)


@pytest.fixture(scope="module")
def text(session: LoadedTextRun, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> OwnText:
    """512 tokens of the run's own."""
    folder = tmp_path_factory.mktemp("text")
    return write_own_text(folder, engine_of(session), prompts, session.weights, 512, SHAPE)
