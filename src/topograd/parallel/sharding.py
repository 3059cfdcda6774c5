"""Sharding of a stage's layers over its replicas (FSDP2).

Statement. R replicas of a rank have the same stages and share the batches of a step. With `shard` each of
them keeps 1/R of every tensor of its layers, of its gradient and of its optimizer's state (`fully_shard` over
the replica axis of the device mesh). A layer is gathered when it runs, forward and backward, and dropped
after it; its gradient is summed and scattered batch by batch. Heads, relays, the embedding and tensors
without dimensions are read outside the layers, or cannot be cut: they stay copies and are added up as before
(`stage_loop.py`). Checkpoints are those of whole tensors, so any number of ranks reads them.

Cost: a rank holds layers/R and one whole layer; it sends 3 (R - 1)/R of its layers' bytes for each batch,
where copies send 2 (R - 1)/R once a step. Sums are taken in another order than those of copies: 1e-12 in
float64.

Source: PyTorch FSDP2, `torch.distributed.fsdp.fully_shard`. Limits. A step must treat every number alike:
AdamW or SGD; Muon needs a whole matrix. Saving and evaluating gather a stage's weights on all its replicas.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from topograd.nn.stack import Stack
from topograd.parallel.layout import Layout
from topograd.parallel.ranks import Ranks
from topograd.training.optimizers import OptimizerSet

ELEMENTWISE = ("adamw", "sgd")
"""Optimizers that treat every number by itself."""


def shard_layers(stack: Stack, layout: Layout, ranks: Ranks) -> dict[int, nn.Parameter]:
    """Cut the layers of this rank's stages; returns the parameter that each shard came from, by its id."""
    before: dict[int, nn.Parameter] = {}
    stages = layout.stages_of(ranks.place)
    for index in dict.fromkeys(i for k in stages for i in layout.plan.stages[k].layers):
        layer = stack.layers[index]
        whole = dict(layer.named_parameters())
        scalars = {parameter for parameter in whole.values() if parameter.dim() == 0}
        cut = fully_shard(layer, mesh=ranks.replica_mesh, ignored_params=scalars)
        cut.set_gradient_divide_factor(1.0)  # batches are weighed already: their gradients are a sum
        cut.set_force_sum_reduction_for_comms(True)  # gloo has no other
        before |= {id(shard): whole[name] for name, shard in layer.named_parameters()}
    return before


def part_shards(optimizers: OptimizerSet) -> None:
    """Give shards and copies groups of their own: one fused step cannot have both."""
    for optimizer in optimizers.optimizers.values():
        for group in list(optimizer.param_groups):
            shards = [p for p in group["params"] if is_shard(p)]
            copies = [p for p in group["params"] if not is_shard(p)]
            if shards and copies:
                group["params"] = copies
                optimizer.param_groups.append({**group, "params": shards})


def is_shard(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of a shard, on all replicas at once; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_like(entries: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """An optimizer's entries for a parameter, cut as that is; every replica has them whole."""
    if not isinstance(parameter, DTensor):
        return dict(entries)
    mesh, placements = parameter.device_mesh, parameter.placements
    return {
        key: distribute_tensor(value, mesh, placements, src_data_rank=None)
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for key, value in entries.items()
    }


def squared_norm(parameters: Sequence[nn.Parameter], copies: bool) -> Tensor:
    """Of the gradients that this rank holds: shards and, on one of the replicas, `copies`."""
    held = [p.grad for p in parameters if p.grad is not None and (copies or is_shard(p))]
    norms = torch.nn.utils.get_total_norm([local(gradient) for gradient in held]) if held else torch.zeros(())
    return norms.square()
