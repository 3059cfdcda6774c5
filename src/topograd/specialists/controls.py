"""What a specialist is compared with: the same stage, but the base's own head is trained along ("v2").

"Product of Experts" §6.2 (F3), §6.3: with one head for all, training it on new text moves what every stage of
the base predicts, though not one of their weights does. The control is the specialist of `attach.py` without
a head of its own; the shared matrix is a copy that learns (a head that is tied to the embedding is untied, so
that the embedding stays). Everything else, data, steps and rates, is the specialist's.

Nothing is written: `train` gives the reading of the base at each checkpoint, and the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from topograd.nn.heads import Head
from topograd.runs.session import Session
from topograd.specialists.attach import Attached, copied
from topograd.specialists.preservation import Preservation
from topograd.specialists.settings import FineTune
from topograd.specialists.tokens import Vocabulary
from topograd.topology.dag import Edge, Stage
from topograd.topology.plan import Plan
from topograd.topology.prediction import Prediction
from topograd.training.hidden_states import PlainRows, RowStore, StateLoader
from topograd.training.loop import TrainingLoop
from topograd.training.optimizers import make_optimizers

NAME = "single head"


def single_head(base: Session, layers: int = 1, seed: int = 0) -> Attached:
    """A base with a stage that has no head of its own; the shared one, untied, learns with it."""
    torch.manual_seed(seed)
    stack = copied(base.stack)
    head = stack.head
    assert isinstance(head, Head)
    head.weight = nn.Parameter(head.weight.detach().clone())
    first = len(stack.layers)
    stack.append_layers(layers)  # type: ignore[operator]
    before = base.plan.topology
    stage = Stage(first, first + layers, tuple(Edge(k) for k in before.leaves()))
    topology = replace(before, layers=first + layers, stages=(*before.stages, stage), prediction="last")
    plan = Plan.of(topology, first + layers).halted(range(len(before.stages)))
    stack.requires_grad_(False)
    for module in list(stack.layers)[first:]:
        module.requires_grad_(True)
    head.weight.requires_grad_(True)
    vocabulary = Vocabulary(base.tokenizer, len(head.weight))
    return Attached(base, stack.eval(), plan, {NAME: len(before.stages)}, vocabulary)


def read_by(attached: Attached, stage: int | None = None) -> Plan:
    """The plan that predicts by one stage, or as the base does."""
    terms = attached.base.plan.prediction.full if stage is None else ((stage, 1.0),)
    last = attached.plan.predicting()[-1]
    exits = {k: ((k, 1.0),) for k in attached.plan.predicting()} | {last: terms}
    return replace(attached.plan, prediction=Prediction("pool", terms, exits))


def train(
    attached: Attached, inputs: Tensor, targets: Tensor, settings: FineTune, store: RowStore | None = None
) -> list[dict[str, Any]]:
    """Train a control in place; the reading of the base before, and at every checkpoint."""
    optimizer = settings.optimizer(attached.base.config.optimizer)
    loop = TrainingLoop(attached.stack, make_optimizers(attached.stack, optimizer), clip=optimizer.clip)
    loader = StateLoader(store or PlainRows(inputs, targets), settings.batch, settings.seed)
    before = Preservation(attached.base)
    stage = attached.stages[NAME]
    rows = [_reading(attached, before, 0, stage)]
    attached.stack.train()
    for step in range(settings.steps):
        loop.optimizers.set_rates(step, settings.steps)
        done = loop.step(attached.plan, [next(loader)], step + 1)
        if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
            rows.append(_reading(attached, before, step + 1, stage) | {"loss": float(done.losses[stage])})
    attached.stack.eval()
    return rows


def _reading(attached: Attached, before: Preservation, step: int, stage: int) -> dict[str, Any]:
    training = attached.stack.training
    attached.stack.eval()
    reading = before.read(attached.stack, read_by(attached), read_by(attached, stage))
    attached.stack.train(training)
    return {"step": step, **reading.as_dict()}
