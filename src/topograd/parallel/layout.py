"""Placement of stages on ranks: what each rank sends, receives, owns and shares.

Statement. Stages are dealt to ranks in order, in runs as even as their layers allow. Values go to later
ranks; gradients come back along edges with λ > 0, but for bounded interfaces, whose adjoints come from a scan
(`region_scan.py`). Stages that share a layer must lie on one rank. A parameter belongs to the rank whose
stages alone use it: so does the shared head where one stage alone has a loss, and the embedding where no
other rank reads x0. What several ranks use is held by those and kept equal by adding up its gradient among
them (`stage_loop.py`). Who uses what is found by running the stages once: a parameter is used where autograd
reaches it from what a stage sends or from its logits.

Symbols: K stages, P ranks. Cost: O(K² P) to deal the stages out; a forward and K backwards of two tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import ParallelError
from topograd.exec.forward import run_stage
from topograd.exec.train_step import output_port
from topograd.nn.relays import BoundedRelay
from topograd.nn.stack import Stack
from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import EdgeOutput, Plan
from topograd.training.optimizers import stage_parameters


@dataclass(frozen=True)
class Layout:
    """A plan, dealt to ranks."""

    plan: Plan
    owners: tuple[int, ...]
    """The rank of each stage."""
    with_prior: bool = False
    """Whether objectives read the hidden states of earlier stages."""
    crossing: bool = False
    """Whether gradient crosses ranks, by a scan over bounded interfaces."""
    readers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks that use each parameter that learns and is no stage's own, by name; of others all do."""
    embedding: frozenset[str] = frozenset()
    """Those of them that x0 is made from."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        ranks: int,
        *,
        with_prior: bool = False,
        stack: Stack | None = None,
        crossing: bool = False,
    ) -> Layout:
        """Deal the stages to `ranks` ranks. With the stack, of tokens, it is tried who uses what."""
        if ranks > len(plan.stages):
            raise ParallelError(
                setting="stages",
                given=ranks,
                allowed=f"at most {len(plan.stages)}, the stages of the topology",
                remedy="start fewer ranks, or give a partition of more stages",
            )
        layout = cls(plan, deal([len(p.layers) for p in plan.stages], ranks), with_prior, crossing=crossing)
        if not crossing:
            layout._check_ranks()
        return layout if stack is None or ranks == 1 else replace(layout, **_tried(stack, layout))

    def _check_ranks(self) -> None:
        for planned in self.plan.stages:
            for other in self.plan.stages[: planned.index]:
                j, k = other.index, planned.index
                if set(planned.layers) & set(other.layers) and self.owners[j] != self.owners[k]:
                    raise ParallelError(
                        f"stages {j + 1} and {k + 1} share layers, so they must run on one rank, and they "
                        f"would run on ranks {self.owners[j]} and {self.owners[k]}",
                        setting="stages",
                        remedy="start fewer ranks",
                    )
        for reader, number in self.back_edges:
            relay = self.plan.stages[reader].inputs[number][0].relay
            if self.plan.topology.reach == "next" or relay.startswith("target-"):
                raise ParallelError(
                    f"stage {reader + 1} sends its own loss's gradient, or a target, to another rank",
                    setting="stages",
                    remedy="give it grad_scale 0, or fewer ranks",
                )

    @cached_property
    def back_edges(self) -> list[tuple[int, int]]:
        """The edges along which gradient goes from one rank to another: stage, number of its source."""
        return [
            (planned.index, number)
            for planned in self.plan.stages
            for number, (port, lam) in enumerate(planned.inputs)
            if lam > 0 and port.source >= 0 and self.owners[port.source] != self.owners[planned.index]
            if not self.crossing
        ]

    def ahead(self, rank: int) -> int:
        """The batches that a rank runs forward before the first gradient comes back to it: 1F1B's."""
        if self.crossing:
            return self.ranks - 1 - rank
        late = self.plan.lateness
        last = rank
        for reader, number in self.back_edges:  # in order of stages
            source = self.plan.stages[reader].inputs[number][0].source
            if not late[source] and rank <= self.owners[source] <= last:
                last = max(last, self.owners[reader])
        return last - rank

    @property
    def ranks(self) -> int:
        return max(self.owners) + 1

    def stages_of(self, rank: int) -> list[int]:
        return [k for k, owner in enumerate(self.owners) if owner == rank]

    def ports(self, stage: int) -> list[EdgeOutput]:
        """Everything that a stage could send, in the order in which the executor sends it."""
        planned = self.plan.stages[stage]
        return list(dict.fromkeys((output_port(planned), *planned.outputs)))

    @cached_property
    def listeners(self) -> dict[EdgeOutput, tuple[int, ...]]:
        """The other ranks that want each port."""
        wanted: dict[EdgeOutput, set[int]] = {}
        for planned in self.plan.stages:
            inputs = [port for port, _ in planned.inputs]
            if self.with_prior:
                inputs += [output_port(p) for p in self.plan.stages[: planned.index] if p.predicts]
            for port in inputs:
                if port.source >= 0 and self.owners[port.source] != self.owners[planned.index]:
                    wanted.setdefault(port, set()).add(self.owners[planned.index])
        return {port: tuple(sorted(ranks)) for port, ranks in wanted.items()}

    def incoming(self, stage: int, rank: int) -> list[EdgeOutput]:
        """What `rank` receives from a stage of another rank, in the order in which it is sent."""
        return [port for port in self.ports(stage) if rank in self.listeners.get(port, ())]

    # Parameters

    def users(self, stack: Stack) -> dict[int, tuple[int, ...]]:
        """The ranks that use each parameter, by its id; all where it is not known."""
        everybody = tuple(range(self.ranks))
        users: dict[int, set[int]] = {}
        for rank in everybody:
            for p in stage_parameters(stack, self.plan, self.stages_of(rank)):
                users.setdefault(id(p), set()).add(rank)
            for k in self._heads_read(rank):
                for p in stack.head_parameters(self.plan.stages[k].head):
                    users.setdefault(id(p), set()).add(rank)
            for port in [port for k in self.stages_of(rank) for port in self.plan.stages[k].outputs]:
                relay = stack.learned_relays().get(port.relay)
                # a bounded interface computes at the sending end too
                for p in relay.parameters_by_end()[0] if isinstance(relay, BoundedRelay) else ():
                    users.setdefault(id(p), set()).add(rank)
        found = {}
        for name, p in stack.named_parameters():
            own = users.get(id(p), ())
            found[id(p)] = tuple(own) if len(own) == 1 else self.readers.get(name, everybody)
        return found

    def _heads_read(self, rank: int) -> list[int]:
        """The stages whose heads are read on a rank beside those that run there: those before its last."""
        last = max(self.stages_of(rank)) if self.with_prior and self.ranks > 1 else -1
        return [k for k in self.plan.predicting() if k <= last]

    def owned(self, stack: Stack, rank: int) -> list[nn.Parameter]:
        """What `rank` alone uses."""
        users = self.users(stack)
        return [p for p in stack.parameters() if users[id(p)] == (rank,)]

    def shared(self, stack: Stack, rank: int) -> list[nn.Parameter]:
        """What `rank` and others use."""
        users = self.users(stack)
        return [p for p in stack.parameters() if rank in users[id(p)] and len(users[id(p)]) > 1]

    def names(self, stack: Stack, rank: int) -> list[str]:
        """The state that `rank` hands over, by name: what no rank before it uses, and its layers' buffers."""
        mine = {at for at, users in self.users(stack).items() if users[0] == rank}
        layers = {i for k in self.stages_of(rank) for i in self.plan.stages[k].layers}
        parameters = {id(p) for p in stack.parameters()}
        return [
            name
            for name, tensor in stack.state_dict(keep_vars=True).items()
            if id(tensor) in mine or (id(tensor) not in parameters and _layer(name) in layers)
        ]


