"""LoRA: low-rank corrections of linear maps, and their merging.

    y = W x + (α / r) B A x,     A (r, inputs) random, B (outputs, r) zero at first

"LoRA" (Hu et al. 2021) §4.1. W stays as it is; A and B are parameters `lora_a`, `lora_b` of the linear module
itself, so that every other name in the model stays what it was. `merge_lora` adds (α / r) B A to W and drops
both: a merged model is an ordinary one, which decodes, exports and is adapted again like any other.

Cost: r (inputs + outputs) parameters and multiply-adds for each map. Limits: maps that are called as modules;
the embedding, the head and the norms have none. Merging rounds W once, so that the merged model's logits
differ from the unmerged one's in the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import ConfigError, StackError
from topograd.nn.transformer.parts import TransposedLinear

_HANDLE, _SCALE = "_lora_hook", "_lora_scale"


def add_lora(layers: Iterable[nn.Module], rank: int, alpha: float | None = None) -> int:
    """Give every linear map in these layers a correction of `rank`; returns how many. α is 2 r by default.

    The outputs do not change. All other parameters of the layers get requires_grad=False.
    """
    if rank < 1:
        raise ConfigError(setting="lora_rank", given=rank, allowed="at least 1")
    scale = (2.0 * rank if alpha is None else alpha) / rank
    count = 0
    for layer in layers:
        layer.requires_grad_(False)
        for module in linear_maps(layer):
            _attach(module, rank, scale)
            count += 1
    if not count:
        raise StackError("these layers have no linear maps, so LoRA has nothing to correct", setting="layers")
    return count


def linear_maps(layer: nn.Module) -> Iterator[nn.Module]:
    """The modules of a layer that are linear maps; of transformers' Conv1D too."""
    for module in layer.modules():
        if isinstance(module, nn.Linear) or _transposed(module):
            yield module


@torch.no_grad()
def merge_lora(model: nn.Module) -> int:
    """Add every correction to its matrix and remove it; returns how many there were."""
    corrected: list[Any] = [module for module in model.modules() if has_lora(module)]
    for module in corrected:
        delta = module.__dict__.pop(_SCALE) * (module.lora_b @ module.lora_a)
        module.__dict__.pop(_HANDLE).remove()
        # Not in place: the matrix may be memory-mapped, or shared with another model.
        weight = module.weight + (delta.T if _transposed(module) else delta)
        module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
        del module.lora_a, module.lora_b
    return len(corrected)


def has_lora(module: nn.Module) -> bool:
    """Whether this module itself has a correction."""
    return "lora_a" in module._parameters


def _attach(module: Any, rank: int, scale: float) -> None:
    weight: Tensor = module.weight
    inputs, outputs = weight.shape if _transposed(module) else weight.shape[::-1]
    if rank > min(inputs, outputs):
        problem = f"lora_rank is {rank} and a map has {inputs} inputs and {outputs} outputs"
        raise ConfigError(problem, setting="lora_rank", given=rank, remedy="give at most the smaller")
    if has_lora(module):
        raise StackError("a map has a LoRA correction already", setting="layers", remedy="merge it first")
    like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    a = torch.empty(rank, inputs, **like)
    if not a.is_meta:
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
    module.lora_a = nn.Parameter(a)
    module.lora_b = nn.Parameter(torch.zeros(outputs, rank, **like))
    module.__dict__[_SCALE] = scale
    module.__dict__[_HANDLE] = module.register_forward_hook(_correct)


def _correct(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + module.__dict__[_SCALE] * ((args[0] @ module.lora_a.T) @ module.lora_b.T)


def _transposed(module: nn.Module) -> bool:
    """Whether a map keeps its matrix as (inputs, outputs)."""
    conv = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
    return isinstance(module, TransposedLinear) or conv
