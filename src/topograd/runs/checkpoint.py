"""Checkpoints of a model and its optimizers: safetensors and JSON, atomic and verified by SHA-256.

One checkpoint is a folder:

    step-00000040/model.safetensors       the model's state_dict, each tied tensor once
    step-00000040/optimizer.safetensors   the tensors of the optimizers' state_dicts, "rng", "rng.cuda", and
                                          "extra.*", other tensors of the training
    step-00000040/state.json              format, version, step, extra, size and SHA-256 of both files, the
                                          names of tied tensors, the optimizers' numbers, its own SHA-256

How a kill is survived. A save writes `.tmp-<step>-<pid>`, forces it to the disk and renames it. A checkpoint
of the same step is renamed to `.old-step-...` first and counts until the new one stands. A checkpoint that
is no longer kept is renamed to `.trash-...` before it is deleted. The next save removes what a kill left.
Only one process may save into a folder at a time: `topograd.runs.folder.Run.lock` sees to that.

What is restored exactly: parameters, buffers, every tensor and number of the optimizers (in the saved dtype)
and torch's generators of the CPU and of CUDA. A file that was hashed once and was not touched since is not
hashed again (`data/digest_cache.py`). Limits: other generators and schedulers are the caller's (`extra`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict, Unpack

from safetensors import SafetensorError

from topograd.errors import CheckpointError, ConfigError, RunError
from topograd.files import dump_json, read_json, sha256, sync, write_json
from topograd.runs.tensor_files import (
    Tensors,
    Unusable,
    aliases_of,
    check_file,
    check_tensors,
    contiguous,
    is_empty,
    read_tensors,
    tensors_of,
    tie_again,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

FORMAT = "topograd-checkpoint"
VERSION = 1
TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")
STATE_FILE = "state.json"
EXTRA = "extra."
"""What the names of other tensors begin with."""

Optimizers = Mapping[str, "Optimizer"]
State = dict[str, Any]
_NAME = re.compile(r"(?:\.old-)?step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """What `load` returns beside the model and optimizers that it filled."""

    path: Path
    step: int
    weights: str
    """SHA-256 of the file of weights: what results and calibrations name."""
    extra: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The other tensors that were saved with it; empty where no optimizers are filled."""


class Contents(TypedDict):
    """What `save` takes."""

    step: int
    model: nn.Module
    optimizers: Optimizers
    extra: Mapping[str, Any]
    keep: NotRequired[int]
    tensors: NotRequired[Mapping[str, Tensor] | None]


class CheckpointStore(Protocol):
    """Where a run keeps its checkpoints. Names sort by step."""

    def names(self) -> list[str]:
        """The checkpoints, oldest step first."""

    def weights(self, name: str) -> str:
        """SHA-256 of a checkpoint's weights, without reading them."""

    def extra(self, name: str) -> dict[str, Any]:
        """What was kept beside the weights, without reading them."""

    def save(self, **contents: Unpack[Contents]) -> str:
        """Save a checkpoint, drop those that are no longer kept, and return its name."""

    def load(self, name: str, model: nn.Module, optimizers: Optimizers | None = None) -> Checkpoint:
        """Fill a model, and its optimizers to continue training, from a verified checkpoint."""

    def verified(self, name: str) -> Checkpoint | None:
        """A checkpoint whose files are the recorded ones, without reading a tensor; None where that cannot
        be known. Raises Unusable or CheckpointError."""


@dataclass(frozen=True)
class FolderStore:
    """Checkpoints as folders in a folder."""

    folder: Path

    def names(self) -> list[str]:
        return [path.name for path in available(self.folder)]

    def weights(self, name: str) -> str:
        return weights_of(self._state(name))

    def extra(self, name: str) -> dict[str, Any]:
        extra: dict[str, Any] = self._state(name)["extra"]
        return extra

    def _state(self, name: str) -> State:
        try:
            return read_state(self.folder / name)
        except Unusable as problem:
            others = [other for other in self.names() if other < name]
            advice = f"resume with --from {others[-1]}" if others else "train again in another folder"
            raise CheckpointError(f"checkpoint {self.folder / name} {problem}", remedy=advice) from None

    def save(self, **contents: Unpack[Contents]) -> str:
        return save(self.folder, **contents).name

    def load(self, name: str, model: nn.Module, optimizers: Optimizers | None = None) -> Checkpoint:
        return load(self.folder / name, model, optimizers)

    def verified(self, name: str) -> Checkpoint:
        """A checkpoint whose files are the recorded ones; no tensor is read. Raises Unusable."""
        path = self.folder / name
        state = read_state(path)
        for file, recorded in state["files"].items():
            check_file(path / file, recorded)
        return Checkpoint(path, state["step"], weights_of(state), state["extra"])


