"""Checkpoints that the ranks of a job wrote as a set of files (`parallel/checkpoint_set.py`), read whole.

One process reads it like any other: every file is verified, the tensors are merged by name, and each
optimizer's state goes to the parameter of its name, however many ranks there were.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from topograd.errors import CheckpointError
from topograd.files import dump_json
from topograd.runs.checkpoint import (
    Checkpoint,
    Optimizers,
    State,
    describe_files,
    extra_of,
    read_state,
    restore,
    weights_of,
)
from topograd.runs.tensor_files import Tensors, Unusable, read_tensors


def write_state(folder: Path, step: int, extra: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
    """Describe the files of a set that is complete."""
    state = {"step": step, "extra": dict(extra), "aliases": dict(aliases), "set": True}
    describe_files(folder, json.loads(dump_json(state)))


def read_set(path: Path, state: State) -> tuple[Tensors, Tensors]:
    """The weights, and everything else, of all files of a set."""
    weights: Tensors = {}
    rest: Tensors = {}
    for name, expected in state["files"].items():
        for title, tensor in read_tensors(path / name, expected).items():
            kind, _, own = title.partition(".")
            if kind == "model":
                weights[own] = tensor
            else:
                rest[title] = tensor
    return weights, rest


def load_part(path: Path, model: nn.Module, optimizers: Optimizers | None) -> Checkpoint:
    """Fill what a model has, but for tensors on the meta device, from the checkpoint of one stage."""
    try:
        state = read_state(path)
        weights, rest = read_set(path, state)
        own = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
        names = weights.keys() | state["aliases"].keys()
        if names != own.keys():
            odd = sorted(names ^ own.keys())
            raise Unusable(f"does not fit the stage (only one of them has {odd[0]!r})")
        for name, tensor in weights.items():
            if own[name].shape != tensor.shape or own[name].dtype != tensor.dtype:
                raise Unusable(f"does not fit the stage ({name!r} has another shape or dtype)")
        saved = {} if optimizers is None else optimizer_states(rest, model, optimizers)
    except Unusable as problem:
        raise CheckpointError(
            f"checkpoint {path} {problem}", remedy="choose another one with --from"
        ) from None
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
    for name, optimizer in (optimizers or {}).items():
        restore(optimizer, saved[name])
    torch.set_rng_state(rest["rng"])
    return Checkpoint(path, state["step"], weights_of(state), state["extra"], extra_of(rest))


def optimizer_states(rest: Tensors, model: nn.Module, optimizers: Optimizers) -> dict[str, State]:
    """A state_dict for each optimizer, in its own order of parameters."""
    described = _described(rest)
    if described.keys() != optimizers.keys():
        raise Unusable(f"does not fit the optimizers (it has {sorted(described)}, not {sorted(optimizers)})")
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        title: _state_dict(title, described[title], rest, names, optimizer)
        for title, optimizer in optimizers.items()
    }


def optimizer_parts(rest: Tensors) -> dict[str, dict[str, dict[str, Any]]]:
    """Every optimizer's state by parameter name."""
    return {
        title: {
            name: {key: _entry(title, key, name, value, rest) for key, value in entries.items()}
            for name, entries in one["state"].items()
        }
        for title, one in _described(rest).items()
    }


def _described(rest: Tensors) -> dict[str, dict[str, Any]]:
    """The descriptions of all ranks' optimizers, merged."""
    merged: dict[str, dict[str, Any]] = {}
    for title, tensor in sorted(rest.items()):
        if title.startswith("numbers."):
            for name, one in json.loads(bytes(tensor.tolist())).items():
                known = merged.setdefault(name, {"kind": one["kind"], "groups": [], "state": {}})
                known["groups"] += one["groups"]
                known["state"] |= one["state"]
    return merged


def _state_dict(
    title: str, saved: dict[str, Any], rest: Tensors, names: Mapping[int, str], optimizer: Optimizer
) -> State:
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise Unusable(f"does not fit optimizer {title!r} (it is {saved['kind']}, expected {kind})")
    options = {name: group["options"] for group in saved["groups"] for name in group["names"]}
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    index = 0
    for group in optimizer.param_groups:
        own = [names[id(p)] for p in group["params"]]
        if not set(own) <= options.keys():
            raise Unusable(f"does not fit optimizer {title!r} (its groups hold other parameters)")
        numbers = list(range(index, index + len(own)))
        fresh = {key: value for key, value in group.items() if key != "params"}
        # JSON has no tuples: options that are tuples become tuples again.
        saved_options = options[own[0]].items() if own else ()
        before = {k: tuple(v) if isinstance(fresh.get(k), tuple) else v for k, v in saved_options}
        groups.append(fresh | before | {"params": numbers})
        for number, name in zip(numbers, own, strict=True):
            entries = saved["state"].get(name)
            if entries is not None:
                state[number] = {k: _entry(title, k, name, v, rest) for k, v in entries.items()}
        index += len(own)
    return {"state": state, "param_groups": groups}


def _entry(title: str, key: str, name: str, value: Any, rest: Tensors) -> Any:
    if not isinstance(value, dict):
        return value
    tensor: Tensor = rest[f"optimizer.{title}.{key}.{name}"]
    return tensor.reshape(value["tensor"]) if value["tensor"] else tensor.reshape(())
