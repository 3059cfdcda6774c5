"""Optimizers by parameter group, and their learning rates.

| group      | parameters                                 | muon+adamw | adamw | sgd | ddc-adam | ddc-muon |
|------------|--------------------------------------------|------------|-------|-----|----------|----------|
| matrices   | 2-D and 4-D weights inside the layers      | Muon       | AdamW | SGD | DDCAdam  | DDCMuon  |
| embeddings | weights of nn.Embedding, wherever they are | AdamW      | AdamW | SGD | DDCAdam  | DDCAdam  |
| head       | 2-D weights outside the layers             | AdamW      | AdamW | SGD | DDCAdam  | DDCAdam  |
| scalars    | everything else: gains, gates, biases      | AdamW      | AdamW | SGD | DDCAdam  | DDCAdam  |
| relays     | what the stack's own relays have           | AdamW      | AdamW | SGD | DDCAdam  | DDCAdam  |

Kernels of convolutions are 4-D: where matrices get Muon or DDCMuon, they get AdamW or DDCAdam at 0.002. Steps
of fixed size, as Muon's, drive an interface's message to a constant (docs/results): relays are slow. A head
that is tied to the embedding counts as a head.

An optimizer of your own is `make(groups, config, stack) -> {name: optimizer}`, named in the settings as
`package.module:make` or registered in `OPTIMIZERS`. `groups` has the parameters of each group by name. The
learning rate that a param group is made with is its peak; the schedule multiplies it.

The gauges of the ddc optimizers are those of the GPT that hold by construction: the rescaling of each ReLU²
MLP (degree 2), and the shift of the output matrices that no softmax sees. A rescaling needs a norm above
zero, and MLP outputs start at zero: those that are zero are given a small spread first. With the objective
z-loss the shift is no symmetry of the loss; the ddc optimizers hold it where it started all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from topograd.errors import ConfigError
from topograd.nn.aux_heads import auxiliary_name
from topograd.nn.heads import FullDelta
from topograd.nn.relays import BoundedRelay
from topograd.nn.stack import Stack
from topograd.nn.transformer.block import MLP
from topograd.optim.conditioner import DDCMuon
from topograd.optim.ddc_adam import DDCAdam
from topograd.optim.gauges import CEShiftRowShift, Gauge, HeadShift, ReLURescale
from topograd.registry import Registry
from topograd.runs.config import OptimizerConfig, StageOptimizer
from topograd.topology.plan import Plan
from topograd.training.muon import Muon

Groups = Mapping[str, Mapping[str, nn.Parameter]]
"""Parameters by group and by name."""
Make = Callable[[Groups, OptimizerConfig, Stack], dict[str, Optimizer]]
OPTIMIZERS: Registry[Make] = Registry("optimizer")
"""Makers of optimizers by name; `topograd/plugins.py` lists those of this module."""
GROUPS = {
    "matrices": "lr_matrix",
    "embeddings": "lr_embedding",
    "head": "lr_head",
    "scalars": "lr_scalar",
    "relays": "lr_relay",
}
"""Groups of parameters, and the setting of each one's learning rate."""
KERNELS = "kernels"
ADAM_RATE = 0.002
"""Of matrices with Adam, and of kernels beside Muon."""
SPREAD = 0.02
"""Of MLP outputs that are zero, where a rescaling needs their norm."""


@dataclass(frozen=True)
class OptimizerSet:
    """The optimizers of a model by name, each with the schedule that its rates follow."""

    optimizers: dict[str, Optimizer]
    schedules: dict[str, OptimizerConfig]

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerSet:
        """One optimizer whose rate stays as it is."""
        return cls({"optimizer": optimizer}, {})

    def set_rates(self, step: int, steps: int) -> None:
        """Every group's rate becomes its peak times its schedule at `step` of `steps`."""
        for name, schedule in self.schedules.items():
            multiplier = schedule.multiplier(step, steps)
            for group in self.optimizers[name].param_groups:
                group["lr"] = group["peak"] * multiplier

    def step(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)


def make_optimizers(stack: Stack, config: OptimizerConfig, plan: Plan | None = None) -> OptimizerSet:
    """Optimizers for every parameter that learns; the plan is needed if stages have settings of their own."""
    groups = parameter_groups(stack)
    made = OptimizerSet({}, {})
    learning = {id(p) for named in groups.values() for p in named.values()}
    taken: set[int] = set()
    for own in config.stages:
        if plan is None:
            raise ConfigError(
                "optimizer.stages names stages and there is no plan",
                setting="plan",
                remedy="pass one to make_optimizers",
            )
        ids = {id(p) for p in stage_parameters(stack, plan, [own.stage - 1])}
        if ids & taken:
            raise ConfigError(
                setting="optimizer.stages", given=own.stage, allowed="of stages that share no layers"
            )
        taken |= ids
        _add(made, stack, _select(groups, ids), config.of_stage(own), own)
    _add(made, stack, _select(groups, learning - taken), config, None)
    return made