def available(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest step first. Their contents are not read."""
    paths = sorted(path for path in folder.glob("*step-*") if _step_of(path) >= 0 and path.is_dir())
    by_step = {_step_of(path): path for path in paths}  # "step-" comes after ".old-step-" and replaces it
    return [by_step[step] for step in sorted(by_step)]


def latest(folder: Path) -> Path | None:
    """The checkpoint with the highest step, or None. Its contents are not read."""
    return next(reversed(available(folder)), None)


def save(
    folder: Path,
    *,
    step: int,
    model: nn.Module,
    optimizers: Optimizers,
    extra: Mapping[str, Any],
    keep: int = 2,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Save a checkpoint and return its path. `extra` must be JSON; it comes back as JSON reads it.
    `tensors` are others of the training, by name.

    Afterwards the `keep` newest up to `step` remain. Those of later steps go too: they belong to a future
    that was given up by resuming from before it, and `latest` would otherwise prefer them.
    """
    import torch

    if step < 0:
        raise ConfigError(setting="step", given=step, allowed="at least 0")
    if keep < 1:
        raise ConfigError(setting="keep", given=keep, allowed="at least 1")
    target = folder / f"step-{step:08d}"
    aliases = aliases_of(weights := tensors_of(model))
    rest: Tensors = {"rng": torch.get_rng_state(), **named_extra(tensors)}
    if device := _cuda(model):
        rest["rng.cuda"] = torch.cuda.get_rng_state(device)
    numbers = {
        name: {
            "kind": type(optimizer).__name__,
            "parameters": _parameters(model, optimizer),
            "state_dict": _encode(optimizer.state_dict(), name, rest),  # its tensors go into `rest`
        }
        for name, optimizer in optimizers.items()
    }
    state = {"step": step, "extra": dict(extra), "aliases": aliases, "optimizers": numbers}
    state = json.loads(dump_json(state, error=CheckpointError))  # as it will be read
    temporary = folder / f".tmp-{step}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tidy(folder)
        temporary.mkdir()
        _write(temporary, {n: t for n, t in weights.items() if n not in aliases}, rest, state)
        put_in_place(temporary, target, keep)
    except (OSError, SafetensorError) as problem:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"cannot save {target} ({problem})", remedy="make room and resume") from problem
    return target


def load(path: Path, model: nn.Module, optimizers: Optimizers | None = None) -> Checkpoint:
    """Fill a model, and its optimizers and torch's generators to continue training, from a checkpoint.

    Without `optimizers` only the model is filled, as evaluation wants it. Everything is verified before
    anything is changed; a checkpoint that is damaged or does not fit raises CheckpointError, which names
    the newest one before it that could be loaded instead.
    """
    import torch

    try:
        checkpoint, weights, tensors, saved = _read(path, model, optimizers)
    except Unusable as problem:
        raise CheckpointError(
            f"checkpoint {path} {problem}", remedy=_advice(path, model, optimizers)
        ) from None
    model.load_state_dict(weights, assign=is_empty(model))
    tie_again(model, read_state(path)["aliases"])
    if optimizers is not None:
        for name, optimizer in optimizers.items():
            restore(optimizer, saved[name])
        torch.set_rng_state(tensors["rng"])
        if (device := _cuda(model)) and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"], device)
    return checkpoint


def named_extra(tensors: Mapping[str, Tensor] | None) -> Tensors:
    """Other tensors of a training as a checkpoint names them."""
    return {f"{EXTRA}{name}": tensor.detach().cpu() for name, tensor in (tensors or {}).items()}


