"""The cache: bounded, oldest-used first, never what is in use; and work goes on where none can be written."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from topograd.data import cache as module
from topograd.data.cache import InUse, cache_size, prune
from topograd.data.prepare import Prepared, prepare


def text_file(folder: Path, number: int = 0) -> Path:
    path = folder / f"text-{number}.txt"
    path.write_text("".join(f"line {i} of text {number}, which is long enough\n" for i in range(40)))
    return path


def decoded(prepared: Prepared) -> str:
    return "".join(prepared.tokenizer.decode(d) for d in (*prepared.train, *prepared.heldout))


def entry(cache: Path, number: int, age: float, size: int = 10) -> Path:
    """An entry that was last used `age` seconds ago."""
    folder = cache / "shards" / f"{number:024x}"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "tokens-00000.bin").write_bytes(bytes(size))
    os.utime(folder, (time.time() - age,) * 2)
    return folder


def test_the_oldest_go_first_and_only_as_many_as_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [entry(tmp_path, number, age) for number, age in enumerate((50, 10, 40, 20, 30))]
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    prune(tmp_path)
    assert [folder.exists() for folder in folders] == [False, True, False, True, True]
    monkeypatch.setattr(module, "MAX_BYTES", 25)
    prune(tmp_path)
    assert [folder.exists() for folder in folders] == [False, True, False, True, False]
    assert cache_size(tmp_path) == (2, 20)
    assert sorted(os.listdir(tmp_path / "shards")) == sorted(f.name for f in folders if f.exists())


def test_what_is_in_use_stays_however_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = entry(tmp_path, 0, age=50), entry(tmp_path, 1, age=10)
    held = InUse(old)
    os.utime(old, (1, 1))
    monkeypatch.setattr(module, "MAX_ENTRIES", 1)
    prune(tmp_path)
    assert old.exists()
    assert new.exists(), "it is the newest"
    del held
    prune(tmp_path)
    assert not old.exists()


def test_use_makes_an_entry_young(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = entry(tmp_path, 0, age=50), entry(tmp_path, 1, age=10)
    InUse(old)
    monkeypatch.setattr(module, "MAX_ENTRIES", 1)
    prune(tmp_path)
    assert (old.exists(), new.exists()) == (True, False)


def test_another_process_that_uses_an_entry_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = entry(tmp_path, 0, age=50)
    code = (
        "import sys; from pathlib import Path; from topograd.data.cache import InUse;"
        "held = InUse(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    monkeypatch.setattr(module, "MAX_ENTRIES", 0)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        prune(tmp_path)
        assert folder.exists()
        process.kill()
    prune(tmp_path)
    assert not folder.exists(), "its lock died with it"


def test_nothing_but_entries_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry(tmp_path, 0, age=50)
    for name in ("thesis", ".hidden"):
        (tmp_path / "shards" / name).mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr(module, "MAX_ENTRIES", 0)
    prune(tmp_path)
    assert sorted(os.listdir(tmp_path / "shards")) == [".hidden", "thesis"]
    assert (tmp_path / "notes.txt").exists()
    prune(tmp_path / "nowhere")
    assert cache_size(tmp_path / "nowhere") == (0, 0)


def test_preparing_many_texts_leaves_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    monkeypatch.setattr(module, "MAX_TOKENIZERS", 1)
    cache = tmp_path / "cache"
    kept = [prepare(text_file(tmp_path, i), "bpe", 270, cache) for i in range(4)]
    assert cache_size(cache)[0] == 4, "all are in use"
    texts = [decoded(prepared) for prepared in kept]
    del kept
    last = prepare(text_file(tmp_path, 9), "bpe", 270, cache)
    assert len(os.listdir(cache / "shards")) == 2
    assert len(os.listdir(cache / "tokenizers")) == 1
    assert last.train.folder is not None
    assert last.train.folder.is_dir()
    assert decoded(prepare(text_file(tmp_path, 0), "bpe", 270, cache)) == texts[0], "made again"


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_cache_that_cannot_be_written_stops_nothing(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    result = prepare(text_file(tmp_path), kind, 270, tmp_path / "file" / "cache")
    assert decoded(result) == text_file(tmp_path).read_text()
    assert result.train.folder is None
    with pytest.raises(ValueError, match="read-only"):
        result.train.slice(0, 3)[0] = 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("topograd: the cache ")
    assert "cannot be written (Not a directory); continuing without it" in record.getMessage()
    kept = prepare(text_file(tmp_path), kind, 270, tmp_path / "cache")
    assert [document.tolist() for document in kept.train] == [document.tolist() for document in result.train]
    assert kept.train.offsets.tolist() == result.train.offsets.tolist()
    assert kept.train.meta == result.train.meta


def test_a_full_disk_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("topograd.data.shards.sync", full)
    result = prepare(text_file(tmp_path), "bytes", 0, tmp_path / "cache")
    assert decoded(result) == text_file(tmp_path).read_text()
    assert "No space left on device" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.bin")), "nothing half-written stays"


def test_a_read_only_cache_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    cache = tmp_path / "cache"
    prepare(text_file(tmp_path), "bpe", 270, cache)
    for name in ("utime", "rename", "replace"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(import_module("topograd.data.prepare"), "write_shards", refuse)
    result = prepare(text_file(tmp_path), "bpe", 270, cache)
    assert result.train.folder is not None
    assert caplog.records == []


def test_the_line_is_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = (
        "import sys; from pathlib import Path; from topograd.data.prepare import prepare;"
        "prepare(Path(sys.argv[1]), 'bytes', 0, Path(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(text_file(tmp_path)), str(tmp_path / "file")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    assert done.stderr.startswith("topograd: the cache ")
    assert done.stderr.count("\n") == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("before", ["nothing", "damaged", "pruned"])
def test_processes_that_prepare_at_once_all_end_well(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, texts = tmp_path / "cache", [text_file(tmp_path, i) for i in range(2)]
    expected = [text.read_text() for text in texts]
    if before == "damaged":
        for text in texts:
            prepare(text, "bpe", 270, cache)
        for file in cache.rglob("*.bin"):
            file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    if before == "pruned":
        monkeypatch.setattr(module, "MAX_ENTRIES", 0)
    wait, go = os.pipe()

    def work(number: int) -> None:
        os.close(go)
        os.read(wait, 1)  # returns once the parent, too, has closed its end
        for i in range(6):
            chosen = (number + i) % 2
            assert decoded(prepare(texts[chosen], "bpe", 270, cache)) == expected[chosen]

    children = [forked(lambda number=number: work(number)) for number in range(4)]  # type: ignore[misc]
    os.close(wait)
    os.close(go)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0, 0]
    assert not list(cache.rglob("*.tmp"))


def forked(run: Callable[[], object]) -> int:
    """Start `run` in a child process; its exit code is 0 if it returns."""
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        finally:
            os._exit(1)
    return child
