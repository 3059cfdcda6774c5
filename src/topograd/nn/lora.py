"""LoRA: low-rank corrections of linear maps, and their merging.

    y = W x + (α / r) B A x,     A (r, inputs) random, B (outputs, r) zero at first

"LoRA" (Hu et al. 2021) §4.1. W stays as it is; A and B are parameters `lora_a`, `lora_b` of the linear module
itself, so that every other name in the model stays what it was. `merge_lora` adds (α / r) B A to W and drops
both: a merged model is an ordinary one, which decodes, exports and is adapted again like any other.

    plain     A and B learn
    held      A stays as it is and B alone learns: A is random, or `hold` sets it
    shifted   y = W x + (α / r) (B A - B₀ A₀) x: A and B begin anywhere (`begin_at`) and the output does not
              change; A₀, B₀ are buffers `lora_a0`, `lora_b0`. PiSSA is this with W's leading singular vectors

Cost: r (inputs + outputs) parameters and multiply-adds for each map. Limits: maps that are called as modules;
the embedding, the head and the norms have none. Merging rounds W once, so that the merged model's logits
differ from the unmerged one's in the last bits.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from topograd.errors import ConfigError, StackError
from topograd.nn.transformer.parts import TransposedLinear

Form = Literal["plain", "held", "shifted"]
_HANDLE, _SCALE = "_lora_hook", "_lora_scale"


def add_lora(
    layers: Iterable[nn.Module],
    rank: int,
    alpha: float | None = None,
    form: Form = "plain",
    max_inputs: int | None = None,
) -> int:
    """Give every linear map in these layers a correction of `rank`; returns how many. α is 2 r by default.

    The outputs do not change. All other parameters of the layers get requires_grad=False. Maps of more than
    `max_inputs` inputs get none.
    """
    if rank < 1:
        raise ConfigError(setting="lora_rank", given=rank, allowed="at least 1")
    scale = (2.0 * rank if alpha is None else alpha) / rank
    count = 0
    for layer in layers:
        layer.requires_grad_(False)
        for module in linear_maps(layer):
            if max_inputs is None or sides(module)[0] <= max_inputs:
                _attach(module, rank, scale, form)
                count += 1
    if not count:
        raise StackError("these layers have no linear maps, so LoRA has nothing to correct", setting="layers")
    return count


def linear_maps(layer: nn.Module) -> Iterator[nn.Module]:
    """The modules of a layer that are linear maps; of transformers' Conv1D too."""
    for module in layer.modules():
        if isinstance(module, nn.Linear) or is_transposed(module):
            yield module


def sides(module: nn.Module) -> tuple[int, int]:
    """The inputs and outputs of a linear map."""
    rows, columns = module.get_parameter("weight").shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


def corrected_maps(model: nn.Module) -> dict[str, nn.Module]:
    """The maps of a model that have a correction, by name."""
    return {name: module for name, module in model.named_modules() if has_lora(module)}


@torch.no_grad()
def hold(module: nn.Module, a: Tensor) -> None:
    """Set the rows of A of a held correction, whose B is zero."""
    module.get_parameter("lora_a").copy_(a)


@torch.no_grad()
def begin_at(module: nn.Module, a: Tensor, b: Tensor) -> None:
    """Set A and B of a shifted correction, and subtract their product from it: nothing changes."""
    for name, value in (("a", a), ("b", b)):
        module.get_parameter(f"lora_{name}").copy_(value)
        module.get_buffer(f"lora_{name}0").copy_(value)


@torch.no_grad()
def scale_lora(model: nn.Module, factor: float) -> None:
    """Multiply every correction of a model."""
    for module in corrected_maps(model).values():
        module.get_parameter("lora_b").mul_(factor)
        if "lora_b0" in module._buffers:
            module.get_buffer("lora_b0").mul_(factor)


@torch.no_grad()
def low_rank_factors(module: Any) -> tuple[Tensor, Tensor, float]:
    """A (r, inputs), B (outputs, r) and α / r of a correction; of a shifted one with 2 r, B₀ A₀ included."""
    a, b = module.lora_a.detach(), module.lora_b.detach()
    if "lora_a0" in module._buffers:
        a, b = torch.cat([a, module.lora_a0]), torch.cat([b, -module.lora_b0], 1)
    return a, b, float(module.__dict__[_SCALE])


@torch.no_grad()
def merge_lora(model: nn.Module) -> int:
    """Add every correction to its matrix and remove it; returns how many there were."""
    corrected: list[Any] = list(corrected_maps(model).values())
    for module in corrected:
        a, b, scale = low_rank_factors(module)
        delta = scale * (b @ a)
        module.__dict__.pop(_HANDLE).remove()
        del module.__dict__[_SCALE]
        # Not in place: the matrix may be memory-mapped, or shared with another model.
        weight = module.weight + (delta.T if is_transposed(module) else delta)
        module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
        for name in ("lora_a", "lora_b", "lora_a0", "lora_b0"):
            if hasattr(module, name):
                delattr(module, name)
    return len(corrected)


def has_lora(module: nn.Module) -> bool:
    """Whether this module itself has a correction."""
    return "lora_a" in module._parameters


def _attach(module: Any, rank: int, scale: float, form: Form) -> None:
    weight: Tensor = module.weight
    inputs, outputs = sides(module)
    if rank > min(inputs, outputs):
        problem = f"lora_rank is {rank} and a map has {inputs} inputs and {outputs} outputs"
        raise ConfigError(problem, setting="lora_rank", given=rank, remedy="give at most the smaller")
    if has_lora(module):
        raise StackError("a map has a LoRA correction already", setting="layers", remedy="merge it first")
    like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    a = torch.empty(rank, inputs, **like)
    if not a.is_meta:
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
    module.lora_a = nn.Parameter(a, requires_grad=form != "held")
    module.lora_b = nn.Parameter(torch.zeros(outputs, rank, **like))
    if form == "shifted":
        module.register_buffer("lora_a0", torch.zeros_like(a))
        module.register_buffer("lora_b0", torch.zeros_like(module.lora_b))
    module.__dict__[_SCALE] = scale
    module.__dict__[_HANDLE] = module.register_forward_hook(_correct)


def _correct(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    corrected = (args[0] @ module.lora_a.T) @ module.lora_b.T
    if "lora_a0" in module._buffers:
        corrected = corrected - (args[0] @ module.lora_a0.T) @ module.lora_b0.T
    return output + module.__dict__[_SCALE] * corrected


def is_transposed(module: nn.Module) -> bool:
    """Whether a map keeps its matrix as (inputs, outputs)."""
    conv = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
    return isinstance(module, TransposedLinear) or conv