def extra_of(tensors: Tensors) -> Tensors:
    """They again, by their own names."""
    return {n.removeprefix(EXTRA): tensor for n, tensor in tensors.items() if n.startswith(EXTRA)}


def _cuda(model: nn.Module) -> torch.device | None:
    """Where a model is, if that is CUDA: dropout there draws from its own generator."""
    return next((p.device for p in model.parameters() if p.device.type == "cuda"), None)


# Saving


def _write(folder: Path, weights: Tensors, tensors: Tensors, state: State) -> None:
    """Write the three files of a checkpoint and force them to the disk."""
    from safetensors.torch import save_file

    for name, content in zip(TENSOR_FILES, (weights, tensors), strict=True):
        save_file(contiguous(content), folder / name)
    describe_files(folder, state)


def describe_files(folder: Path, state: State) -> None:
    """Write the state with size and SHA-256 of the tensor files; with it the folder can be read."""
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    header = {"format": FORMAT, "version": VERSION, "sha256": digest(state | {"files": files})}
    write_json(folder / STATE_FILE, header | state | {"files": files})
    sync(folder)


def put_in_place(temporary: Path, target: Path, keep: int) -> None:
    """Rename a finished checkpoint, and drop those that are no longer kept.

    One of the same step is set aside, and counts until that is done.
    """
    old = target.with_name(f".old-{target.name}")
    if target.exists():
        os.rename(target, old)
    os.rename(temporary, target)
    sync(target.parent)
    if old.exists():
        discard(old)
    folder = target.parent
    retained = [path for path in available(folder) if _step_of(path) <= _step_of(target)][-keep:]
    for path in available(folder):
        if path not in retained:
            discard(path)


def tidy(folder: Path) -> None:
    """Finish what a killed save left: put an old checkpoint back if no new one stands, delete the rest."""
    for old in folder.glob(".old-step-*"):
        target = old.with_name(old.name.removeprefix(".old-"))
        if target.exists():
            discard(old)
        else:
            os.rename(old, target)
    for leftover in (*folder.glob(".tmp-*"), *folder.glob(".trash-*")):
        shutil.rmtree(leftover)


def discard(path: Path) -> None:
    """Delete a checkpoint so that a kill never leaves half of one under a name that counts."""
    trash = path.with_name(f".trash-{path.name.lstrip('.')}-{os.getpid()}")
    os.rename(path, trash)
    shutil.rmtree(trash)


def _parameters(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Name and shape of each parameter, by group: a state must return to the parameter that it came from."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        [f"{names.get(id(p), 'outside the model')} {tuple(p.shape)}" for p in group["params"]]
        for group in optimizer.param_groups
    ]


