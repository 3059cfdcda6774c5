"""Checkpoints of a job: a set of files, written by its ranks with torch.distributed.checkpoint.

Each rank hands its own stages and what all share to `dcp.save`, which writes every tensor once, a file for
each rank, as safetensors: no pickle. The set becomes a checkpoint when rank 0 has put the sizes and SHA-256
of all files into `state.json` and renamed the folder; until then the one before it counts. So a kill or a
full disk at any moment leaves the last set whole, and all ranks learn of a failure. While a rank writes, or
rank 0 hashes and syncs, the others wait as long as it lives: a slow disk is no reason to give up.

    step-00000040/shard-00001-model-00001-of-00001.safetensors   rank 0, and so on
    step-00000040/state.json                                     as in `runs/checkpoint.py`, with "set": true

`runs/checkpoint_set.py` reads a set in one process. Names: "model.<name>" are weights,
"optimizer.<optimizer>.<key>.<parameter>" their optimizers' tensors, "numbers.<rank>" JSON as bytes,
"extra.<name>" other tensors of the training.
"""

import shutil
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from topograd.errors import CheckpointError
from topograd.files import dump_json
from topograd.parallel.layout import present
from topograd.parallel.ranks import Ranks
from topograd.parallel.sharding import local, whole
from topograd.runs.checkpoint import (
    Checkpoint,
    Contents,
    FolderStore,
    Optimizers,
    named_extra,
    put_in_place,
    tidy,
)
from topograd.runs.checkpoint_set import load_part, write_state
from topograd.runs.delta_store import DeltaStore
from topograd.runs.tensor_files import aliases_of

SAVE_SECONDS = 3600.0
"""How long ranks wait for one that writes; one that dies is noticed at once."""


@dataclass(frozen=True)
class SetStore(FolderStore):
    """The checkpoints of a run, saved by all ranks together."""

    ranks: Ranks

    def save(self, **contents: Unpack[Contents]) -> str:
        step, model = contents["step"], contents["model"]
        target, temporary = self.folder / f"step-{step:08d}", self.folder / f".tmp-{step}-set"
        self.ranks.saves += 1
        problem = ""
        if self.ranks.first:
            problem = _tried(lambda: _begin(self.folder))
        failure = self.ranks.agree(problem, "beginning a checkpoint")
        if not failure:
            if self.ranks.save_group is None:  # here all ranks have come
                self.ranks.save_group = dist.new_group(timeout=timedelta(seconds=SAVE_SECONDS))
            own = _contents(contents, self.ranks.rank)
            problem = _tried(lambda: _write(temporary, own, self.ranks.save_group))
            failure = self.ranks.agree(problem, "writing a checkpoint")
        if not failure:
            problem = ""
            if self.ranks.first:
                aliases = aliases_of({name: local(t) for name, t in model.state_dict().items()})

                def finish() -> None:
                    write_state(temporary, step, contents["extra"], aliases)
                    put_in_place(temporary, target, contents.get("keep", 2))

                with self.ranks.busy(f"finishing {target.name}"):
                    problem = _tried(finish)
                self.ranks.tell(f"saved/{self.ranks.saves}", "")
            else:
                self.ranks.follow(f"saved/{self.ranks.saves}", 0, "rank 0 finished a checkpoint")
            failure = self.ranks.agree(problem, "finishing a checkpoint")
        if failure:
            if self.ranks.first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"cannot save {target} ({failure})", remedy="make room and resume")
        return target.name


@dataclass(frozen=True)
class DeltaSetStore(DeltaStore):
    """The same of a run that learns a part of another one: sets hold that part alone."""

    ranks: Ranks

    @property
    def own(self) -> FolderStore:
        return SetStore(self.folder / "checkpoints", self.ranks)


class IndependentStageStore(FolderStore):
    """The checkpoints of one stage trained by itself (`independent_stage.py`): sets that hold it alone."""

    def save(self, **contents: Unpack[Contents]) -> str:
        step, model = contents["step"], contents["model"]
        target, temporary = self.folder / f"step-{step:08d}", self.folder / f".tmp-{step}-set"

        def write() -> None:
            _begin(self.folder)
            _write(temporary, _contents(contents, 0), None)
            write_state(temporary, step, contents["extra"], aliases_of(present(model.state_dict())))
            put_in_place(temporary, target, contents.get("keep", 2))

        problem = _tried(write)
        if problem:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"cannot save {target} ({problem})", remedy="make room and resume")
        return target.name

    def load(self, name: str, model: nn.Module, optimizers: Optimizers | None = None) -> Checkpoint:
        return load_part(self.folder / name, model, optimizers)


def _contents(contents: Contents, rank: int) -> dict[str, Tensor]:
    """All that a rank saves, by name."""
    own = tensors_of(contents["model"], contents["optimizers"], rank)
    return own | named_extra(contents.get("tensors"))


def _begin(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tidy(folder)


def _write(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """This rank's part of a set; without a group, the whole of it."""
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)


def tensors_of(model: nn.Module, optimizers: Optimizers, rank: int) -> dict[str, Tensor]:
    """What a rank saves, named as `runs/checkpoint_set.py` reads it; tied tensors once, shards whole."""
    state = present(model.state_dict())
    aliases = aliases_of({name: local(tensor) for name, tensor in state.items()})
    tensors = {f"model.{name}": tensor for name, tensor in state.items() if name not in aliases}
    names = {id(p): name for name, p in model.named_parameters()}
    numbers: dict[str, Any] = {}
    for title, optimizer in optimizers.items():
        groups = []
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({"options": options, "names": [names[id(p)] for p in group["params"]]})
        plain: dict[str, dict[str, Any]] = {}
        for parameter, entries in optimizer.state.items():
            name = names[id(parameter)]
            plain[name] = {}
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{title}.{key}.{name}"] = (
                        value.reshape(1) if value.dim() == 0 else value
                    )
                plain[name][key] = {"tensor": list(value.shape)} if isinstance(value, Tensor) else value
        numbers[title] = {"kind": type(optimizer).__name__, "groups": groups, "state": plain}
    text = dump_json(numbers, error=CheckpointError).encode()
    tensors[f"numbers.{rank}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    tensors["rng"] = torch.get_rng_state()
    return {name: whole(tensor.detach()).cpu().contiguous() for name, tensor in tensors.items()}


def _tried(action: Any) -> str:
    """Why an action failed, in one line; '' if it did not."""
    try:
        action()
    except dcp.CheckpointException as error:  # of some ranks, known to all of them
        reasons = [f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()]
        return " ".join(reasons[0].split())
    except (OSError, RuntimeError, ValueError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""
