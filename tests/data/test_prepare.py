"""Preparation: built once, found again, rebuilt when damaged, never mixed up."""

import os
from importlib import import_module
from pathlib import Path

import pytest

from raising import refused
from topograd.data.bpe import BPETokenizer
from topograd.data.prepare import Prepared, default_cache, prepare
from topograd.errors import ConfigError, DataError

LINES = [f"line {i} of a text that is long enough to be split and packed\n" for i in range(40)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(LINES))
    return path


def decoded(prepared: Prepared) -> str:
    documents = [*prepared.train, *prepared.heldout]
    return "".join(prepared.tokenizer.decode(document) for document in documents)


@pytest.mark.parametrize(("kind", "vocab"), [("bytes", 0), ("bpe", 280)])
def test_shards_hold_the_text(tmp_path: Path, text: Path, kind: str, vocab: int) -> None:
    prepared = prepare(text, kind, vocab, tmp_path / "cache")
    assert decoded(prepared) == "".join(LINES)
    assert prepared.tokenizer.kind == kind
    assert prepared.train.vocab == prepared.heldout.vocab == prepared.tokenizer.vocab
    assert prepared.train.separator == prepared.tokenizer.separator
    assert (prepared.corpus_name, prepared.skipped) == ("text.txt", ())
    assert prepared.train.meta["corpus"] == prepared.digest


def test_second_time_nothing_is_built(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(text, "bpe", 280, tmp_path / "cache")
    monkeypatch.setattr(BPETokenizer, "train", None)
    monkeypatch.setattr(import_module("topograd.data.prepare"), "write_shards", None)
    second = prepare(text, "bpe", 280, tmp_path / "cache")
    assert second.tokenizer.digest == first.tokenizer.digest
    assert second.train.folder == first.train.folder


def test_every_damaged_file_is_built_again(tmp_path: Path, text: Path) -> None:
    cache = tmp_path / "cache"
    first = prepare(text, "bpe", 280, cache)
    files = [path for path in sorted(cache.rglob("*")) if path.is_file() and path.suffix != ".lock"]
    assert len(files) == 1 + 2 * 3
    for path in files:
        whole = path.read_bytes()
        for damaged in (whole[:-3], whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]):
            path.write_bytes(damaged)
            again = prepare(text, "bpe", 280, cache)
            assert again.tokenizer.digest == first.tokenizer.digest
            assert decoded(again) == "".join(LINES)
            assert path.read_bytes() == whole


def test_entries_are_keyed_by_text_and_settings(tmp_path: Path, text: Path) -> None:
    cache = tmp_path / "cache"
    folders = {prepare(text, "bpe", vocab, cache).train.folder for vocab in (270, 280)}
    folders.add(prepare(text, "bytes", 0, cache).train.folder)
    text.write_text("".join(LINES[:-1]))
    folders.add(prepare(text, "bytes", 0, cache).train.folder)
    assert len(folders) == 4


def test_given_tokenizer_is_used(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = BPETokenizer.train(["another text entirely, entirely another text"], 262)
    monkeypatch.setattr(BPETokenizer, "train", None)
    prepared = prepare(text, "bpe", 280, tmp_path / "cache", tokenizer=own)
    assert prepared.tokenizer is own
    assert prepared.train.vocab == own.vocab
    assert decoded(prepared) == "".join(LINES)


def test_default_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "topograd"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_cache() == tmp_path / "home" / ".cache" / "topograd"


def test_default_cache_is_used(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = prepare(text, "bytes", 0).train.folder
    assert folder is not None
    assert folder.is_relative_to(tmp_path / "xdg" / "topograd")


@pytest.mark.parametrize("given", ["", " ", "\t\n"])
def test_an_empty_path_is_not_the_current_folder(
    given: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(DataError, setting="path"):
        prepare(given, "bytes", 0, tmp_path / "cache")
    assert decoded(prepare(".", "bytes", 0, tmp_path / "cache")) == "".join(LINES)
    assert decoded(prepare(str(text), "bytes", 0, tmp_path / "cache")) == "".join(LINES)


def test_an_unknown_kind_is_one_line(tmp_path: Path, text: Path) -> None:
    with refused(ConfigError, setting="tokenizer_kind", given="words"):
        prepare(text, "words", 280, tmp_path / "cache")
    assert not os.path.exists(tmp_path / "cache")
