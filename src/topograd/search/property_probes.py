"""Short training probes on a copy: what a stage learns alone, and what that disturbs.

Statement. θ the weights of a trained configuration, k its last stage with a loss (with the stages that only
serve it: the body of a private decoder, the regions before the last), T new text:

    update discipline (P7)     max_i ‖θ_i' - θ_i‖ / ‖θ_i‖ over layers i outside stage k, where θ' has seen T
                               with only the loss of stage k; exactly 0 when no gradient leaves the stage
    forgetting (P8)            BPB of the old text under θ' minus under θ
    specialist capacity (P11)  gain        BPB of T's second half before minus after training stage k on the
                                           first half, every other stage frozen
                               price       BPB of the old text at the best exit that is left, minus before: an
                                           earlier exit is as it was, the trained one may have forgotten
                               reference   the gain when every layer learns, with λ = 1
    target alignment (P3)      cos(∇ training loss, ∇ loss of stage k alone with λ = 1) over the layers

With one stage, stage k is the whole model: its gain is the reference, and its price what it forgets, for no
other exit is left.

New text that needs no second corpus: `backwards`, the held-out text read from its end. It has the same
bytes and the same frequencies, and another order.

Symbols and shapes. A `Text` has inputs and targets (rows, time). Cost: `STEPS` training steps for each of
three probes, two more for the alignment, seven evaluations.
Source: "Stage-Partitioned Learning" §7.1-7.3 (P3, P7, P8, P11), which defines them in words; the formulas are
ours.
Limits. A probe of a few steps with Adam ranks configurations; it is not what a stage could learn in the end.
The embedding and a shared head may move under P7: stage locality is a statement about the layers. Where the
objective is residual, P7 trains the stage without the logits of the others, which then have no loss. Stages
that were taught by a teacher are probed with cross-entropy.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from topograd.data.windows import Text
from topograd.errors import ConfigError
from topograd.exec.train_step import train_step
from topograd.nn.preparation import prepare
from topograd.nn.stack import Stack
from topograd.topology.dag import EMBEDDING, Stage, Topology
from topograd.topology.plan import Plan
from topograd.training.evaluation import evaluate
from topograd.training.optimizers import OptimizerSet, stage_parameters
from topograd.training.step_runner import StepRunner

STEPS, ROWS, RATE = 16, 4, 3e-3
"""Steps of a probe, rows of text in each, and Adam's learning rate."""


@dataclass(frozen=True)
class Update:
    """What training one stage on new text did."""

    stage: int
    own: float
    """How far the stage's own layers moved, relative to their size: the largest."""
    others: float
    """How far any other layer moved."""
    forgetting: float
    """By how much the old text's BPB rose."""


@dataclass(frozen=True)
class Specialist:
    """What the last stage learned of new text while the others stood still, in bits per byte."""

    gain: float
    price: float
    reference: float

    @property
    def share(self) -> float:
        """From 0 to 1: the gain beyond its price, of what the whole model could have gained."""
        most = max(self.gain, self.reference)
        return min(max((self.gain - max(self.price, 0.0)) / most, 0.0), 1.0) if most > 0 else 0.0


def backwards(text: Text) -> Text:
    """The same text with every row read from its end; the targets are the same tokens."""
    inputs, targets = text.inputs.clone(), torch.full_like(text.targets, -100)
    for row, original in enumerate(text.targets):
        turned = original[original != -100].flip(0)
        targets[row, : len(turned)] = turned
        inputs[row, 1 : len(turned)] = turned[:-1]
        inputs[row, max(len(turned), 1) :] = inputs[row, 0]
    return Text(inputs, targets, text.nbytes)


def update_discipline(stack: Stack, plan: Plan, old: Text, new: Text) -> Update:
    """P7 and P8."""
    last = _last(plan)
    unit = unit_of(plan, last)
    alone = tuple(replace(s, weight=float(k == last)) for k, s in enumerate(plan.topology.stages))
    pupil = _taught(stack, replace(plan.topology, stages=alone), new)
    own = {i for k in unit for i in plan.stages[k].layers}
    moved = [_moved(a.parameters(), b.parameters()) for a, b in zip(stack.layers, pupil.layers, strict=True)]
    return Update(
        last,
        max(m for i, m in enumerate(moved) if i in own),
        max((m for i, m in enumerate(moved) if i not in own), default=0.0),
        _bpb(pupil, plan, old) - _bpb(stack, plan, old),
    )


def specialist(stack: Stack, plan: Plan, old: Text, new: Text) -> Specialist:
    """P11."""
    if len(new.inputs) < 2:
        raise ConfigError(
            setting="new", given=len(new.inputs), allowed="at least 2 sequences: one to learn, one to test"
        )
    lesson, exam = _halves(new)
    last, stages = _last(plan), plan.topology.stages
    unit = unit_of(plan, last)
    before = _bpb(stack, plan, exam)
    corrects = stages[last].objective == "residual"  # then the others' logits are part of its loss
    alone = tuple(
        _detached(s, unit) if k in unit else replace(s, weight=s.weight if corrects else 0.0)
        for k, s in enumerate(stages)
    )
    pupil = _taught(stack, replace(plan.topology, stages=alone), lesson, unit)
    gain = before - _bpb(pupil, plan, exam)
    after = evaluate(pupil, plan, old).bpb
    price = min(after.prediction, *after.prefix) - _bpb(stack, plan, old)
    if len(unit) == len(stages):
        return Specialist(gain, price, gain)
    whole = replace(plan.topology, stages=tuple(replace(_open(s), frozen=False) for s in stages))
    everything = _taught(copy.deepcopy(stack).requires_grad_(), whole, lesson)
    return Specialist(gain, price, before - _bpb(everything, plan, exam))


