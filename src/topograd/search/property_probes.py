"""Short probes that train a copy: what a stage can learn alone, and what its learning disturbs.

Statement. θ the weights of a trained configuration, k its last stage with a loss, T new text:

    update discipline (P7)     max_i ‖θ_i' - θ_i‖ / ‖θ_i‖ over layers i outside stage k, where θ' has seen T
                               with only the loss of stage k; exactly 0 when no gradient leaves the stage
    forgetting (P8)            BPB of the old text under θ' minus under θ
    specialist capacity (P11)  BPB of T's second half before minus after training stage k on the first half,
                               every other stage frozen; 0 with one stage, which leaves no base in place
    target alignment (P3)      cos(∇ training loss, ∇ loss of stage k alone with λ = 1) over the layers

New text that needs no second corpus: `backwards`, the held-out text read from its end. It has the same
bytes and the same frequencies, and another order.

Symbols and shapes. A `Text` has inputs and targets (rows, time). Cost: `STEPS` training steps for each of two
probes, two more for the alignment, four evaluations.
Source: "Stage-Partitioned Learning" §7.1-7.3 (P3, P7, P8, P11), which defines them in words; the formulas are
ours.
Limits. A probe of a few steps with Adam ranks configurations; it is not what a stage could learn in the end.
The embedding and a shared head may move under P7: stage locality is a statement about the layers. Where the
objective is residual, P7 trains the stage without the logits of the others, which then have no loss.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from topograd.errors import ConfigError
from topograd.nn.stack import Stack
from topograd.topology.dag import EMBEDDING, Stage, Topology
from topograd.topology.plan import Plan
from topograd.training.evaluation import Text, evaluate
from topograd.training.executor import prepare, train_step

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


def backwards(text: Text) -> Text:
    """The same text with every row read from its end; the targets are the same tokens."""
    inputs, targets = text.inputs.clone(), torch.full_like(text.targets, -100)
    for row, said in enumerate(text.targets):
        turned = said[said != -100].flip(0)
        targets[row, : len(turned)] = turned
        inputs[row, 1 : len(turned)] = turned[:-1]
        inputs[row, max(len(turned), 1) :] = inputs[row, 0]
    return Text(inputs, targets, text.nbytes)


def prediction(plan: Plan) -> str:
    """Which pooling is the configuration's prediction: the sum where stages correct others, else the last."""
    return "sum" if any(p.stage.objective == "residual" for p in plan.stages) else "last"


def update_discipline(stack: Stack, plan: Plan, old: Text, new: Text) -> Update:
    """P7 and P8."""
    last = _last(plan)
    alone = tuple(replace(s, weight=float(k == last)) for k, s in enumerate(plan.topology.stages))
    pupil = copy.deepcopy(stack)
    _train(pupil, replace(plan.topology, stages=alone), new)
    own = set(plan.stages[last].layers)
    moved = [_moved(a.parameters(), b.parameters()) for a, b in zip(stack.layers, pupil.layers, strict=True)]
    return Update(
        last,
        max(m for i, m in enumerate(moved) if i in own),
        max((m for i, m in enumerate(moved) if i not in own), default=0.0),
        _bpb(pupil, plan, old) - _bpb(stack, plan, old),
    )


def specialist_capacity(stack: Stack, plan: Plan, new: Text) -> float:
    """P11, in bits per byte."""
    last = _last(plan)
    if len(plan.stages) == 1:
        return 0.0
    if len(new.inputs) < 2:
        raise ConfigError(f"new text has {len(new.inputs)} rows; a probe needs 2, one to learn, one to test")
    lesson, exam = _halves(new)
    stages = tuple(
        _listening(s) if k == last else replace(s, frozen=True, weight=0.0, head=plan.stages[k].predicts)
        for k, s in enumerate(plan.topology.stages)
    )
    pupil = copy.deepcopy(stack)
    _train(pupil, replace(plan.topology, stages=stages), lesson)
    return _bpb(stack, plan, exam) - _bpb(pupil, plan, exam)


def target_alignment(stack: Stack, plan: Plan, inputs: Tensor, targets: Tensor) -> float | None:
    """P3: the cosine of the layers' two gradients; None where stages are frozen and have none."""
    if plan.frozen:
        return None
    last = _last(plan)
    stages = tuple(
        replace(
            s,
            weight=float(k == last),
            objective="cross-entropy",
            sources=tuple(replace(e, transmissivity=1.0) for e in s.sources),
        )
        for k, s in enumerate(plan.topology.stages)
    )
    pupil = copy.deepcopy(stack)
    found = []
    for topology in (plan.topology, replace(plan.topology, stages=stages)):
        pupil.zero_grad(set_to_none=True)
        train_step(pupil, topology, inputs, targets)
        found.append([_gradient(p) for p in pupil.layers.parameters()])
    dot, here, there = (
        sum(float((a * b).sum()) for a, b in zip(x, y, strict=True))
        for x, y in ((found[0], found[1]), (found[0], found[0]), (found[1], found[1]))
    )
    size = (here * there) ** 0.5
    return dot / size if size else 0.0


def _last(plan: Plan) -> int:
    """The last stage with a loss."""
    return max(p.index for p in plan.stages if p.scale > 0)


def _bpb(stack: Stack, plan: Plan, text: Text) -> float:
    return float(evaluate(stack, plan, text)["bpb"][prediction(plan)])


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


def _listening(stage: Stage) -> Stage:
    """The stage, with no gradient to what it hears but the embedding."""
    edges = (e if e.source == EMBEDDING else replace(e, transmissivity=0.0) for e in stage.sources)
    return replace(stage, sources=tuple(edges), weight=1.0)


def _train(stack: Stack, topology: Topology, text: Text) -> None:
    """A few steps of Adam on the rows of `text`, in order and round again."""
    stack.train()
    prepare(stack, topology)
    optimizer = torch.optim.Adam([p for p in stack.parameters() if p.requires_grad], lr=RATE)
    device = next(stack.parameters()).device
    for step in range(STEPS):
        rows = torch.arange(step * ROWS, (step + 1) * ROWS) % len(text.inputs)
        optimizer.zero_grad(set_to_none=True)
        train_step(stack, topology, text.inputs[rows].to(device), text.targets[rows].to(device))
        optimizer.step()


def _moved(before: Iterable[Tensor], after: Iterable[Tensor]) -> float:
    """‖after - before‖ / ‖before‖ of all the parameters of a layer as one vector."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(before, after, strict=True)]
    change = sum(float((b - a).double().square().sum()) for a, b in pairs)
    size = sum(float(a.double().square().sum()) for a, _ in pairs)
    return float((change / size) ** 0.5) if size else float(change > 0)


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    grad = parameter.grad
    return torch.zeros_like(parameter, dtype=torch.float64) if grad is None else grad.double()