def _add(
    made: OptimizerSet, stack: Stack, groups: Groups, config: OptimizerConfig, own: StageOptimizer | None
) -> None:
    """Make the optimizers of some parameters; those of a stage are named after it."""
    if not any(groups.values()):
        return
    prefix, rate = ("", 1.0) if own is None else (f"stage-{own.stage}.", own.rate)
    for name, optimizer in OPTIMIZERS[config.name](groups, config, stack).items():
        for group in optimizer.param_groups:
            group["peak"] = group["lr"] = group["lr"] * rate
        made.optimizers[prefix + name] = optimizer
        made.schedules[prefix + name] = config


def _select(groups: Groups, ids: Set[int]) -> dict[str, dict[str, nn.Parameter]]:
    return {group: {n: p for n, p in named.items() if id(p) in ids} for group, named in groups.items()}


def parameter_groups(stack: Stack) -> dict[str, dict[str, nn.Parameter]]:
    """Every parameter that learns, in exactly one group, by name."""
    layered = {id(p) for p in stack.layers.parameters()}
    relays = {id(p) for relay in stack.learned_relays().values() for p in relay.parameters()}
    tables = {id(m.weight) for m in stack.modules() if isinstance(m, nn.Embedding)}
    heads = {id(p) for name, p in stack.named_parameters(remove_duplicate=False) if name.startswith("head.")}
    groups: dict[str, dict[str, nn.Parameter]] = {name: {} for name in GROUPS}
    for name, parameter in stack.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in relays:
            group = "relays"
        elif id(parameter) in tables and id(parameter) not in heads:
            group = "embeddings"
        elif parameter.dim() == 2:
            group = "matrices" if id(parameter) in layered else "head"
        elif parameter.dim() == 4 and id(parameter) in layered:
            group = "matrices"
        else:
            group = "scalars"
        groups[group][name] = parameter
    return groups


def stage_parameters(stack: Stack, plan: Plan, stages: Iterable[int]) -> list[nn.Parameter]:
    """What only these stages use: their layers, their own heads, the relays that they receive through, and
    of bounded interfaces that they send through the sending end."""
    found: dict[int, nn.Parameter] = {}
    relays = stack.learned_relays()
    for stage in stages:
        planned = plan.stages[stage]
        modules = [stack.layers[i] for i in planned.layers]
        modules += [relays[name] for name in (auxiliary_name(planned),) if name in relays]
        found |= {id(p): p for module in modules for p in module.parameters()}
        for relay in (relays.get(port.relay) for port, _ in planned.inputs):
            if relay is not None:
                received = (
                    relay.parameters_by_end()[1] if isinstance(relay, BoundedRelay) else relay.parameters()
                )
                found |= {id(p): p for p in received}
        for relay in (relays.get(port.relay) for port in planned.outputs):
            if isinstance(relay, BoundedRelay):
                sent, received = relay.parameters_by_end()
                both = {id(p) for p in received}
                found |= {id(p): p for p in sent if id(p) not in both}
        found |= {id(p): p for p in stack.head_parameters(planned.head)}
    return list(found.values())


# The makers


def muon_and_adamw(groups: Groups, config: OptimizerConfig, stack: Stack) -> dict[str, Optimizer]:
    """Muon for the layers' matrices, AdamW for everything else."""
    made: dict[str, Optimizer] = {}
    groups = _kernels_apart(groups)
    if groups["matrices"]:
        made["muon"] = Muon(
            list(groups["matrices"].values()),
            lr=_matrix_rate(config, 0.02),
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            ns_steps=config.newton_schulz_steps,
        )
    rest = _listed(groups, config, (*list(GROUPS)[1:], KERNELS))
    if rest:
        made["adamw"] = torch.optim.AdamW(rest, betas=config.betas, eps=1e-10, weight_decay=0.0, fused=True)
    return made


def adamw(groups: Groups, config: OptimizerConfig, stack: Stack) -> dict[str, Optimizer]:
    """AdamW for everything; only the layers' matrices decay."""
    listed = _listed(groups, config, GROUPS, matrices=ADAM_RATE)
    return {"adamw": torch.optim.AdamW(listed, betas=config.betas, eps=1e-10, weight_decay=0.0, fused=True)}


