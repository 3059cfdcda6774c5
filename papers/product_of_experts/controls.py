"""What a specialist is compared with: the base's own head trained along ("v2"), and LoRA on the base.

"Product of Experts" §6.2 (F3), §6.3: with one head for all, training it on new text moves what every stage of
the base predicts, though not one of their weights does. `single_head` is the specialist of `attach.py`
without a head of its own; the shared matrix is a copy that learns (a head that is tied to the embedding is
untied, so that the embedding stays). Everything else, data, steps and rates, is the specialist's.

`lora` corrects every linear map of the base by a matrix of low rank (`nn/lora.py`), as many parameters as a
specialist has, with the loss at the end of the base alone. It learns by AdamW at LORA_RATE, as peft's users
do. While it is on there is one path only: what it does to the base is what the model does. Switched off it
leaves the base as it was, as a specialist does; merged it does not. Limits: bases that predict by their last
stage.

Nothing is written: `train` gives the reading of the base at each checkpoint, and the model.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from topograd.nn.heads import Head
from topograd.nn.lora import add_lora, has_lora, linear_maps
from topograd.nn.stack import Stack
from topograd.runs.config import OptimizerConfig
from topograd.runs.session import LoadedTextRun
from topograd.specialists.attach import Attached, copied
from topograd.specialists.preservation import Preservation
from topograd.specialists.settings import FineTune
from topograd.specialists.tokens import Vocabulary
from topograd.specialists.zero_shot import ZeroShot
from topograd.topology.dag import Edge, Stage
from topograd.topology.plan import Plan
from topograd.topology.prediction import Prediction
from topograd.training.activation_cache import CachedActivationLoader, PlainSequences, SequenceStore
from topograd.training.optimizers import OptimizerSet, make_optimizers
from topograd.training.step_runner import StepRunner

NAME = "control"
LORA_RATE = 2e-4


def single_head(base: LoadedTextRun, layers: int = 1, seed: int = 0) -> Attached:
    """A base with a stage that has no head of its own; the shared one, untied, learns with it."""
    torch.manual_seed(seed)
    stack = copied(base.stack)
    head = head_of(stack)
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


def lora(base: LoadedTextRun, parameters: int, seed: int = 0) -> Attached:
    """A base whose linear maps all have a correction, of the rank that comes closest to so many parameters.

    The modules are copies, the base's matrices are shared.
    """
    shared = {id(t): t for t in (*base.stack.parameters(), *base.stack.buffers())}
    stack = copy.deepcopy(base.stack, shared)
    maps: list[Any] = [module for layer in stack.layers for module in linear_maps(layer)]
    per_rank = sum(sum(module.weight.shape) for module in maps)
    torch.manual_seed(seed)
    add_lora(stack.layers, max(round(parameters / per_rank), 1))
    before, last = base.plan.topology, len(base.plan.topology.stages) - 1
    stages = tuple(
        replace(
            stage,
            sources=tuple(replace(edge, grad_scale=1.0) for edge in stage.sources),
            weight=float(k == last),
        )
        for k, stage in enumerate(before.stages)
    )
    plan = Plan.of(replace(before, stages=stages, prediction="last"), len(stack.layers))
    for name, parameter in stack.named_parameters():
        if "lora_" not in name:
            parameter.requires_grad_(False)
    vocabulary = Vocabulary(base.tokenizer, len(head_of(stack).weight))
    return Attached(base, stack.eval(), plan, {NAME: last}, vocabulary)


def head_of(stack: Stack) -> Head:
    """A stack's head."""
    head = stack.shared_head
    assert head is not None
    return head


def lora_optimizers(stack: Stack, schedule: OptimizerConfig) -> OptimizerSet:
    """AdamW at LORA_RATE over what learns, with a specialist's schedule."""
    learning = [p for p in stack.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=LORA_RATE, weight_decay=0.0)
    optimizer.param_groups[0]["peak"] = LORA_RATE
    return OptimizerSet({"adamw": optimizer}, {"adamw": schedule})


def read_by(attached: Attached, stage: int | None = None) -> Plan:
    """The plan that predicts by one stage, or as the base does."""
    terms = attached.base.plan.prediction.full if stage is None else ((stage, 1.0),)
    last = attached.plan.predicting()[-1]
    exits = {k: ((k, 1.0),) for k in attached.plan.predicting()} | {last: terms}
    return replace(attached.plan, prediction=Prediction("pool", terms, exits))


def train(
    attached: Attached,
    inputs: Tensor,
    targets: Tensor,
    settings: FineTune,
    store: SequenceStore | None = None,
    tasks: ZeroShot | None = None,
) -> list[dict[str, Any]]:
    """Train a control in place; the reading of the base before, and at every checkpoint."""
    schedule = settings.optimizer(attached.base.config.optimizer)
    corrected = any(has_lora(module) for module in attached.stack.modules())
    make = lora_optimizers if corrected else make_optimizers
    loop = StepRunner(attached.stack, make(attached.stack, schedule), clip=schedule.clip)
    loader = CachedActivationLoader(store or PlainSequences(inputs, targets), settings.batch, settings.seed)
    before = Preservation(attached.base, tasks)
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
