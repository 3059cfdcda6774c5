"""Corpora: what is read, what is refused, and on which side of the split each document falls."""

import argparse
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raising import refused
from topograd.data import corpus as module
from topograd.data.corpus import Corpus, Document, digest_documents, read_corpus, split_documents
from topograd.errors import DataError

small = settings(deadline=None, max_examples=60)

LINE = "The quick brown fox jumps over the lazy dog.\n"
LONG = LINE * 20


@pytest.fixture(scope="module")
def embedded() -> Corpus:
    return read_corpus(None)


def test_embedded_corpus_is_the_library_and_its_reference(embedded: Corpus) -> None:
    texts = {document.name: document.text for document in embedded.train + embedded.heldout}
    assert texts["argparse.py"] == Path(argparse.__file__).read_bytes().decode()
    assert "if" in texts["pydoc_data/topics/if"]
    assert len(texts) == len(embedded.train) + len(embedded.heldout)
    unwanted = ("site-packages", "/test/", "/tests/", "_sysconfigdata", "cp1252", "pydoc_data/topics.py")
    assert [name for name in texts if any(part in name for part in unwanted)] == []
    assert sum(map(len, texts.values())) > 5_000_000


def test_embedded_split_is_a_few_percent_and_fixed(embedded: Corpus) -> None:
    heldout = {document.name for document in embedded.heldout}
    assert 0.02 < len(heldout) / (len(heldout) + len(embedded.train)) < 0.08
    assert {"traceback.py", "secrets.py"} <= heldout  # a change of the hash would move them
    again = read_corpus(None)
    assert (again.digest, again.train) == (embedded.digest, embedded.train)


def test_text_file_gives_its_last_tenth(tmp_path: Path) -> None:
    path = tmp_path / "fox.txt"
    path.write_bytes(b"\xef\xbb\xbf" + LONG.encode())
    corpus = read_corpus(path)
    [train], [heldout] = corpus.train, corpus.heldout
    assert train.text + heldout.text == LONG
    assert train.text.endswith("\n")
    assert 0.1 <= len(heldout.text) / len(LONG) <= 0.2
    assert corpus.name == "fox.txt"


def test_single_document_without_late_line_break_is_cut_anyway() -> None:
    train, heldout = split_documents([Document("a", "title\n" + "x" * 994)])
    assert (len(train[0].text), len(heldout[0].text)) == (900, 100)


def test_jsonl_is_one_document_per_line(tmp_path: Path) -> None:
    path = tmp_path / "many.JSONL"
    texts = [f"number {i}: {LINE}\u2028 and more" for i in range(50)]
    lines = [json.dumps({"text": text, "id": i}, ensure_ascii=False) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + '\n\n{"text": ""}\n', encoding="utf-8")
    corpus = read_corpus(path)
    result = sorted(corpus.train + corpus.heldout, key=lambda d: int(d.name.split(":")[1]))
    assert [document.text for document in result] == texts
    assert result[7].name == "many.JSONL:8"
    assert corpus.train
    assert corpus.heldout


@pytest.mark.parametrize(
    "line", ["{not json", '["text"]', '{"body": "x"}', '{"text": 3}', '{"text": "\\ud800"}', "[" * 100_000]
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"text": LONG}) + "\n" + line + "\n")
    with refused(DataError, setting="path") as caught:
        read_corpus(path)
    assert "\n" not in str(caught.value)


def test_directory_reads_text_and_skips_the_rest(tmp_path: Path) -> None:
    root = tmp_path / "data"
    (root / "sub" / ".hidden").mkdir(parents=True)
    (root / "b.txt").write_text(LONG)
    (root / "sub" / "a.md").write_text(LINE)
    (root / "sub" / "c.jsonl").write_text(json.dumps({"text": LINE}) + "\n")
    (root / "sub" / ".hidden" / "d.txt").write_text("hidden")
    (root / ".e.txt").write_text("hidden")
    (root / "f.bin").write_bytes(b"\xff\xfe\x00")
    (root / "g.dat").write_bytes(b"caf\xe9")
    (root / "h.txt").write_text("")
    (tmp_path / "outside.txt").write_text("outside")
    (root / "i.txt").symlink_to(tmp_path / "outside.txt")
    (root / "j.txt").symlink_to("b.txt")
    (root / "k.txt").symlink_to("nowhere")
    (root / "l.txt").symlink_to(".e.txt")
    (root / "m").symlink_to("sub", target_is_directory=True)
    os.mkfifo(root / "pipe")
    corpus = read_corpus(root)
    names = sorted(document.name for document in corpus.train + corpus.heldout)
    assert names == ["b.txt", "l.txt", "sub/a.md", "sub/c.jsonl:1"]
    assert [entry.split(":")[0] for entry in corpus.skipped] == ["'f.bin'", "'g.dat'", "'h.txt'"]
    assert "not UTF-8 (a bad byte at 3)" in corpus.skipped[1]
    (tmp_path / "moved").mkdir()
    assert read_corpus(root.rename(tmp_path / "moved" / "data")).digest == corpus.digest


def test_names_that_are_not_unicode_are_read(tmp_path: Path) -> None:
    for number in range(2):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff%d.txt" % number)).write_text(LONG)
    corpus = read_corpus(tmp_path)
    assert len(corpus.train) == len(corpus.heldout) == 1


@pytest.mark.parametrize("content", [b"", b"too short", b"caf\xe9" * 200, b"a\0" * 200])
def test_unusable_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd\nname.txt"
    path.write_bytes(content)
    with refused(DataError, setting="path") as caught:
        read_corpus(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.txt", "x" * 5000, "nul\0byte"])
def test_missing_or_unreadable_path_is_one_line(tmp_path: Path, name: str) -> None:
    with refused(DataError, setting="path") as caught:
        read_corpus(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with refused(DataError, setting="path"):
        read_corpus(tmp_path / "pipe")


def test_file_over_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(LONG)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 100)
    with refused(DataError, setting="path"):
        read_corpus(tmp_path)


@small
@given(st.lists(st.integers(1, 300), min_size=2, max_size=30), st.integers(0, 10**6))
def test_split_is_a_partition_that_leaves_half_for_training(sizes: list[int], salt: int) -> None:
    documents = [Document(f"{salt}/{i}", "x" * size) for i, size in enumerate(sizes)]
    train, heldout = split_documents(documents)
    assert heldout
    assert sorted(map(id, train + heldout)) == sorted(map(id, documents))
    assert sum(len(document.text) for document in train) >= sum(sizes) / 2


def test_digest_sees_every_boundary() -> None:
    def of(*pairs: tuple[str, str]) -> str:
        return digest_documents([Document(name, text) for name, text in pairs])

    digests = {of(("a", "bc")), of(("ab", "c")), of(("a", "b"), ("", "c")), of(("a", "b"), ("c", "")), of()}
    assert len(digests) == 5