def sgd(groups: Groups, config: OptimizerConfig, stack: Stack) -> dict[str, Optimizer]:
    """Stochastic gradient descent with momentum for everything."""
    listed = _listed(groups, config, GROUPS, matrices=0.1)
    return {"sgd": torch.optim.SGD(listed, lr=0.1, momentum=config.momentum)}


def ddc_adam(groups: Groups, config: OptimizerConfig, stack: Stack) -> dict[str, Optimizer]:
    """DDCAdam for everything: its step commutes with the symmetries of the MLPs and of the heads."""
    listed = _listed(groups, config, GROUPS, matrices=ADAM_RATE, named=True)
    gauges = [*mlp_gauges(stack, groups), *head_gauges(stack, groups)]
    return {"ddc-adam": DDCAdam(listed, gauges, betas=config.betas, eps=1e-10, rms=True)}


def ddc_muon(groups: Groups, config: OptimizerConfig, stack: Stack) -> dict[str, Optimizer]:
    """DDCMuon for the layers' matrices, DDCAdam for everything else."""
    made: dict[str, Optimizer] = {}
    groups = _kernels_apart(groups)
    if groups["matrices"]:
        made["ddc-muon"] = DDCMuon(
            list(groups["matrices"].items()),
            mlp_gauges(stack, groups),
            lr=_matrix_rate(config, 0.02),
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            rms=True,  # steps of AdamW's and Muon's size: else they are √numel times as large
        )
    rest = _listed(groups, config, (*list(GROUPS)[1:], KERNELS), named=True)
    if rest:
        made["ddc-adam"] = DDCAdam(rest, head_gauges(stack, groups), betas=config.betas, eps=1e-10, rms=True)
    return made


def mlp_gauges(stack: Stack, groups: Groups) -> list[Gauge]:
    """The rescaling of every ReLU² MLP among the matrices; outputs that are zero are given a small spread."""
    found: list[Gauge] = []
    for name, module in stack.named_modules():
        up, down = f"{name}.up.weight", f"{name}.down.weight"
        if isinstance(module, MLP) and module.gate is None and {up, down} <= groups["matrices"].keys():
            if not module.down.weight.any():
                like = module.down.weight
                drawn = nn.init.normal_(torch.empty(like.shape, dtype=like.dtype), std=SPREAD)
                like.data.copy_(drawn)  # drawn on the CPU: a seed means the same on every device
            found.append(ReLURescale(up, down, degree=2))
    return found


def head_gauges(stack: Stack, groups: Groups) -> list[Gauge]:
    """The shift of the output matrices: of every row by one vector, and between shared and own ones."""
    head = stack.shared_head
    if head is None or head.softcap is not None or "head.weight" not in groups["head"]:
        return []
    deltas = [f"head.deltas.{stage}.weight" for stage in head.deltas]
    if not deltas:
        return [CEShiftRowShift("head.weight")]
    whole = all(isinstance(delta, FullDelta) for delta in head.deltas.values())
    known = all(name in groups["head"] for name in deltas)
    return [HeadShift("head.weight", deltas, rows=True)] if whole and known else []


def _kernels_apart(groups: Groups) -> Groups:
    """The groups with the kernels of convolutions, which Muon cannot step, in one of their own."""
    kernels = {name: p for name, p in groups["matrices"].items() if p.dim() > 2}
    matrices = {name: p for name, p in groups["matrices"].items() if p.dim() == 2}
    return {**groups, "matrices": matrices, KERNELS: kernels}


def _matrix_rate(config: OptimizerConfig, default: float) -> float:
    return default if config.lr_matrix is None else config.lr_matrix


def _listed(
    groups: Groups,
    config: OptimizerConfig,
    names: Iterable[str],
    matrices: float = 0.0,
    named: bool = False,
) -> list[dict[str, Any]]:
    """torch's param groups, each with its rate; with `named`, of pairs of a name and a parameter."""
    listed: list[dict[str, Any]] = []
    for name in names:
        if groups[name]:
            layered = name in ("matrices", KERNELS)
            fixed = ADAM_RATE if name == KERNELS else _matrix_rate(config, matrices)
            rate = fixed if layered else getattr(config, GROUPS[name])
            decay = config.weight_decay if layered else 0.0
            params = list(groups[name].items() if named else groups[name].values())
            listed.append({"params": params, "lr": rate, "weight_decay": decay})
    return listed
