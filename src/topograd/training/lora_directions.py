"""The directions that LoRA corrections begin in, by name, and what a map needs to be held there.

    plain     A random, B zero; both learn
    random    A random and held: what the others are measured against
    pissa     A, B the leading singular vectors of W, subtracted from the correction; both learn
    dead      A held in the directions that the old text uses least
    safe      A held in those that the new text uses most for what the old one does

Source: "PiSSA" (Meng et al. 2024); dead and safe are of `geometry/safe_directions.py`. What dead holds is
what "LoRA-Null" (Tang et al. 2025) begins with.
Cost: pissa an SVD of each map; dead and safe a forward pass over both texts and d³ for each input.
Limits. Held corrections are given to maps that have no more inputs than the residual stream has (queries,
keys, values, the output of attention, the maps into an MLP): of the others d³ is large, and so is (d, d).
Maps that the texts do not reach (experts) keep random rows.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from topograd.geometry.safe_directions import adapter_directions, input_moments
from topograd.nn.lora import begin_at, corrected_maps, hold, low_rank_factors, sides
from topograd.runs.tune_config import Directions


def begin_lora(
    model: nn.Module, directions: Directions, old: Iterable[Tensor] = (), new: Iterable[Tensor] = ()
) -> None:
    """Set the corrections of a model that has none learned yet; `old` and `new` are batches of its inputs."""
    maps = corrected_maps(model)
    if directions == "pissa":
        for module in maps.values():
            begin_at(module, *leading_factors(module))
    elif directions in ("dead", "safe"):
        before, after = (input_moments(model, maps, text) for text in (old, new))
        hold_directions(maps, "dead" if directions == "dead" else "safe", before, after)


def hold_directions(
    maps: Mapping[str, nn.Module],
    kind: Literal["dead", "safe"],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
) -> None:
    """Hold corrections by the second moments (d, d) of what maps read, on the old text and on the new one."""
    shared: dict[tuple[int, int], Tensor] = {}
    for name, module in maps.items():
        if name not in before or name not in after:
            continue
        key = id(before[name]), len(module.get_parameter("lora_a"))
        if key not in shared:
            shared[key] = adapter_directions(kind, before[name], after[name], key[1])
        hold(module, shared[key])


@torch.no_grad()
def leading_factors(module: nn.Module) -> tuple[Tensor, Tensor]:
    """A = √S Vᵀ and B = U √S of the leading singular vectors of a map, over its scale's root."""
    weight: Tensor = module.get_parameter("weight")
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    rank, (inputs, _) = len(module.get_parameter("lora_a")), sides(module)
    weight = weight if weight.shape[1] == inputs else weight.T
    U, S, Vh = torch.linalg.svd(weight, full_matrices=False)
    size = (S[:rank] / low_rank_factors(module)[2]).sqrt()
    return size[:, None] * Vh[:rank], U[:, :rank] * size
