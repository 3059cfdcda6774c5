"""External weights: an imported model's files, referred to by path, size and SHA-256.

    weights.json     format, version, the files, and for each tensor of the model where it lies

What is read is memory-mapped; a tensor that is float32 is not copied. Half precision becomes float32.

Cost: files are hashed when they are first opened (`data/digest_cache.py`). Limits: safetensors only; nothing
is saved here, so a run of this kind does not learn: `topograd train --init` starts one that does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from safetensors import safe_open

from topograd.data.digest_cache import remembered_sha256
from topograd.errors import CheckpointError
from topograd.files import dump_json, read_table, reading_tensors, sha256
from topograd.runs.checkpoint import Checkpoint, Contents, Optimizers
from topograd.runs.tensor_files import fill

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "weights.json"
FORMAT = "topograd-weights"
VERSION = 1
CHECKPOINT = "imported"
"""What the one checkpoint of such a run is called."""


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor lies: in which file, and under which name."""

    file: int
    name: str


def describe(files: list[Path], places: Mapping[str, TensorLocation]) -> dict[str, Any]:
    """The content of weights.json."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "files": [
            {"path": str(file.absolute()), "bytes": file.stat().st_size, "sha256": sha256(file)}
            for file in files
        ],
        "tensors": {name: vars(place) for name, place in places.items()},
    }


@dataclass(frozen=True)
class ExternalWeights:
    """A checkpoint store with one checkpoint, whose weights lie elsewhere."""

    folder: Path

    def names(self) -> list[str]:
        return [CHECKPOINT]

    def weights(self, name: str) -> str:
        described = self._read()
        content = [[file["sha256"] for file in described["files"]], described["tensors"]]
        return hashlib.sha256(dump_json(content).encode()).hexdigest()  # wherever the files lie

    def extra(self, name: str) -> dict[str, Any]:
        return {}

    def save(self, **contents: Unpack[Contents]) -> str:
        raise CheckpointError(
            f"{self.folder} refers to weights that are not its own",
            remedy=f"train on with: topograd train --init {self.folder}",
        )

    def load(self, name: str, model: nn.Module, optimizers: Optimizers | None = None) -> Checkpoint:
        if optimizers is not None:
            raise CheckpointError(
                f"{self.folder} has no optimizers", remedy=f"use topograd train --init {self.folder}"
            )
        described = self._read()
        files = [self._verified(file) for file in described["files"]]
        places = {key: TensorLocation(**value) for key, value in described["tensors"].items()}
        fill(model, _tensors(files, places), str(self.folder / NAME))
        return Checkpoint(self.folder / NAME, 0, self.weights(name), {})

    def verified(self, name: str) -> Checkpoint:
        """The checkpoint, if its files are those that were imported; no tensor is read."""
        for file in self._read()["files"]:
            self._verified(file)
        return Checkpoint(self.folder / NAME, 0, self.weights(name), {})

    def _read(self) -> dict[str, Any]:
        keys, remedy = ("files", "tensors"), "import the model again"
        return read_table(self.folder / NAME, FORMAT, VERSION, keys, CheckpointError, remedy)

    def _verified(self, file: Mapping[str, Any]) -> Path:
        path = Path(file["path"])
        if not path.is_file():
            raise CheckpointError(
                f"the weights {path} are gone", remedy="put them back, or import with --copy"
            )
        if path.stat().st_size != file["bytes"] or remembered_sha256(path) != file["sha256"]:
            raise CheckpointError(
                f"the weights {path} have changed since {self.folder} was imported",
                remedy="restore them, or import again",
            )
        return path


def _tensors(files: list[Path], places: Mapping[str, TensorLocation]) -> dict[str, Tensor]:
    """The tensors of a model, each read once from its memory-mapped file."""
    import torch

    tensors: dict[str, Tensor] = {}
    for index, file in enumerate(files):
        with (
            reading_tensors(file, CheckpointError, "import again"),
            safe_open(file, framework="pt") as opened,
        ):
            for key, place in places.items():
                if place.file == index:
                    tensors[key] = opened.get_tensor(place.name).to(torch.float32)
    return tensors