def _layer(name: str) -> int:
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else -1


def deal(costs: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Cut a list into `ranks` runs whose largest sum is least; of equal cuts the most even one.

    >>> deal([2, 2, 1, 1, 2], 3)
    (0, 1, 1, 2, 2)
    """
    count = len(costs)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[p][j]: (largest sum, sum of squares, where the last run begins) of the first j in p + 1 runs
    best = [[(float(sums[j]), float(sums[j]) ** 2, 0) for j in range(count + 1)]]
    for p in range(1, ranks):
        row = []
        for j in range(count + 1):
            options = [
                (max(best[p - 1][i][0], sums[j] - sums[i]), best[p - 1][i][1] + (sums[j] - sums[i]) ** 2, i)
                for i in range(p, j)
            ]
            row.append(min(options, default=(float("inf"), float("inf"), 0)))
        best.append(row)
    owners = [0] * count
    end = count
    for p in reversed(range(ranks)):
        begin = int(best[p][end][2]) if p else 0
        owners[begin:end] = [p] * (end - begin)
        end = begin
    return tuple(owners)


def _tried(stack: Stack, layout: Layout) -> dict[str, Any]:
    """The readers of a layout, and what the embedding is made from."""
    owned = {id(p) for p in stage_parameters(stack, layout.plan, range(len(layout.owners)))}
    named = {n: p for n, p in stack.named_parameters() if p.requires_grad and id(p) not in owned}
    reached, embedding = used_by_stage(stack, layout.plan, named)
    readers: dict[str, set[int]] = {name: set() for name in named}
    for k, names in enumerate(reached):
        for name in names:
            readers[name].add(layout.owners[k])
    for rank in range(layout.ranks):
        for k in layout._heads_read(rank):
            for name in reached[k] - embedding:
                readers[name].add(rank)
    found = {name: tuple(sorted(ranks)) or (0,) for name, ranks in readers.items()}
    return {"readers": found, "embedding": embedding}


def used_by_stage(
    stack: Stack, plan: Plan, named: Mapping[str, nn.Parameter]
) -> tuple[list[frozenset[str]], frozenset[str]]:
    """Which of these parameters each stage uses, by its input, x0 or its head; and which x0 is made from."""
    names, parameters = list(named), list(named.values())

    def reached(roots: Sequence[Tensor]) -> frozenset[str]:
        sums = [root.sum() for root in roots if root.requires_grad]
        if not sums or not parameters:
            return frozenset()
        found = torch.autograd.grad(sums, parameters, retain_graph=True, allow_unused=True)
        return frozenset(name for name, gradient in zip(names, found, strict=True) if gradient is not None)

    inputs = torch.zeros((1, 2), dtype=torch.int64, device=next(stack.parameters()).device)
    with torch.enable_grad(), torch.random.fork_rng():
        x0 = stack.embed(inputs)
        ctx = stack.layer_context(x0, inputs)
        if ctx.calls:  # somebody else's layers, with arguments that may come from anywhere
            return [frozenset(names)] * len(plan.stages), frozenset(names)
        sent: dict[EdgeOutput, Tensor] = {}
        found = []
        for planned in plan.stages:
            received = [x0 if port.source == EMBEDDING else sent[port].detach() for port, _ in planned.inputs]
            h, outputs = run_stage(stack, planned, received, ctx)
            sent |= outputs
            logits = [stack.readout(h, planned.head)] if planned.predicts or planned.scale > 0 else []
            found.append(reached([h, *outputs.values(), *logits]))
        return found, reached([x0])


def keep_own(stack: Stack, layout: Layout, rank: int) -> None:
    """Drop what `rank` does not use. Of the embedding values stay, neither learned nor saved."""
    stale = {n: p for n, p in stack.named_parameters() if rank not in layout.readers.get(n, (rank,))}
    ids = {id(p) for name, p in stale.items() if name in layout.embedding}
    for module in stack.modules() if ids else ():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in ids:
                delattr(module, name)
                module.register_buffer(name, parameter.detach(), persistent=False)
    shed(stack, [*layout.owned(stack, rank), *layout.shared(stack, rank)])


def shed(stack: Stack, kept: Sequence[nn.Parameter]) -> None:
    """Free the memory of every parameter but `kept`: of the others, names and shapes stay."""
    ids = {id(p) for p in kept}
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the old one, so that its id stays its own
    for module in stack.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in ids:
                empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
                setattr(module, name, made.setdefault(id(parameter), (parameter, empty))[1])


def present(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a shed stack that are still there."""
    return {name: tensor for name, tensor in state.items() if not tensor.is_meta}