def _encode(value: Any, name: str, tensors: Tensors) -> Any:
    """A value as JSON that `_decode` reverses: tensors by name, keys and tuples kept as they are."""
    from torch import Tensor

    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            if name in tensors:
                raise CheckpointError(
                    f"two optimizer tensors are named {name!r}", remedy="rename an optimizer"
                )
            tensors[name] = value
            return {"tensor": name}
        case dict() if all(isinstance(key, int | str) for key in value):
            return {"dict": [[key, _encode(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
        case list() | tuple():
            items = [_encode(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
    kind = type(value).__name__
    raise CheckpointError(
        f"optimizer entry {name} is a {kind}", remedy="only tensors and plain numbers can be saved"
    )


def digest(state: State) -> str:
    """SHA-256 of a state's values, whatever the layout of the text that they were read from."""
    return hashlib.sha256(dump_json(state).encode()).hexdigest()


# Loading


def _step_of(path: Path) -> int:
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name else -1


def _advice(path: Path, model: nn.Module, optimizers: Optimizers | None) -> str:
    """What to do about a checkpoint that cannot be loaded."""
    for before in reversed(available(path.parent)):
        if _step_of(before) < _step_of(path):
            try:
                _read(before, model, optimizers)
            except Unusable:
                continue
            return f"the one before it is good: resume with --from {before.name}"
    return "no checkpoint before it can be loaded: choose another one, or train again in another folder"


def _read(
    path: Path, model: nn.Module, optimizers: Optimizers | None
) -> tuple[Checkpoint, Tensors, Tensors, State]:
    """Read and verify a checkpoint: its header, weights, other tensors and the optimizers' state_dicts.

    Changes nothing; raises Unusable.
    """
    import torch

    state = read_state(path)
    ranks = state.get("set")  # saved by the ranks of a job
    if ranks:
        from topograd.runs.checkpoint_set import optimizer_states, read_set

        weights, tensors = read_set(path, state)
    else:
        weights, tensors = (read_tensors(path / name, state["files"][name]) for name in TENSOR_FILES)
    check_tensors(weights, state["aliases"], tensors_of(model), exact=optimizers is not None)
    weights |= {alias: weights[name] for alias, name in state["aliases"].items()}
    saved: dict[str, State] = {}
    if optimizers is not None:
        if ranks:
            saved = optimizer_states(tensors, model, optimizers)
        else:
            _check_optimizers(state["optimizers"], model, optimizers)
            saved = {n: _decode(state["optimizers"][n]["state_dict"], tensors) for n in optimizers}
        if tensors["rng"].shape != torch.get_rng_state().shape:
            raise Unusable("does not fit this torch (its random generator has another size)")
    others = {} if optimizers is None else extra_of(tensors)
    found = Checkpoint(path, state["step"], weights_of(state), state["extra"], others)
    return found, weights, tensors, saved


def weights_of(state: State) -> str:
    """SHA-256 of the weights' file; of a set, of the digests of all its files."""
    files = state["files"]
    if state.get("set"):
        return digest({name: files[name]["sha256"] for name in sorted(files)})
    return str(files[TENSOR_FILES[0]]["sha256"])


def read_state(path: Path) -> State:
    if not path.is_dir():
        raise Unusable("does not exist")
    if not (path / STATE_FILE).is_file():
        raise Unusable(f"is damaged ({STATE_FILE} is missing)")
    try:
        state = read_json(path / STATE_FILE)
    except RunError as problem:
        raise Unusable(f"is damaged ({problem})") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise Unusable(f"is foreign ({STATE_FILE} does not name the format {FORMAT!r})")
    if state.get("version") != VERSION:
        raise Unusable(f"has version {state.get('version')!r} (this program reads version {VERSION})")
    body = {key: value for key, value in state.items() if key not in ("format", "version", "sha256")}
    if state.get("sha256") != digest(body):
        raise Unusable(f"is damaged ({STATE_FILE}: its SHA-256 is not the recorded one)")
    for name in body["files"] if body.get("set") else TENSOR_FILES:
        if not (path / name).is_file():
            raise Unusable(f"is damaged ({name} is missing)")
    return body


def _check_optimizers(saved: State, model: nn.Module, own: Optimizers) -> None:
    """Names, kinds and the parameters of each group must be the optimizers' own."""
    if saved.keys() != own.keys():
        raise Unusable(f"does not fit the optimizers (it has {sorted(saved)}, expected {sorted(own)})")
    for name, optimizer in own.items():
        kind = type(optimizer).__name__
        if saved[name]["kind"] != kind:
            raise Unusable(f"does not fit optimizer {name!r} (it is {saved[name]['kind']}, expected {kind})")
        if saved[name]["parameters"] != _parameters(model, optimizer):
            raise Unusable(f"does not fit optimizer {name!r} (its groups hold other parameters)")


def _decode(value: Any, tensors: Tensors) -> Any:
    match value:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": items}:
            return {key: _decode(item, tensors) for key, item in items}
        case {"tuple": items}:
            return tuple(_decode(item, tensors) for item in items)
        case list():
            return [_decode(item, tensors) for item in value]
    return value


def restore(optimizer: Optimizer, saved: State) -> None:
    """Load an optimizer's state_dict, then undo what torch does to it on the way.

    `load_state_dict` casts state to the parameter's dtype, and a file forgets strides, which torch's fused
    kernels take to be the parameter's.
    """
    import torch
    from torch import Tensor

    optimizer.load_state_dict(saved)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for index, parameter in enumerate(parameters):
        for key, value in saved["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                like = parameter if value.shape == parameter.shape else value
                device = optimizer.state[parameter][key].device
                value = torch.empty_like(like, dtype=value.dtype, device=device).copy_(value)
            optimizer.state[parameter][key] = value
