"""Adapters: small folders that add tensors to a run and refer to it by hash.

    topograd_adapter.safetensors   what was added, and nothing of the base
    topograd_adapter.json          what it is: its settings, and under "topograd" the identity of the base
                                   (SHA-256 of its weights and of its tokenizer), the size and SHA-256 of the
                                   tensors, and the digest of the file itself
    README.md                      a model card, for people; it is not read

The names are not PEFT's (adapter_config.json, adapter_model.safetensors), which would load such a folder and
ignore its tensors.

An adapter has a `kind` ("specialist", "lora", "draft"), tensors by name, and settings: plain JSON at the top
level of the config. Opening one verifies every byte of both files; `open_base` opens the run that it
belongs to, at the checkpoint with the right weights; any other run raises RunError.

How a kill is survived. A new adapter is written beside its place and renamed. One that is written again goes
as a run's manifest does: first the config, as it was, allows the new tensors beside the old; then come the
tensors, then the new config. A kill leaves an adapter that opens: the old one, or the new tensors under the
old settings. So settings that say how to read the tensors must stay the same; `update` refuses others.

Cost: opening reads and hashes the adapter, not the base; the base is hashed when it is opened, as ever.
Limits: the base's folder is recorded as an absolute path, which is a hint: `open_base` takes another one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topograd.errors import CheckpointError, RunError
from topograd.files import (
    DamagedFileError,
    dump_json,
    read_json,
    reading_tensors,
    sync,
    write_atomic,
    write_json,
)
from topograd.runs.tensor_files import contiguous

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.runs.session import LoadedTextRun

CONFIG, TENSORS = "topograd_adapter.json", "topograd_adapter.safetensors"
CARD = "README.md"
FORMAT = "topograd-adapter"
VERSION = 1
RESERVED = ("topograd", "base_model_name_or_path")
"""Keys of the config that are not settings."""


@dataclass(frozen=True)
class BaseIdentity:
    """Which run an adapter belongs to."""

    folder: Path
    """Where it was; it may have been moved."""
    weights: str
    """SHA-256 of its weights, as `LoadedTextRun.weights` has it."""
    tokenizer: str
    """Digest of its tokenizer."""

    @classmethod
    def of(cls, session: LoadedTextRun) -> BaseIdentity:
        return cls(session.run.folder.absolute(), session.weights, session.tokenizer.digest)

    def refusal(self, other: BaseIdentity) -> str | None:
        """Why another run is not this one, in words; None if it is."""
        if self.tokenizer != other.tokenizer:
            return "has another tokenizer"
        return "has other weights" if self.weights != other.weights else None


@dataclass(frozen=True)
class Adapter:
    """An adapter that was opened and verified."""

    folder: Path
    kind: str
    base: BaseIdentity
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    digest: str
    """SHA-256 of the file of tensors: what results name it by."""

    def check_base(self, session: LoadedTextRun) -> None:
        """Raise RunError for a run that is not the base."""
        problem = self.base.refusal(BaseIdentity.of(session))
        if problem:
            raise RunError(
                f"{self.folder} belongs to the base {self.base.folder}, and {session.run.folder} {problem}",
                setting="base",
                given=str(session.run.folder),
                remedy=f"give the base that it was made for (weights {self.base.weights[:12]})",
            )

    def open_base(self, folder: Path | str | None = None) -> LoadedTextRun:
        """The base, at the checkpoint that this belongs to: where it was recorded, or in another folder."""
        from topograd.runs.folder import Run
        from topograd.runs.session import open_session

        run = Run(Path(folder)) if folder is not None else Run(self.base.folder)
        if not run.folder.is_dir():
            raise RunError(
                f"the base of {self.folder} is not at {run.folder}",
                setting="base",
                given=str(run.folder),
                remedy="put it back, or name its folder with --base",
            )
        run = Run.open(run.folder)
        names = [n for n in reversed(run.store.names()) if run.store.weights(n) == self.base.weights]
        session = open_session(run.folder, names[0] if names else None)
        self.check_base(session)
        return session


def create_adapter(
    folder: Path | str,
    *,
    kind: str,
    base: BaseIdentity,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    card: str,
) -> Adapter:
    """Write a new adapter into a folder that is empty or does not exist, whole or not at all.

    `settings` are plain JSON; `card` is the text of the model card behind its header.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem, remedy = f"{folder} is taken", "give an empty folder, or a new one"
        raise RunError(problem, setting="folder", given=folder, remedy=remedy)
    content, digest = _serialized(tensors)
    config = _config(kind, base, settings, {digest: len(content)})
    folder = folder.absolute()
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of one that was killed: in a container numbers repeat
        temporary.mkdir(parents=True)
        write_atomic(temporary / TENSORS, content)
        write_json(temporary / CONFIG, config)
        write_atomic(temporary / CARD, _card(kind, base, card))
        os.replace(temporary, folder)
        sync(folder.parent)
    except OSError as problem:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"cannot write {folder} ({problem})", remedy="make room, or pass another folder"
        ) from None
    return open_adapter(folder, kind)


