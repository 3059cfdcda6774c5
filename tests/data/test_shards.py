"""Shards: what was written is what is read; nothing half-written is in place, nothing damaged is read."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raising import refused
from topograd.data.shards import Shards, shards_in_memory, write_shards
from topograd.errors import DataError

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9, 10, 11]]
STREAM = [0, 1, 2, 3, 0, 0, 4, 0, 5, 6, 7, 8, 9, 10, 11, 0]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: that is hundreds of small files here, and no test pulls the plug."""
    monkeypatch.setattr("topograd.data.shards.sync", lambda path: None)


def written(folder: Path, shard_tokens: int = 5) -> Shards:
    return write_shards(folder, DOCUMENTS, 12, separator=0, shard_tokens=shard_tokens, corpus="abc")


@pytest.mark.parametrize("shard_tokens", [1, 3, 4, 5, 8, 16, 17, 2**24])
def test_every_slice_across_files(tmp_path: Path, shard_tokens: int) -> None:
    shards = written(tmp_path / "s", shard_tokens)
    assert (shards.documents, shards.tokens) == (4, 16)
    assert shards.offsets.tolist() == [0, 4, 5, 7, 15]
    assert [document.tolist() for document in shards] == DOCUMENTS
    assert shards[3].tolist() == DOCUMENTS[3]
    assert len(shards.files) == -(-16 // shard_tokens)
    for start in range(17):
        for stop in range(start, 17):
            result = shards.slice(start, stop)
            assert result.tolist() == STREAM[start:stop]
            assert result.dtype == np.uint16
    for start, stop in [(-1, 3), (3, 17), (4, 3)]:
        with refused(DataError, setting="slice"):
            shards.slice(start, stop)
    with pytest.raises(IndexError):
        shards[4]
    with pytest.raises(IndexError):
        shards[-1]


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 69_999), max_size=9), min_size=1, max_size=9), st.integers(1, 30))
def test_large_vocabularies_round_trip(documents: list[list[int]], shard_tokens: int) -> None:
    with TemporaryDirectory() as name:
        arrays = (np.array(document, dtype=np.uint32) for document in documents)
        shards = write_shards(Path(name, "s"), arrays, 70_000, separator=9, shard_tokens=shard_tokens)
        assert [document.tolist() for document in shards] == documents
        assert shards.slice(0, shards.tokens).dtype == np.uint32


def test_manifest_and_meta(tmp_path: Path) -> None:
    shards = written(tmp_path / "deep" / "s")
    again = Shards.open(tmp_path / "deep" / "s")
    assert (again.vocab, again.separator, again.meta) == (12, 0, {"corpus": "abc"})
    assert not shards.files[0].flags.writeable
    names = ["manifest.json", "offsets.bin", *(f"tokens-0000{i}.bin" for i in range(4))]
    assert sorted(os.listdir(tmp_path / "deep" / "s")) == names
    assert sorted(os.listdir(tmp_path / "deep")) == [".s.lock", "s"]


@pytest.mark.parametrize("documents", [[[1, 12]], [[-1]], []])
def test_bad_documents_leave_nothing(tmp_path: Path, documents: list[list[int]]) -> None:
    with refused(DataError, setting="documents_tokens"):
        write_shards(tmp_path / "s", documents, 12, separator=0)
    assert os.listdir(tmp_path) == []


def test_bad_separator_is_refused(tmp_path: Path) -> None:
    with refused(DataError, setting="separator", given=12):
        write_shards(tmp_path / "s", DOCUMENTS, 12, separator=12)


