"""Checkpoints of a run that fine-tunes another: only the tensors that learn; the rest stays in the base.

    base.json        the base's folder, the SHA-256 of its weights, its tokenizer, the names of its tensors,
                     and where it was converted from, if it was
    checkpoints/     as ever, but for the tensors that are the base's

The run of a LoRA, of exits on a frozen model, or of later layers (`runs/tune_config.py`) is therefore small,
and where nothing of the base learned, its full depth is the base's bit for bit. A base that is gone or that
has other weights raises CheckpointError. `apply_tuning` makes a stack that learns only what the settings say.

Limits: the base's folder is kept as an absolute path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from safetensors.torch import load_file
from torch import Tensor, nn

from topograd.data import Tokenizer
from topograd.errors import CheckpointError
from topograd.files import dump_json, read_table
from topograd.nn.lora import add_lora
from topograd.nn.stack import Stack
from topograd.registry import Registry
from topograd.runs.checkpoint import (
    TENSOR_FILES,
    Checkpoint,
    Contents,
    FolderStore,
    Optimizers,
    read_state,
)
from topograd.runs.checkpoint_set import read_set
from topograd.runs.folder import BASE
from topograd.runs.tensor_files import fill
from topograd.runs.tune_config import TuneConfig
from topograd.topology.plan import Plan

if TYPE_CHECKING:
    from topograd.runs.folder import Run
    from topograd.runs.session import LoadedRun, LoadedTextRun

_SOURCES: Registry[Callable[[Path | str], Path]] = Registry("model source")
FORMAT = "topograd-base"
VERSION = 1


def apply_tuning(stack: Stack, plan: Plan, tune: TuneConfig) -> None:
    """Make a stack learn what the settings say and no more: adds LoRA and exits, freezes the rest."""
    learning = [planned for planned in plan.stages if not planned.stage.frozen]
    if plan.topology.heads == "per-stage":  # those that the base may have where nothing learns now
        frozen = [planned.head for planned in plan.stages if planned.predicts and planned.stage.frozen]
        stack.add_heads(frozen, plan.topology.head_rank)
        for head in frozen:
            for parameter in stack.head_parameters(head):
                parameter.requires_grad_(False)
    if tune.frozen:
        stack.requires_grad_(False)
        exits = [planned.index for planned in learning if planned.predicts]
        stack.add_heads(exits, min(tune.exit_rank, stack.width))
    elif tune.lora_rank:
        relays = [p for r in stack.learned_relays().values() for p in r.parameters() if p.requires_grad]
        stack.requires_grad_(False)
        held = tune.holds_directions
        add_lora(
            list(stack.layers)[tune.first_layer :],
            tune.lora_rank,
            tune.lora_alpha,
            "held" if held else "shifted" if tune.lora_directions == "pissa" else "plain",
            stack.width if held else None,  # of wider inputs the second moments are large
        )
        for planned in learning:
            for parameter in stack.head_parameters(planned.head):
                parameter.requires_grad_()
        for parameter in relays:
            parameter.requires_grad_()


def bind_base(run: Run, base: LoadedRun, tokenizer: Tokenizer, source: str | None = None) -> None:
    """Write the base of a run; `source` is the model that it was converted from, if it was."""
    table = {
        "format": FORMAT,
        "version": VERSION,
        "folder": str(base.run.folder.absolute()),
        "weights": base.weights,
        "tokenizer": tokenizer.digest,
        "tensors": sorted(base.stack.state_dict()),
        "source": source,
    }
    run.manifest.bind(BASE, dump_json(table, indent=1) + "\n")


@dataclass(frozen=True)
class DeltaStore:
    """Checkpoints of what is not the base's."""

    folder: Path

    @property
    def own(self) -> FolderStore:
        return FolderStore(self.folder / "checkpoints")

    @property
    def base_weights(self) -> str:
        """SHA-256 of the base's weights."""
        return str(self._read()["weights"])

    @property
    def source(self) -> str | None:
        """What the base was converted from, if it was."""
        return self._read().get("source")

    def names(self) -> list[str]:
        return self.own.names()

    def extra(self, name: str) -> dict[str, Any]:
        return self.own.extra(name)

    def weights(self, name: str) -> str:
        """Of base and checkpoint together."""
        return hashlib.sha256(f"{self.base_weights} {self.own.weights(name)}".encode()).hexdigest()

    def save(self, **contents: Unpack[Contents]) -> str:
        contents["model"] = _OwnPart(contents["model"], self._read()["tensors"])
        return self.own.save(**contents)

    def load(self, name: str, model: nn.Module, optimizers: Optimizers | None = None) -> Checkpoint:
        part = _OwnPart(model, self._read()["tensors"])
        base = self.open_base()
        loaded = self.own.load(name, part, optimizers)
        tensors = base.stack.state_dict()
        fill(model, {**tensors, **part.loaded}, f"the base {base.run.folder} with {loaded.path}")
        return replace(loaded, weights=self.weights(name))

    def verified(self, name: str) -> None:
        """What its base has, only reading it shows."""

    def own_tensors(self, name: str) -> dict[str, Tensor]:
        """What a checkpoint holds beside its base; the file is verified when the run is opened."""
        path = self.own.folder / name
        state = read_state(path)
        return read_set(path, state)[0] if state.get("set") else load_file(path / TENSOR_FILES[0])

    def own_names(self, model: nn.Module) -> list[str]:
        """The tensors of a model that a checkpoint holds."""
        return list(_OwnPart(model, self._read()["tensors"]).state_dict())

    def open_base(self) -> LoadedTextRun:
        """The run that this one stands on, at the checkpoint that it was begun with."""
        from topograd.runs.folder import Run
        from topograd.runs.session import open_session

        table = self._read()
        folder = Path(table["folder"])
        if not folder.is_dir() and self.source is not None:  # the cache dropped what was converted
            folder = _SOURCES["any"](self.source)
        if not folder.is_dir():
            raise CheckpointError(f"the base of {self.folder} is not at {folder}", setting="base")
        run = Run.open(folder)
        names = [name for name in run.store.names() if run.store.weights(name) == table["weights"]]
        if not names:
            raise CheckpointError(
                f"{folder} has other weights than when {self.folder} began with it",
                setting="base",
                given=str(folder),
                remedy="restore it, or begin again with: topograd train --init",
            )
        return open_session(folder, names[-1])

    def _read(self) -> dict[str, Any]:
        keys = ("folder", "weights", "tensors")
        return read_table(self.folder / BASE, FORMAT, VERSION, keys, CheckpointError, "restore it")


class _OwnPart(nn.Module):
    """The tensors of a model that learn, or that its base does not have, as a checkpoint sees a model."""

    def __init__(self, model: nn.Module, base: list[str]) -> None:
        super().__init__()
        learning = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        known = set(base)
        self._own = [n for n in model.state_dict() if n in learning or n not in known]
        self.__dict__["_model"] = model
        self.loaded: dict[str, Tensor] = {}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.__dict__["_model"].state_dict()
        return {name: tensors[name] for name in self._own}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        own = set(self._own)
        return (pair for pair in self.__dict__["_model"].named_parameters() if pair[0] in own)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.loaded = dict(state_dict)
