"""A full disk, and names that are not UTF-8: one line, exit code 2, nothing half-written taken for whole."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from topograd.runs.folder import Run

Count = Callable[[str, str], None]


def call(*words: object, most_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which may write files of so many bytes: a disk that is full."""

    def limit() -> None:
        if most_bytes is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write fails as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    command = [
        sys.executable,
        "-m",
        "topograd",
        *(os.fspath(w) if isinstance(w, Path) else str(w) for w in words),
    ]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", preexec_fn=limit)


@pytest.mark.parametrize("format_", ["hf", "gguf", "onnx"])
def test_an_export_to_a_full_disk(
    format_: str, straight: Run, imported: object, count: Count, tmp_path: Path
) -> None:
    source = imported.run.folder if format_ != "onnx" else straight.folder  # type: ignore[attr-defined]
    done = call("export", source, "--out", tmp_path / "out", "--format", format_, most_bytes=4096)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("topograd: ")
    assert not (tmp_path / "out").exists(), "nothing that looks whole"
    count("full disk, export", "refused")


def test_names_that_are_not_utf_8(straight: Run, count: Count, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    for words in (
        ("train", "--preset", "tiny", "--steps", "1", "--data", odd),
        ("import", odd, "--out", tmp_path / "run"),
        ("eval", odd),
        ("export", straight.folder, "--out", odd / "x", "--format", "hf"),
    ):
        done = call(*words)
        assert done.returncode == 2, (words, done.stderr)
        assert "Traceback" not in done.stderr
        count("name that is not UTF-8", "refused")