def update_adapter(
    adapter: Adapter, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], card: str | None = None
) -> Adapter:
    """Write an adapter again: other values of the same tensors. A kill leaves one that opens."""
    old = {name: (t.shape, t.dtype) for name, t in adapter.tensors.items()}
    if old != {name: (t.shape, t.dtype) for name, t in tensors.items()}:
        raise RunError(f"{adapter.folder} has tensors of other names or shapes", remedy="write a new adapter")
    content, digest = _serialized(tensors)
    config_file, tensors_file = adapter.folder / CONFIG, adapter.folder / TENSORS
    before = {adapter.digest: tensors_file.stat().st_size}
    allowed = _config(adapter.kind, adapter.base, adapter.settings, before | {digest: len(content)})
    write_json(config_file, allowed)
    write_atomic(tensors_file, content)
    final = _config(adapter.kind, adapter.base, settings, {digest: len(content)})
    write_json(config_file, final)
    if card is not None:
        write_atomic(adapter.folder / CARD, _card(adapter.kind, adapter.base, card))
    return open_adapter(adapter.folder, adapter.kind)


def open_adapter(folder: Path | str, kind: str | None = None) -> Adapter:
    """Read an adapter, if every byte of it is right and it is of the `kind` that is wanted."""
    folder = Path(folder)
    config_file = folder / CONFIG
    if not config_file.is_file():
        what = f"has no {CONFIG}" if folder.is_dir() else "does not exist"
        raise RunError(f"{folder} is no {kind or 'adapter'}: it {what}", setting="folder", given=folder)
    config = read_json(config_file)
    own = config.get("topograd") if isinstance(config, dict) else None
    if not isinstance(own, dict) or own.get("format") != FORMAT:
        raise RunError(
            f"{config_file} was not written by topograd, so it names no base", remedy="give another one"
        )
    if own.get("version") != VERSION:
        raise RunError(
            f"{folder} has version {own.get('version')!r}", setting="version", allowed=f"{VERSION}"
        )
    if own.get("sha256") != _digest(config):
        raise CheckpointError(
            f"{config_file} is damaged (its SHA-256 is not the recorded one)", remedy="restore it"
        )
    if kind is not None and own["kind"] != kind:
        raise RunError(f"{folder} is a {own['kind']}", setting="kind", given=own["kind"], allowed=f"a {kind}")
    tensors, digest = _read_tensors(folder / TENSORS, own["tensors"])
    base = BaseIdentity(Path(config["base_model_name_or_path"]), **own["base"])
    settings = {key: value for key, value in config.items() if key not in RESERVED}
    return Adapter(folder, own["kind"], base, settings, tensors, digest)


def is_adapter(folder: Path | str) -> bool:
    """Whether a folder looks like one; its contents are not read."""
    return (Path(folder) / CONFIG).is_file()


def _serialized(tensors: Mapping[str, Tensor]) -> tuple[bytes, str]:
    from safetensors.torch import save

    content = save(contiguous(dict(tensors)), metadata={"format": "pt"})
    return content, hashlib.sha256(content).hexdigest()


def _config(
    kind: str, base: BaseIdentity, settings: Mapping[str, Any], tensors: Mapping[str, int]
) -> dict[str, Any]:
    """The content of the config; `tensors` maps the SHA-256 that the file may have to its size."""
    for key in RESERVED:
        if key in settings:
            raise RunError(setting="settings", given=key, allowed=f"without {', '.join(RESERVED)}")
    own: dict[str, Any] = {"format": FORMAT, "version": VERSION, "kind": kind}
    own |= {"base": {"weights": base.weights, "tokenizer": base.tokenizer}, "tensors": dict(tensors)}
    config = {**settings, "base_model_name_or_path": str(base.folder), "topograd": own}
    own["sha256"] = _digest(config)
    return config


def _digest(config: Mapping[str, Any]) -> str:
    """SHA-256 of the values of a config but for its own digest, whatever their layout."""
    own = {key: value for key, value in config["topograd"].items() if key != "sha256"}
    return hashlib.sha256(dump_json({**config, "topograd": own}).encode()).hexdigest()


def _read_tensors(path: Path, allowed: Mapping[str, int]) -> tuple[dict[str, Tensor], str]:
    from safetensors.torch import load

    with reading_tensors(path, CheckpointError):
        if path.stat().st_size not in allowed.values():
            raise DamagedFileError(f"it has {path.stat().st_size} bytes")
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if digest not in allowed:
            raise DamagedFileError("its SHA-256 is not the recorded one")
        # Sorted: the file is read in an order that differs from process to process.
        return dict(sorted(load(content).items())), digest


def _card(kind: str, base: BaseIdentity, text: str) -> str:
    """A model card with the header that model hubs read; names are quoted as JSON, which YAML takes."""
    name = dump_json(base.folder.name)
    head = ["---", f"base_model: {name}", "library_name: topograd", f"tags: [topograd, {kind}]", "---"]
    return "\n".join([*head, "", text.strip(), ""])
