"""The folder of a run.

    config.toml      the settings; a folder without it is not a run
    manifest.json    binds the files of the run, so that a foreign one is refused (`runs/manifest.py`)
    metrics.jsonl    one JSON object per line, appended as training goes
    checkpoints/     see `topograd.runs.checkpoint`
    tokenizer.json   results.json   calibration.json   figures/   report.html
    lock             held by the process that trains here

A process may be killed at any instant: `config.toml` is then the old one or the new one. Lock, log and
checkpoints are those of every training (`runs/workspace.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topograd.errors import RunError
from topograd.files import dump_json, dump_toml, read_json, read_toml
from topograd.runs.manifest import Manifest
from topograd.runs.workspace import Inside, Workspace

if TYPE_CHECKING:
    from topograd.runs.checkpoint import CheckpointStore

BASE = "base.json"
"""What a run is known by that fine-tunes another (`delta_store.py`)."""


def models_below(folder: Path) -> str:
    """What to give instead of a folder that only holds models, as that of a search; empty if it has none.

    Hugging Face's own folders of checkpoints count too.
    """
    patterns = ("*/config.toml", "*/*/config.toml", "*/config.json")
    found = sorted(file.parent for pattern in patterns for file in folder.glob(pattern))
    if not found:
        return ""
    return f"give {found[0]}" if len(found) == 1 else f"give one of its {len(found)} models, as {found[0]}"


@dataclass(frozen=True)
class Run(Workspace):
    """The folder of one run. Make one with `Run.create` or `Run.open`."""

    config_file = Inside("config.toml")
    tokenizer_file = Inside("tokenizer.json")
    results_file = Inside("results.json")
    calibration_file = Inside("calibration.json")
    report_file = Inside("report.html")
    figures = Inside("figures")

    @classmethod
    def create(cls, folder: Path | str) -> Run:
        """A new run in a folder that is empty or does not exist. It becomes a run with `write_config`."""
        run = cls(Path(folder))
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
            foreign = sorted(entry.name for entry in run.folder.iterdir() if not run._is_leftover(entry))
        except OSError as problem:
            message, remedy = f"cannot make a run in {folder} ({problem.strerror})", "pass another folder"
            raise RunError(message, setting="folder", given=str(folder), remedy=remedy) from None
        if run.config_file.name in foreign:
            raise RunError(
                f"{folder} already holds a run",
                setting="folder",
                remedy="--resume it, or pass another folder",
            )
        if foreign:
            raise RunError(
                f"{folder} holds {foreign[0]!r} and is no run", setting="folder", remedy="pass another folder"
            )
        return run

    @classmethod
    @contextmanager
    def creating(cls, folder: Path | str) -> Iterator[Run]:
        """A new run; where the block that makes it fails, no empty folder is left behind."""
        there = Path(folder).exists()
        run = cls.create(folder)
        try:
            yield run
        except BaseException:
            if not there:
                with suppress(OSError):
                    run.folder.rmdir()
            raise

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """An existing run. Nothing is written, so a read-only folder can be opened."""
        run = cls(Path(folder))
        if not run.folder.is_dir():
            what = "is a file" if run.folder.exists() else "does not exist"
            problem, remedy = f"there is no run at {folder}: it {what}", "give the folder of a run"
            raise RunError(problem, setting="folder", given=str(folder), remedy=remedy)
        if not run.config_file.is_file():
            problem, remedy = f"{folder} is not a run: it has no config.toml", models_below(run.folder)
            raise RunError(problem, setting="folder", given=str(folder), remedy=remedy)
        return run

    @property
    def manifest(self) -> Manifest:
        return Manifest(self.folder)

    @property
    def store(self) -> CheckpointStore:
        """Where its checkpoints are kept."""
        if (self.folder / BASE).is_file():
            from topograd.runs.delta_store import DeltaStore  # brings torch, which the others do not need

            return DeltaStore(self.folder)
        from topograd.runs.checkpoint import FolderStore
        from topograd.runs.external_weights import NAME, ExternalWeights

        if (self.folder / NAME).is_file():
            return ExternalWeights(self.folder)
        return FolderStore(self.checkpoints)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the settings, None left out; makes the folders of checkpoints and figures too."""
        text = dump_toml(config)
        self.checkpoints.mkdir(exist_ok=True)
        self.figures.mkdir(exist_ok=True)
        self.manifest.bind(self.config_file.name, text)  # last: it is what makes the folder a run

    def read_config(self) -> dict[str, Any]:
        """The settings, if they are those that the run was made with."""
        self.manifest.verify(self.config_file.name)
        return read_toml(self.config_file, remedy="restore it or train anew")

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write the results of the last training or evaluation, with the digest of the weights."""
        self.manifest.bind(self.results_file.name, dump_json(dict(results), indent=2) + "\n")

    def read_results(self) -> dict[str, Any] | None:
        """The stored results, if this run wrote them; None where there are none."""
        self.manifest.verify(self.results_file.name)
        results = read_json(self.results_file) if self.results_file.is_file() else None
        return results if isinstance(results, dict) else None

    def _is_leftover(self, entry: Path) -> bool:
        """Whether a creation that was killed before its `config.toml` may have left this."""
        if entry in (self.checkpoints, self.figures):
            return not any(entry.iterdir())
        begun = (self.folder / "manifest.json").exists()  # else a tokenizer.json is not ours
        return (
            entry.name in ("lock", "manifest.json")
            or (begun and entry == self.tokenizer_file)
            or any(
                entry.match(f".{name}.*.tmp") for name in ("config.toml", "manifest.json", "tokenizer.json")
            )
        )
