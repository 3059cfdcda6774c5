"""Change of the topology during training: heads and optimizer state are carried over.

When a new partition replaces an old one, layers, embedding and shared head stay as they are, and so does
their optimizer state. A stage's own head W_k starts from the old head whose stage ends nearest: the
new stage reads a hidden state that this head has learned to read, or one close by.

The optimizers are made anew for the heads that there are now, and every parameter brings its state. So they
are what a resumed run makes of the same checkpoint, whatever the optimizer, and resuming is exact.

Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning" §10.2.2
(step 5), which leaves open what new heads start from.
"""

import copy
from collections.abc import Mapping, Sequence

from torch import nn

from topograd.errors import ConfigError, StackError
from topograd.limits import changed
from topograd.nn.heads import Head
from topograd.nn.stack import Stack
from topograd.runs.config import TrainConfig
from topograd.runs.topology_config import AVERAGE_TEACHER, TopologyConfig
from topograd.topology.composition import Composition
from topograd.topology.plan import Plan
from topograd.topology.prediction import KINDS
from topograd.training.optimizers import OptimizerSet, make_optimizers
from topograd.training.runs import RunTask

Copies = Mapping[nn.Parameter, nn.Parameter]
"""Parameters that are copies, each with its original."""


def nearest_heads(old: Composition, new: Composition) -> list[int]:
    """For each stage of `new` the stage of `old` that ends nearest; of two as near, the deeper.

    >>> nearest_heads(Composition.parse("4,4,4"), Composition.parse("1,5,6"))
    [0, 1, 2]
    """
    return [nearest_head(old, end) for end in new.terminals]


def nearest_head(composition: Composition, layer: int) -> int:
    """The stage whose last layer is nearest to `layer` (counted from 1); of two as near, the deeper."""
    ends = composition.terminals
    return min(range(len(ends)), key=lambda k: (abs(ends[k] - layer), -k))


def change_topology(task: RunTask, table: TopologyConfig, sources: Sequence[int]) -> None:
    """Go on with another topology, whose stage k has the head that stage `sources[k]` had."""
    copies = carry_heads(task.stack, sources)
    task.config = task.config.changed(topology=table)
    task.plan = Plan.of(task.config.build_topology(), len(task.stack.layers))
    before = task.loop.optimizers
    task.loop.optimizers = make_optimizers(task.stack, task.config.optimizer, task.plan)
    carry_state(before, task.loop.optimizers, copies)


def carry_heads(stack: Stack, sources: Sequence[int]) -> Copies:
    """Give stage k the head that stage `sources[k]` had; heads that no stage takes are dropped.

    A head that is taken once stays the same parameters; one that is taken again is copied. A stack whose
    stages share one head stays as it is.
    """
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for head in [module for module in stack.modules() if isinstance(module, Head) and len(module.deltas)]:
        old = head.deltas
        missing = [source for source in sources if str(source) not in old]
        if missing:
            raise StackError(
                setting="sources", given=missing[0], allowed=f"a stage that has a head: {', '.join(old)}"
            )
        fresh: dict[str, nn.Module] = {}
        for stage, source in enumerate(sources):
            delta = old[str(source)]
            if source in sources[:stage]:
                original, delta = delta, copy.deepcopy(delta)
                copies |= dict(zip(delta.parameters(), original.parameters(), strict=True))
            fresh[str(stage)] = delta
        head.deltas = nn.ModuleDict(fresh)
    return copies


def carry_state(old: OptimizerSet, new: OptimizerSet, copies: Copies) -> None:
    """Every parameter of `new` gets the state that it had in `old`, or a copy of its original's."""
    before = {p: state for optimizer in old.optimizers.values() for p, state in optimizer.state.items()}
    for optimizer in new.optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in copies and copies[parameter] in before:
                    optimizer.state[parameter] = copy.deepcopy(before[copies[parameter]])
                elif parameter in before:
                    optimizer.state[parameter] = before[parameter]


def check_searchable(config: TrainConfig, graph: str) -> None:
    """Refuse settings that belong to single stages or boundaries: a search changes which there are."""
    table, search = config.topology, config.search.kind
    if table.graph != graph:
        raise ConfigError(
            setting="graph", given=table.graph, allowed=f"{graph}: start with topograd search {search}"
        )
    plain = ("decoder", "objectives", "weights", "interface", "relay", "source", "grad_scale_schedule")
    for name in changed(table, (*plain, "grad_delay", "grad_scales" if graph == "chain" else "objective")):
        default = getattr(TopologyConfig, name)
        remedy = f"while boundaries are searched it must be {default!r}, its default"
        raise ConfigError(setting=name, given=getattr(table, name), remedy=remedy)
    if table.prediction not in KINDS:
        raise ConfigError(
            setting="prediction", given=table.prediction, allowed=f"one of {', '.join(KINDS)} in a search"
        )
    if table.teacher == AVERAGE_TEACHER:
        raise ConfigError(
            setting="teacher",
            given=table.teacher,
            allowed="self or a run: a search changes the heads that an average would have",
        )
    if config.optimizer.stages:
        raise ConfigError(
            setting="optimizer.stages",
            given=config.optimizer.stages,
            allowed="left out: a search changes stages",
        )
