"""The manifest of a run: SHA-256 digests of its files, so that foreign or damaged files are detected.

    manifest.json    format, version, the settings, and for each file of the run the SHA-256 that it may have

    config.toml, tokenizer.json         written once
    results.json, calibration.json      written again, each time for the weights that they are about

What is not in it is bound by the checkpoint that it belongs to: weights and optimizer by their own SHA-256,
the log of metrics by that of its beginning up to the checkpoint's step. A checkpoint in turn names the run
that it belongs to (`identity`), so that neither can be exchanged alone.

How a kill is survived. Before a file is replaced the manifest allows the new content beside the old; when it
stands, the new one alone. So at every instant the file on the disk is one that the manifest allows.

A run without a manifest is opened unverified, and gets one when it is trained on or calibrated.
"""

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topograd.errors import RunError
from topograd.files import read_table, read_toml, sha256, write_atomic, write_json
from topograd.reading import flat_settings

NAME = "manifest.json"
FORMAT = "topograd-run"
VERSION = 1
ONCE = ("config.toml", "tokenizer.json")
IMPORTED = ("weights.json", "tokenizer_config.json", "base.json", "origin.json")
"""What the run of a model from outside has too, and one that stands on another run."""
AGAIN = ("results.json", "calibration.json")


class Manifest:
    """The manifest in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / NAME

    def exists(self) -> bool:
        return self.path.is_file()

    def bind(self, name: str, content: bytes | str) -> None:
        """Write a file of the run and bind it, whole or not at all."""
        content = content.encode() if isinstance(content, str) else content
        values = self._read() if self.exists() else self._current()
        digest = hashlib.sha256(content).hexdigest()
        before = values["files"].get(name, [])
        if name == "config.toml":
            values["settings"] = tomllib.loads(content.decode())
        self._write(values, name, [*before, digest])
        write_atomic(self.folder / name, content)
        self._write(values, name, [digest])

    def adopt(self) -> None:
        """Bind the files that are there, as they are: for a run without a manifest."""
        write_json(self.path, {"format": FORMAT, "version": VERSION, **self._current()})

    def _current(self) -> dict[str, Any]:
        """Settings and digests of the files that are there, as they are."""
        there = [name for name in (*ONCE, *IMPORTED, *AGAIN) if (self.folder / name).is_file()]
        settings = read_toml(self.folder / ONCE[0]) if ONCE[0] in there else None
        return {"settings": settings, "files": {name: [sha256(self.folder / name)] for name in there}}

    def verify(self, name: str) -> None:
        """Raise RunError for a file that the run did not write.

        A file that is not there passes, unless it was written once and for all, and so does a run
        without a manifest.
        """
        if not self.exists():
            return
        values, path = self._read(), self.folder / name
        allowed = values["files"].get(name)
        if not path.is_file():
            if allowed and name in (*ONCE, *IMPORTED):
                raise RunError(f"{path} is missing, and it belongs to the run", remedy="restore it")
            return
        if allowed is None or sha256(path) not in allowed:
            raise RunError(f"{path} is not the file that this run wrote", remedy=self._remedy(name, values))

    def identity(self) -> str | None:
        """What checkpoints of this run name: a digest of settings and tokenizer; None without both."""
        if not self.exists():
            return None
        values = self._read()
        files, settings = values["files"], values.get("settings")
        images = isinstance(settings, Mapping) and "tokenizer" not in settings
        names = ONCE[:1] if images else ONCE  # a run on images has no tokenizer
        if not all(files.get(name) for name in names):
            return None
        return hashlib.sha256("\n".join(files[name][-1] for name in names).encode()).hexdigest()

    def _remedy(self, name: str, values: Mapping[str, Any]) -> str:
        if name == "config.toml":
            changed = _difference(values.get("settings"), self.folder / name)
            return f"{changed}restore it" if changed else "restore it"
        if name == "tokenizer.json":
            return "restore it: another tokenizer would give these weights other tokens"
        return "delete it, and it is measured again when it is needed"

    def _read(self) -> dict[str, Any]:
        values = read_table(self.path, FORMAT, VERSION, ("files",), RunError, "restore it")
        if not isinstance(values["files"], dict):
            raise RunError(f"{self.path} is damaged, it names no files of a run", remedy="restore it")
        return values

    def _write(self, values: dict[str, Any], name: str, digests: list[str]) -> None:
        values["files"][name] = sorted(set(digests), key=digests.index)
        write_json(self.path, {"format": FORMAT, "version": VERSION, **values})


def _difference(before: Any, path: Path) -> str:
    """The first setting that differs from those of the run, in words; nothing if that is not known."""
    try:
        now = read_toml(path)
    except RunError:
        return "it cannot be read; "
    if not isinstance(before, Mapping):
        return ""
    was, is_ = flat_settings(before), flat_settings(now)
    for name in (*was, *is_):
        if was.get(name) != is_.get(name):
            now_ = f"is now {is_[name]!r}" if name in is_ else "is missing"
            then = f"was {was[name]!r}" if name in was else "was not there"
            return f"{name} {now_} and {then}: "
    return ""
