"""Where the kernels are, and what is said where they are not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from topograd.runtime.native import library


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is remembered before and after."""
    library._library.cache_clear()
    yield
    library._library.cache_clear()


def test_they_are_built_where_there_is_a_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    assert library._library() is not None, "pip install --editable . builds them"


@pytest.mark.usefixtures("fresh")
def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "HERE", tmp_path)
    assert "not built" in str(library.missing_reason())
    assert library.level() == 0


def test_a_processor_without_avx2_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if library._library() is None:
        pytest.skip("not built")
    monkeypatch.setattr(library, "level", lambda: 0)
    assert "AVX2" in str(library.missing_reason())


def test_a_lower_instruction_set_can_be_used() -> None:
    best = library.level()
    library.use_level(0)
    assert library.level() == 0
    library.use_level(None)
    assert library.level() == best