def target_alignment(stack: Stack, plan: Plan, inputs: Tensor, targets: Tensor) -> float | None:
    """P3: the cosine of the layers' two gradients; None where stages are frozen and have none."""
    if plan.frozen:
        return None
    last = _last(plan)
    stages = tuple(
        replace(_open(s), weight=float(k == last), objective="cross-entropy")
        for k, s in enumerate(plan.topology.stages)
    )
    pupil = copy.deepcopy(stack)
    losses = []
    for given in (plan.topology, replace(plan.topology, stages=stages)):
        topology = given.with_gradient(delay=0)  # when a gradient comes does not turn it
        pupil.zero_grad(set_to_none=True)
        train_step(pupil, to_probe(topology), inputs, targets)
        grads = ((p, p.grad) for p in pupil.layers.parameters())
        losses.append([torch.zeros_like(p).double() if g is None else g.double() for p, g in grads])
    dot, here, there = (
        sum(float((a * b).sum()) for a, b in zip(x, y, strict=True))
        for x, y in ((losses[0], losses[1]), (losses[0], losses[0]), (losses[1], losses[1]))
    )
    size = (here * there) ** 0.5
    return dot / size if size else 0.0


def to_probe(topology: Topology) -> Topology:
    """The topology as a probe trains it: without a teacher, and predicting as its losses say."""
    stages = tuple(
        replace(s, objective="cross-entropy") if s.objective == "distillation" else s for s in topology.stages
    )
    return replace(topology, stages=stages, prediction="auto")


def _last(plan: Plan) -> int:
    """The last stage with a loss."""
    return max(p.index for p in plan.stages if p.scale > 0)


def unit_of(plan: Plan, stage: int) -> set[int]:
    """A stage with a loss, and the stages without one that learn only through it."""
    unit, waiting = set[int](), [stage]
    while waiting:
        unit.add(here := waiting.pop())
        waiting += [k for k in plan.gradient_sources(here) if plan.stages[k].scale == 0]
    return unit


def _bpb(stack: Stack, plan: Plan, text: Text) -> float:
    return evaluate(stack, plan, text).bpb.prediction


def _halves(text: Text) -> tuple[Text, Text]:
    """The first and the second half of the rows; bytes are shared out by the number of targets."""
    half = len(text.inputs) // 2
    counted = text.targets != -100
    share = text.nbytes / max(int(counted.sum()), 1)
    first, second = (
        Text(text.inputs[part], text.targets[part], max(round(share * int(counted[part].sum())), 1))
        for part in (slice(0, half), slice(half, None))
    )
    return first, second


def _detached(stage: Stage, unit: set[int]) -> Stage:
    """The stage, with no gradient to stages outside `unit`."""
    inside = unit | {EMBEDDING}
    edges = (e if e.source in inside else replace(e, grad_scale=0.0) for e in stage.sources)
    return replace(stage, sources=tuple(edges))


def _open(stage: Stage) -> Stage:
    """The stage, with all gradient to its inputs."""
    return replace(stage, sources=tuple(replace(e, grad_scale=1.0) for e in stage.sources))


def _taught(stack: Stack, topology: Topology, text: Text, unit: set[int] | None = None) -> Stack:
    """A copy of the stack after a few steps of Adam on the rows of `text`, in order and round again.

    Only what the stages of `unit` have to themselves learns, where there are others; else all that can.
    """
    pupil = copy.deepcopy(stack).train()
    plan = prepare(pupil, to_probe(topology))
    if unit is not None and len(unit) < len(plan.stages):
        pupil.requires_grad_(False)
        for parameter in stage_parameters(pupil, plan, unit):
            parameter.requires_grad_()
    optimizer = torch.optim.Adam([p for p in pupil.parameters() if p.requires_grad], lr=RATE)
    loop = StepRunner(pupil, OptimizerSet.of(optimizer))
    for step in range(STEPS):
        rows = torch.arange(step * ROWS, (step + 1) * ROWS) % len(text.inputs)
        loop.step(plan, [(text.inputs[rows], text.targets[rows])], step + 1)
    return pupil


def _moved(before: Iterable[Tensor], after: Iterable[Tensor]) -> float:
    """‖after - before‖ / ‖before‖ of all the parameters of a layer as one vector."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(before, after, strict=True)]
    change = sum(float((b - a).double().square().sum()) for a, b in pairs)
    size = sum(float(a.double().square().sum()) for a, _ in pairs)
    return float((change / size) ** 0.5) if size else float(change > 0)
