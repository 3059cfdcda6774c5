"""A remembered hash is used for the same file alone."""

import hashlib
import os
from pathlib import Path

import pytest

from topograd.data import digest_cache
from topograd.data.digest_cache import forget, remembered_sha256


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The files that were read, each time; files count as settled at once."""
    read: list[Path] = []
    real = digest_cache.sha256

    def reading(path: Path) -> str:
        read.append(path)
        return real(path)

    monkeypatch.setattr(digest_cache, "sha256", reading)
    monkeypatch.setattr(digest_cache, "SETTLED", -1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return read


def test_read_once_until_it_changes(counted: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    assert remembered_sha256(file) == remembered_sha256(file) == hashlib.sha256(b"one").hexdigest()
    assert len(counted) == 1
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the file system's clock ticks coarsely
        file.write_bytes(b"two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # set back, as somebody hostile would
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert remembered_sha256(file) == hashlib.sha256(b"two").hexdigest()
    forget(file)
    remembered_sha256(file)
    assert len(counted) == 3


def test_a_file_that_was_just_written_is_not_trusted(
    counted: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_cache, "SETTLED", 1e6)
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    remembered_sha256(file)
    remembered_sha256(file)
    assert len(counted) == 2


def test_a_damaged_or_missing_cache_only_costs_time(
    counted: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    remembered_sha256(file)
    for entry in (tmp_path / "cache").rglob("*.json"):
        entry.write_text("no json")
    assert remembered_sha256(file) == hashlib.sha256(b"one").hexdigest()
    (tmp_path / "blocked").write_text("a file where the cache should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    assert remembered_sha256(file) == hashlib.sha256(b"one").hexdigest()
    assert len(counted) == 3


def test_few_are_remembered(counted: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cache, "MAX_ENTRIES", 2)
    for name in "abc":
        (tmp_path / name).write_bytes(b"x")
        remembered_sha256(tmp_path / name)
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 2


def test_a_cache_that_may_not_be_read_only_costs_time(
    counted: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user may not look into the cache of another."""
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    real = os.stat

    def forbidden(path: object, *args: object, **named: object) -> object:
        if "hashes" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", forbidden)
    monkeypatch.setattr(os, "open", lambda path, *args: forbidden(path))
    for _ in range(2):
        assert remembered_sha256(file) == hashlib.sha256(b"one").hexdigest()
    forget(file)
    assert counted == [file, file]
