"""What several folders of tests share: a cache of their own, and a small text."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that a test prepares stays in the cache of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = random.Random(0).choices(["stage", "gradient", "layer", "stack", "relay", "loss"], k=900)
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    path.write_text(" ".join(chosen))
    return path