@pytest.mark.parametrize("name", ["manifest.json", "offsets.bin", "tokens-00000.bin", "tokens-00003.bin"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer"])
def test_damaged_file_is_refused_by_name_and_rewritten(tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / "s"
    written(folder)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage != "missing":
        (folder / name).write_bytes(content[:-1] if damage == "truncated" and name[0] != "m" else content * 2)
    if damage == "truncated" and name[0] == "m":
        (folder / name).write_bytes(content[: len(content) // 2])
    with refused(DataError, setting="path") as caught:
        Shards.open(folder)
    assert "\n" not in str(caught.value)
    assert written(folder).slice(0, 16).tolist() == STREAM
    assert sorted(os.listdir(tmp_path)) == [".s.lock", "s"]


def test_one_flipped_bit_is_refused_and_rewritten(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    written(folder)
    for path in (folder / "tokens-00000.bin", folder / "tokens-00002.bin"):
        whole = path.read_bytes()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        with refused(DataError, setting="path"):
            Shards.open(folder)
        assert written(folder).slice(0, 16).tolist() == STREAM


@pytest.mark.parametrize("vocab", [12, 70_000])
def test_in_memory_is_the_same_stream(tmp_path: Path, vocab: int) -> None:
    here = shards_in_memory(DOCUMENTS, vocab, separator=0, corpus="abc")
    there = write_shards(tmp_path / "s", DOCUMENTS, vocab, separator=0, corpus="abc")
    assert here.folder is None
    assert (here.documents, here.tokens, here.meta) == (there.documents, there.tokens, there.meta)
    for start in range(17):
        for stop in range(start, 17):
            assert here.slice(start, stop).tolist() == there.slice(start, stop).tolist()
    assert here.slice(0, 16).dtype == there.slice(0, 16).dtype
    assert [document.tolist() for document in here] == DOCUMENTS
    with refused(DataError, setting="documents_tokens"):
        shards_in_memory([], 12, separator=0)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 99},
        {"dtype": "uint32"},
        {"files": ["../../secret", "tokens-00001.bin", "tokens-00002.bin", "tokens-00003.bin"]},
        {"files": None},
        {"tokens": 17},
        {"tokens": True},
        {"documents": 0},
        {"documents": 3},
        {"shard_tokens": 0},
        {"separator": 12},
        {"vocab": "12"},
        {"meta": None},
        {"sha256": "0" * 64},
        {"sha256": None},
    ],
)
def test_foreign_manifest_is_refused(tmp_path: Path, change: dict) -> None:
    written(tmp_path / "s")
    path = tmp_path / "s" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refused(DataError, setting="version" if "version" in change else "path"):
        Shards.open(tmp_path / "s")


def test_offsets_that_do_not_rise_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "s")
    np.array([0, 5, 4, 7, 15], dtype="<i8").tofile(tmp_path / "s" / "offsets.bin")
    with refused(DataError, setting="path"):
        Shards.open(tmp_path / "s")


def test_same_shards_are_kept_and_others_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    old = written(folder)
    node = folder.stat().st_ino
    written(folder)
    assert folder.stat().st_ino == node
    others = [[2, 3, 1], *DOCUMENTS[1:]]
    replaced = write_shards(folder, others, 12, separator=0, shard_tokens=5, corpus="abc")
    assert [document.tolist() for document in replaced] == others
    assert old.slice(0, 16).tolist() == STREAM  # an open map outlives its folder


def test_somebody_elses_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.txt").write_text("precious")
    with refused(DataError, setting="folder"):
        written(tmp_path / "s")
    assert os.listdir(tmp_path / "s") == ["thesis.txt"]


def test_what_a_kill_left_is_removed_a_day_later(tmp_path: Path) -> None:
    for name, age in [(".s.0a.tmp", 2), (".s.0b.tmp", 0), (".t.0c.tmp", 2)]:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age * 86400,) * 2)
    written(tmp_path / "s")
    assert sorted(os.listdir(tmp_path)) == [".s.0b.tmp", ".s.lock", ".t.0c.tmp", "s"]


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


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("moment", ["tokens", "rename"])
def test_kill_leaves_nothing_in_place(tmp_path: Path, moment: str) -> None:
    def documents() -> Iterator[list[int]]:
        yield [1] * 100
        if moment == "tokens":
            die()

    def run() -> None:
        if moment == "rename":
            os.rename = die  # type: ignore[assignment]
        write_shards(tmp_path / "s", documents(), 12, separator=0, shard_tokens=9)

    assert exit_code(forked(run)) == -signal.SIGKILL
    assert not (tmp_path / "s").exists()
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] != []
    assert written(tmp_path / "s").tokens == 16


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("before", ["nothing", "damaged"])
def test_writers_at_once_all_end_well(tmp_path: Path, before: str) -> None:
    if before == "damaged":
        written(tmp_path / "s")
        (tmp_path / "s" / "offsets.bin").write_bytes(b"")
    wait, go = os.pipe()

    def documents() -> Iterator[list[int]]:
        yield [1] * 100
        os.close(go)
        os.read(wait, 1)  # returns once the parent, too, has closed its end
        yield [2] * 100

    children = [forked(lambda: write_shards(tmp_path / "s", documents(), 12, separator=0)) for _ in range(4)]
    os.close(wait)
    os.close(go)
    assert [exit_code(child) for child in children] == [0, 0, 0, 0]
    assert Shards.open(tmp_path / "s").tokens == 203
    assert sorted(os.listdir(tmp_path)) == [".s.lock", "s"]
