"""One training step over several ranks: local gradients, and one sum.

What crosses ranks in a step: activations forward and, along edges with λ > 0, gradients back, batch by batch
(`transport.py`); at its end, among the ranks that share a parameter that learns, the sum of its gradient, and
one sum over all ranks of a single buffer,

    [ losses of stages | norms | who wants to stop | which gradients exist | gradients that all ranks share ]

in which every rank fills its own places and leaves zeros elsewhere: x + 0 + ... + 0 = x exactly, so that all
ranks know the same numbers, and decide alike whether a group is halted (`training/step_runner.py`), by which
norm the shared part is clipped, and when to stop. Where a stage has replicas, its own gradient is summed over
them first, but for shards, which have their sums already (`sharding.py`); of those each replica knows a part
of the squared norm.

Gradients without delay are waited for as in 1F1B: a rank runs as many batches forward as ranks lie behind it,
then a backward and a forward in turns. Late ones are received when the step ends and learned from at a later
one, so that within a step no rank waits for a later one. A group of stages that lies on several ranks has the
root of the sum of its parts' squared norms.

Against one process: what one rank owns comes from the same operations in the same order. The sum for what
ranks share is taken stage by stage instead of batch by batch, and the embedding's backward runs once for each
rank: the last bits of float addition differ (1e-12 in float64 over a run), unless nothing is shared or a step
has one batch, two ranks and a detached bus. Muon's batched products may differ likewise.

Cost: 4 bytes · (shared parameters + K + ...), once for each step. On CPUs that takes one latency of two
ranks, and of any number where nothing is shared, as where one stage alone has a loss and no other reads x0;
else two (`ranks.Meeting`), and room for another copy of what is shared. GPUs have `all_reduce`. All ranks
wait for it: a stage that breaks is halted in the step in which it does, and that step is repeated.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from topograd.exec.gradient import sends_back
from topograd.exec.late import collect_gradients
from topograd.exec.train_step import OpenStep
from topograd.parallel.layout import Layout
from topograd.parallel.ranks import ADDING, Meeting, Ranks
from topograd.parallel.sharding import is_shard, local, squared_norm
from topograd.parallel.transport import MeshTransport
from topograd.topology.plan import Plan
from topograd.training.activation_cache import StateBatch
from topograd.training.optimizers import stage_parameters
from topograd.training.step_runner import Batch, StepRunner, norm_of


@dataclass(kw_only=True)
class StageLoop(StepRunner):
    """The loop of one rank."""

    ranks: Ranks
    layout: Layout
    transport: MeshTransport
    stop_here: bool = False
    """Whether this rank has been asked to stop."""
    stop_everywhere: bool = False
    """Whether any rank had, at the last exchange."""
    exchanged_bytes: int = 0

    def __post_init__(self) -> None:
        self.ahead = self.layout.ahead(self.ranks.place)
        self._open: deque[OpenStep] = deque()
        place, plan = self.ranks.place, self.layout.plan
        own = [p for p in self.layout.owned(self.stack, place) if p.requires_grad]
        self.copies = [p for p in own if not is_shard(p)]
        staged = {id(p) for p in stage_parameters(self.stack, plan, range(len(plan.stages)))}
        self.loose = [p for p in own if id(p) not in staged]
        users = self.layout.users(self.stack)
        shared = [p for p in self.layout.shared(self.stack, place) if p.requires_grad]
        everybody = tuple(range(self.layout.ranks))
        self.shared = [p for p in shared if users[id(p)] == everybody]
        self.among_some: list[tuple[list[nn.Parameter], list[int], dist.ProcessGroup | None]] = []
        for some in sorted({*self.layout.readers.values()} - {everybody}):
            if len(some) > 1:
                members = self._members(some)
                group = None if self.ranks.tagged else self.ranks.new_group(members, ADDING)
                if place in some:
                    self.among_some.append(([p for p in shared if users[id(p)] == some], members, group))
                    self.loose += self.among_some[-1][0] if place == some[0] else []

    def _members(self, places: Sequence[int]) -> list[int]:
        """The ranks at these places, of all replicas."""
        config = self.ranks.config
        return [replica * config.stages + place for replica in range(config.replicas) for place in places]

    def _meeting(
        self, parameters: Sequence[nn.Parameter], members: Sequence[int], numbers: int = 0
    ) -> Meeting | None:
        """For gradients of these parameters and so many numbers more."""
        if not self.ranks.tagged:
            return None
        dtype = torch.promote_types(parameters[0].dtype, torch.float32) if parameters else torch.float64
        return Meeting(self.ranks, members, numbers + sum(p.numel() + 1 for p in parameters), dtype)

    def _measured(
        self, plan: Plan, batches: Sequence[Batch]
    ) -> tuple[Tensor, list[list[nn.Parameter]], list[Tensor]]:
        replicas = self.ranks.config.replicas
        numbers = range(self.ranks.replica, self.late.count, replicas)
        self._open.clear()
        among_some = [(p, self._meeting(p, members) or group) for p, members, group in self.among_some]
        numbers_met = len(plan.stages) + len(plan.groups()) + 2
        everybody = self._meeting(self.shared, range(self.ranks.config.world), numbers_met)
        rows = [len(batch.inputs) for batch, _ in self._parted(batches)]
        self.transport.begin(len(numbers), self._coming(plan, numbers, rows))
        with self.ranks.within("gathering layers"):
            losses = self._gradients(plan, batches, len(batches))
        if plan.late:
            collect_gradients(self.late, plan, self.transport, numbers)
        self.transport.finish()
        if replicas > 1:
            self._add_up(self.copies, self.ranks.replica_group)
        for parameters, by in among_some:
            self._add_up(parameters, by)
        losses, norms, loose = self._exchange(plan, losses, everybody)
        parts = self._parts(plan)
        if len(parts) == 1:  # one group learns: its norm and that of what is no stage's own, as one
            rest = torch.hypot(loose, norm_of(self.shared))
            return losses, parts, [torch.hypot(norms[0], rest)] if norms else [norm_of([])]
        last = {id(p) for p in parts[-1]}
        return losses, parts, [*norms, torch.hypot(loose, norm_of([p for p in self.shared if id(p) in last]))]

    def _coming(
        self, plan: Plan, numbers: Sequence[int], rows: Sequence[int]
    ) -> dict[tuple[int, int], list[int]]:
        """The edges along which gradient comes to this rank in this step, with the sequences of each message:
        those of the step's own batches, or of the earlier ones from which the sender learns now."""
        late = [batch for number in numbers for batch in self.late.left(number)]
        by_age = {
            age: [len(b.inputs) for b in late if self.late.step - b.step == age] for age in plan.lateness
        }
        by_age[0] = list(rows)
        coming = {}
        for reader, number in self.layout.back_edges:
            source = plan.stages[reader].inputs[number][0].source
            if source in self.transport.stages and sends_back(plan, reader, source):
                coming[reader, number] = by_age[plan.lateness[reader]]
        return coming

    def _count(self, batches: Sequence[Batch]) -> int:
        replicas = self.ranks.config.replicas
        self.parts = 1 if len(batches) % replicas == 0 else replicas
        return super()._count(batches)

    def _parted(self, batches: Sequence[Batch]) -> list[tuple[StateBatch, float]]:
        """This replica's batches, or where they cannot be dealt out, its part of each one's rows."""
        return list(super()._parted(batches))[self.ranks.replica :: self.ranks.config.replicas]

    def _gradients(self, plan: Plan, batches: Sequence[Batch], count: int) -> Tensor:
        losses = super()._gradients(plan, batches, count)
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.bf16):
            while self._open:
                self._open.popleft().finish()
        return losses

    def _number(self, number: int) -> int:
        return self.ranks.replica + number * self.ranks.config.replicas

    def _finish(self, step: OpenStep) -> None:
        """A batch may wait for its gradient while later ones run forward."""
        self._open.append(step)
        if len(self._open) > self.ahead:
            self._open.popleft().finish()

    def _exchange(
        self, plan: Plan, losses: Tensor, meeting: Meeting | None
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Add up what all share; every stage's loss, every group's norm, and that of what is no stage's own
        and not all ranks use."""
        groups = plan.groups()
        known = losses.new_zeros(len(plan.stages) + len(groups) + 2)
        for k in self.transport.stages:
            known[k] = losses[k]
        sharded, first = self.ranks.config.shard, self.ranks.replica == 0
        shared = {id(p) for p in self.shared}
        squared = []  # of these groups the ranks have parts
        for i, group in enumerate(groups):
            parted = len({self.layout.owners[k] for k in group}) > 1
            squared.append(parted or sharded)
            here = [k for k in group if self.layout.owners[k] == self.ranks.place]
            if here and (first or sharded):
                own = stage_parameters(self.stack, plan, here)
                own = [p for p in own if id(p) not in shared] if parted else own
                norm = squared_norm(own, first) if sharded else norm_of(own)
                known[len(plan.stages) + i] = norm.square() if parted else norm
        if first:
            known[-2] = norm_of(self.loose).square()
        known[-1] = float(self.stop_here)
        known = self._add_up(self.shared, meeting, known)
        self.stop_everywhere = bool(known[-1] > 0)
        norms = known[len(plan.stages) : -2]
        each = [norm.sqrt() if square else norm for norm, square in zip(norms, squared, strict=True)]
        return known[: len(plan.stages)], each, known[-2].sqrt()

    def _add_up(
        self,
        parameters: Sequence[nn.Parameter],
        by: Meeting | dist.ProcessGroup | None,
        numbers: Tensor | None = None,
    ) -> Tensor:
        """Sum the gradients over a meeting or a group, by default of all ranks, and `numbers` with them; a
        gradient that no rank has stays None."""
        numbers = torch.zeros(0) if numbers is None else numbers
        flags = [float(p.grad is not None) for p in parameters]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        dtype = torch.promote_types(gradients[0].dtype, numbers.dtype) if gradients else numbers.dtype
        device = self.ranks.device
        small = torch.cat((numbers.to(device, dtype), torch.tensor(flags, dtype=dtype, device=device)))
        packed = torch.cat((small, *(gradient.to(dtype).flatten() for gradient in gradients)))
        if isinstance(by, Meeting):
            packed = by.sum(packed)
            self.exchanged_bytes += by.sent_bytes
        else:
            self.ranks.reduce(packed, ADDING, by)
            self.exchanged_bytes += packed.numel() * packed.element_size()
        small, flat = packed[: len(small)].cpu(), packed[len(small) :]
        sums = flat.split([p.numel() for p in parameters])
        for p, total, flag in zip(parameters, sums, small[len(numbers) :].tolist(), strict=True):
            p.grad = total.view_as(p).to(p.dtype) if flag else None
        return small[: len(numbers)]

    def _clip(self, parts: Sequence[list[nn.Parameter]], norms: Sequence[Tensor]) -> None:
        if self.clip is None or not self.ranks.config.shard:
            return super()._clip(parts, norms)
        for parameters, norm in zip(parts, norms, strict=True):  # as torch does, on what this rank holds
            for parameter in parameters:
                assert parameter.grad is not None
                local(parameter.grad).mul_((self.clip / (norm + 1e-6)).clamp(max=1.0))

    def _problem(self, plan: Plan, broken: Sequence[int], losses: Tensor) -> str:
        for k in broken:
            if k >= 0 and plan.stages[k].scale > 0 and not math.isfinite(losses[k]):
                return f"the loss of stage {k + 1} is {losses[k].item()}"
        if any(k >= 0 for k in broken):
            return f"the gradient of stage {', '.join(str(k + 1) for k in broken)} is not finite"
        return "the gradient of the embedding or the head is not finite"
