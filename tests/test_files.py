import hashlib
import json
import math
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raising import refused
from topograd import files
from topograd.errors import CheckpointError, ConfigError, RunError


def test_write_atomic_replaces_bytes_and_text_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.write_atomic(path, "größe")
    assert path.read_bytes() == "größe".encode()
    files.write_atomic(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_write_atomic_obeys_the_umask_as_a_plain_write_does(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    files.write_atomic(tmp_path / "atomic", "x")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    path = tmp_path / "a.txt"
    files.write_atomic(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_the_file_is_on_the_disk_before_its_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    replace, fsync = os.replace, os.fsync

    def spy_replace(source: Path, target: Path) -> None:
        calls.append("replace")
        replace(source, target)

    def spy_fsync(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", spy_replace)
    monkeypatch.setattr(os, "fsync", spy_fsync)
    files.write_atomic(tmp_path / "a.txt", "x")
    assert calls == ["file", "replace", "folder"]


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.txt'"):
        files.write_atomic(tmp_path / "a.txt", "x")
    with pytest.raises(OSError, match=r": 'log'"), files.naming("log"):
        full(0)
    with pytest.raises(OSError, match=r": 'known'"), files.naming("log"):
        raise OSError(28, "No space left on device", "known")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_names_the_file_that_is_appended_to() -> None:
    with (
        pytest.raises(OSError, match=r"'/dev/full'"),
        files.naming("/dev/full"),
        open("/dev/full", "ab") as file,
    ):
        file.write(b"x")


def test_locks_exclude_one_another_here_and_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys; from pathlib import Path; from topograd.errors import RunError;"
        "from topograd.files import hold_lock\n"
        "try:\n    with hold_lock(Path(sys.argv[1])): print('held')\n"
        "except RunError as error: print(error)"
    )

    def elsewhere() -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    problem = f"{tmp_path} is in use by another process; wait for its end or pass another folder"
    with files.hold_lock(path):
        assert elsewhere() == problem
        with refused(RunError, setting="folder"), files.hold_lock(path):
            pass
    assert elsewhere() == "held"
    assert path.exists(), "the file stays"


def test_a_folder_that_cannot_be_locked(tmp_path: Path) -> None:
    lock = files.hold_lock(tmp_path / "nowhere" / "lock")
    with refused(RunError, setting="folder"), lock:
        pass


def test_shared_locks_go_together_and_exclude_an_exclusive_one(tmp_path: Path) -> None:
    first, second, third = (os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT) for _ in range(3))
    assert files.lock_file(first, shared=True)
    assert files.lock_file(second, shared=True)
    assert not files.lock_file(third)
    os.close(first)
    os.close(second)
    assert files.lock_file(third)
    os.close(third)


class Windows:
    """msvcrt as Windows has it: a lock of bytes from the current position, refused with an OSError."""

    LK_NBLCK, LK_LOCK = 2, 1

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.calls: list[tuple[int, int, int]] = []

    def locking(self, descriptor: int, mode: int, nbytes: int) -> None:
        self.calls.append((os.lseek(descriptor, 0, os.SEEK_CUR), mode, nbytes))
        if len(self.calls) <= self.refusals:
            raise OSError(36, "Resource deadlock avoided")


def test_windows_locks_the_first_byte_and_syncs_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_text("content")
    monkeypatch.setattr(sys, "platform", "win32")
    held = Windows(refusals=0)
    monkeypatch.setitem(sys.modules, "msvcrt", held)
    with open(path, "rb") as file:
        file.seek(3)
        assert files.lock_file(file.fileno())
        assert held.calls == [(0, Windows.LK_NBLCK, 1)]
        assert files.lock_file(file.fileno(), shared=True), "there are none"
        assert len(held.calls) == 1
        monkeypatch.setitem(sys.modules, "msvcrt", Windows(refusals=1))
        assert not files.lock_file(file.fileno())
        waited = Windows(refusals=2)
        monkeypatch.setitem(sys.modules, "msvcrt", waited)
        assert files.lock_file(file.fileno(), wait=True)
        assert [mode for _, mode, _ in waited.calls] == [Windows.LK_LOCK] * 3
    monkeypatch.setitem(sys.modules, "msvcrt", Windows(refusals=1))
    with refused(RunError, setting="folder"), files.hold_lock(tmp_path / "lock"):
        pass
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    files.sync(tmp_path)
    assert synced == []
    files.sync(path)
    assert len(synced) == 1


def test_json_round_trip_keeps_numbers_that_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"loss": math.inf, "steps": [1, 2.5, None, True, "ü"]})
    assert files.read_json(path) == {"loss": math.inf, "steps": [1, 2.5, None, True, "ü"]}


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe", b"[" * 100_000])
def test_damaged_json_raises_the_error_that_was_asked_for_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with refused(RunError, setting="path") as caught:
        files.read_json(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError):
        files.read_json(path, CheckpointError)


def test_missing_json_and_values_that_are_not_json_are_refused(tmp_path: Path) -> None:
    with refused(RunError, setting="path"):
        files.read_json(tmp_path / "none.json")
    with refused(RunError, setting="value"):
        files.write_json(tmp_path / "a.json", {"x": object()})
    assert os.listdir(tmp_path) == []


def test_sha256_is_that_of_hashlib(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "a").write_bytes(data)
    assert files.sha256(tmp_path / "a") == hashlib.sha256(data).hexdigest()


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
items: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
tables = st.recursive(
    st.dictionaries(text, scalars | st.lists(items, max_size=3), max_size=4),
    lambda inner: st.dictionaries(text, scalars | inner, max_size=3),
    max_leaves=5,
)


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return value


@given(tables)
def test_toml_round_trip(table: dict[str, Any]) -> None:
    back = tomllib.loads(files.dump_toml(table))
    assert back == without_none(table)
    assert json.dumps(back, sort_keys=True) == json.dumps(without_none(table), sort_keys=True)  # 1 is not 1.0


def test_toml_of_a_config_reads_well() -> None:
    config = {
        "steps": 80,
        "lr": 3e-4,
        "model": {"window": None, "partition": (2, 2), "x0": True, "rope": {"base": 1e5}},
        "loss": math.nan,
        "odd key": 'a "b"\n',
        "mix": [{"path": "a", "weight": None}],
    }
    expected = """\
steps = 80
lr = 0.0003
loss = nan
"odd key" = "a \\"b\\"\\n"
mix = [{path = "a"}]

[model]
partition = [2, 2]
x0 = true

[model.rope]
base = 100000.0
"""
    assert files.dump_toml(config) == expected
    assert math.isnan(tomllib.loads(expected)["loss"])


@pytest.mark.parametrize(
    "table", [{"a": {"b": object()}}, {"a": [None]}, {1: 2}, {"a": Path("x")}, {"a": "\ud800"}, {"\udfff": 1}]
)
def test_toml_refuses_what_it_cannot_hold_in_one_line(table: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        files.dump_toml(table)
    assert "\n" not in str(caught.value)


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert files.read_bytes(tmp_path / "file", 5) == b"12345"
    os.mkfifo(tmp_path / "pipe")  # nothing writes to it: opening it must not wait
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path, most in ((tmp_path / "file", 4), (tmp_path / "pipe", 5), (tmp_path / "zero", 5)):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            files.read_bytes(path, most)
        assert caught.value.filename == str(path)
        assert caught.value.strerror
    with pytest.raises(RunError):
        files.read_json(tmp_path / "zero")


def test_damage_of_a_tensor_file_is_named_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.touch()
    with (
        refused(CheckpointError, setting="path", given=path, remedy="restore it"),
        files.reading_tensors(path, CheckpointError),
    ):
        raise files.DamagedFileError("it has 3 bytes")
    path.unlink()
    os.mkfifo(path)
    with (
        pytest.raises(RunError, match=r"regular file.*delete it"),
        files.reading_tensors(path, RunError, "delete it"),
    ):
        pytest.fail("a pipe was opened, which waits for a writer")
