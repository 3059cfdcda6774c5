"""Safetensors files, tied tensors, and whether saved tensors fit a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from topograd.data.digest_cache import remembered_sha256
from topograd.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, nn

Tensors = dict[str, "Tensor"]


class Unusable(Exception):
    """Why a checkpoint cannot be loaded, as the rest of a sentence that starts with its name."""


def tensors_of(model: nn.Module) -> Tensors:
    from torch import Tensor

    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"the model's {name!r} is not a tensor", remedy="keep it out of its state_dict"
            )
    return state


def aliases_of(tensors: Tensors) -> dict[str, str]:
    """Names of tied tensors: each further name of the same memory, mapped to the alphabetically first one."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():  # empty tensors have no memory to share
            storage = tensor.untyped_storage()._cdata  # also of tensors on the meta device
            memory = (storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
            groups.setdefault(memory, []).append(name)
    return {name: min(names) for names in groups.values() for name in names if name != min(names)}


def contiguous(tensors: Tensors) -> Tensors:
    """The tensors as safetensors wants them: on the CPU, contiguous, no two in one storage."""
    result: Tensors = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return result


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors with their names, kinds and shapes, for a file that keeps it in its own header."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_file(file: Path, expected: Mapping[str, Any]) -> None:
    """Raise Unusable for a file that has not the size and SHA-256 that were recorded."""
    try:
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise Unusable(f"is damaged ({file.name}: {size} bytes, expected {expected['bytes']})")
        if remembered_sha256(file) != expected["sha256"]:
            raise Unusable(f"is damaged ({file.name}: its SHA-256 is not the recorded one)")
    except OSError as problem:
        raise Unusable(f"is damaged ({file.name}: {problem})") from None


def read_tensors(file: Path, expected: Mapping[str, Any]) -> Tensors:
    from safetensors.torch import load_file

    check_file(file, expected)
    try:
        return load_file(file)
    except (OSError, SafetensorError) as problem:
        raise Unusable(f"is damaged ({file.name}: {problem})") from None


def check_tensors(weights: Tensors, aliases: dict[str, str], own: Tensors, exact: bool) -> None:
    """Names, ties, shapes and dtypes must be the model's own; bfloat16 may be read, but not trained on."""
    import torch

    saved = weights.keys() | aliases.keys()
    for names, problem in ((own.keys() - saved, "it lacks"), (saved - own.keys(), "the model has no")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise Unusable(f"does not fit the model ({problem} {min(names)!r}{more})")
    differing = sorted(set(aliases.items()) ^ set(aliases_of(own).items()))
    if differing:
        first, second = differing[0]
        raise Unusable(f"does not fit the model (only one of them ties {first!r} to {second!r})")
    for name, tensor in weights.items():
        rounded = not exact and tensor.dtype == torch.bfloat16 and own[name].is_floating_point()
        if tensor.shape != own[name].shape or not (rounded or tensor.dtype == own[name].dtype):
            kinds = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (tensor, own[name])]
            raise Unusable(f"does not fit the model ({name!r} is {kinds[0]}, the model's is {kinds[1]})")


def is_empty(model: nn.Module) -> bool:
    """Whether a model was built on the meta device, without memory; its weights are then put in place."""
    return any(parameter.is_meta for parameter in model.parameters())


def tie_again(model: nn.Module, aliases: Mapping[str, str]) -> None:
    """Assigned tensors are apart; names of one tensor become one parameter again."""
    for alias, name in aliases.items():
        owner, _, last = alias.rpartition(".")
        setattr(model.get_submodule(owner), last, model.get_parameter(name))


def fill(model: nn.Module, weights: Tensors, where: str) -> None:
    """Give a model weights from outside: all of its own, of its shapes, tied ones once or by every name."""
    own = tensors_of(model)
    aliases = aliases_of(own)
    weights = weights | {alias: weights[name] for alias, name in aliases.items() if name in weights}
    try:
        check_tensors({n: t for n, t in weights.items() if n not in aliases}, aliases, own, exact=False)
    except Unusable as problem:
        raise CheckpointError(f"{where} {problem}", remedy="import the model again") from None
    model.load_state_dict(weights, assign=is_empty(model))
    tie_again(model, aliases)
