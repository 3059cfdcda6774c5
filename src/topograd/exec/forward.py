"""The forward pass of a plan: one stage, the stages of a prediction, and the prediction itself.

Training, evaluation and decoding all use `run_stage`, so that a stage computes the same everywhere, and
`predict`, so that a model predicts the same everywhere.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from topograd.exec.stage_cache import StageCache
from topograd.nn.relays import CausalRelay
from topograd.nn.stack import LayerContext, Stack, check_stack
from topograd.nn.translator import Readable
from topograd.topology.branches import predicting_plan
from topograd.topology.dag import CANVAS, EMBEDDING
from topograd.topology.plan import AnyPlan, EdgeOutput, Plan, PlannedStage
from topograd.topology.prediction import Terms


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it a model is in eval mode; afterwards it is as it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def run_stage(
    stack: Stack,
    planned: PlannedStage,
    messages: Sequence[Tensor],
    ctx: LayerContext,
    cache: StageCache | None = None,
    lean: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, dict[EdgeOutput, Tensor]]:
    """The stage's last hidden state, and its message for each of its outputs.

    `messages` holds one tensor for each of `planned.inputs`; a `cache` is for decoding. With `lean` only the
    messages are needed, and positions that no stage reads may be left out of the hidden state. With
    `recompute` a layer keeps its input alone and runs again in the backward.
    """
    horizon, rows = _needed(stack, planned, ctx) if lean and cache is None else (None, None)
    if horizon is not None:
        ctx = stack.layer_context(ctx.x0[:, :horizon], ctx.inputs[:, :horizon])
    h, heard = None, on_canvas(planned, messages, ctx, horizon)
    for (output, _), message in zip(planned.inputs, messages, strict=True):
        if output.relay == CANVAS:
            continue
        relay = stack.relay(output.relay)
        received = (
            relay.receive(message, heard) if cache is None else cache.receive(relay, output, message, heard)
        )
        if horizon is not None:
            received = received[:, :horizon]
        h = received if h is None else h + received
    assert h is not None, "a stage without sources cannot be built"
    if cache is not None and not cache.from_start:
        after = {planned.stage.start: h, **cache.layers(h, ctx)}
    else:
        after = {planned.stage.start: h}
        for layer in planned.layers:
            module = stack.layers[layer]
            call = partial(checkpoint, module, use_reentrant=False) if recompute else module
            if rows is None or layer != planned.layers[-1]:
                h = call(h, ctx)
            elif getattr(module, "takes_rows", False):
                h = call(h, ctx, rows=rows)
            else:
                h = call(h, ctx)[:, rows]
            after[layer + 1] = h
    h = after[planned.stage.stop]
    for (output, _), message in zip(planned.inputs, messages, strict=True):
        relay = stack.relay(output.relay)
        if hasattr(relay, "close"):  # a relay that chooses what goes back (`nn/inverse.py`)
            h = after[planned.stage.stop] = relay.close(h, message)
    sent = {}
    for output in planned.outputs:
        relay = stack.relay(output.relay)
        if rows is not None:
            assert isinstance(relay, CausalRelay)
            sent[output] = relay.send_pooled(h, messages[0])
        else:
            out, first = after[output.layer], messages[0]
            sent[output] = (
                relay.send(out, first) if cache is None else cache.send(relay, output, out, first, ctx)
            )
    return h, sent


def on_canvas(
    planned: PlannedStage, messages: Sequence[Tensor], ctx: LayerContext, horizon: int | None = None
) -> LayerContext:
    """The context in which a stage's relays receive: x0 is the canvas that it reads, where it reads one."""
    for (output, _), message in zip(planned.inputs, messages, strict=True):
        if output.relay == CANVAS:
            ctx = replace(ctx, x0=message[:, :horizon])
    return ctx


def _needed(stack: Stack, planned: PlannedStage, ctx: LayerContext) -> tuple[int | None, Tensor | None]:
    """The number of leading positions that receivers need, and the only ones they read; None means all."""
    relays = [stack.relay(output.relay) for output in planned.outputs]
    causal = [relay for relay in relays if isinstance(relay, CausalRelay)]
    if not relays or len(causal) < len(relays):
        return None, None
    needs = [relay.needed(ctx.inputs.shape[1]) for relay in causal]
    alone = len(needs) == 1 and planned.outputs[0].layer == planned.stage.stop
    rows = needs[0][1] if alone else None
    return max(count for count, _ in needs), None if rows is None else rows.to(ctx.inputs.device)


@torch.no_grad()
def stage_outputs(stack: Stack, plan: Plan, inputs: Tensor, stages: Iterable[int]) -> dict[int, Tensor]:
    """The last hidden state of each of `stages`; only the stages that they need run."""
    return _outputs(stack, plan, inputs, stages)


def stage_logits(
    stack: Stack, plan: Plan, stage: int, inputs: Tensor, x0: Tensor | None = None, *, lean: bool = True
) -> Tensor:
    """The logits of an exit after `stage`, with their graph; from `x0` instead of the embedding.

    λ does not act here: gradients pass every boundary. `lean` as in `run_stage`, for the stages before it.
    """
    terms = plan.prediction.after(stage)
    outputs = _outputs(stack, plan, inputs, [j for j, _ in terms], x0=x0, lean=lean)
    return predict(stack, plan, outputs, terms)


def predict(
    stack: Readable, plan: Plan, outputs: Mapping[int, Tensor], terms: Terms, rows: Tensor | None = None
) -> Tensor:
    """Σ_j w_j z_j over the terms of a prediction, from the stages' outputs; on `rows` of the vocabulary."""
    total: Tensor | None = None
    for stage, weight in terms:
        z = stack.readout(outputs[stage], plan.stages[stage].head, rows)
        z = z if weight == 1 else weight * z
        total = z if total is None else total + z
    assert total is not None, "a prediction has a term"
    return total


class Predictor(nn.Module):
    """A stack and its plan as one module, from inputs to the model's logits."""

    def __init__(self, stack: Stack, topology: AnyPlan) -> None:
        super().__init__()
        self.stack = check_stack(stack)
        self.plan = predicting_plan(Plan.of(topology, len(stack.layers)))

    def outputs(self, inputs: Tensor, states: Mapping[int, Tensor] | None = None) -> dict[int, Tensor]:
        """The hidden states that the prediction reads; `states` by layer need not be computed."""
        wanted = [j for j, _ in self.plan.prediction.full]
        return _outputs(self.stack, self.plan, inputs, wanted, known=states)

    def forward(self, inputs: Tensor) -> Tensor:
        return predict(self.stack, self.plan, self.outputs(inputs), self.plan.prediction.full)


def needed_stages(
    plan: Plan, wanted: Iterable[int], known: Mapping[int, Tensor], learning: Iterable[int] = ()
) -> set[int]:
    """The stages that must run so that `wanted` are computed, where the hidden states `known` are given.

    A wanted stage whose last layer is known need not run, nor one whose messages are; `learning` ones run.
    """
    needed, targets = set(learning), set(wanted)
    for planned in reversed(plan.stages):
        read = {output for later in plan.stages if later.index in needed for output, _ in later.inputs}
        missing = any(output in read and not _is_known(output, known) for output in planned.outputs)
        if missing or (planned.index in targets and planned.stage.stop not in known):
            needed.add(planned.index)
    return needed


def given_messages(plan: Plan, known: Mapping[int, Tensor]) -> dict[EdgeOutput, Tensor]:
    """The messages of stages whose hidden states are known."""
    outputs = (output for planned in plan.stages for output in planned.outputs)
    return {output: known[output.layer] for output in outputs if _is_known(output, known)}


def _is_known(output: EdgeOutput, known: Mapping[int, Tensor]) -> bool:
    return output.relay == "identity" and output.layer in known


def _outputs(
    stack: Stack,
    plan: Plan,
    inputs: Tensor,
    stages: Iterable[int],
    *,
    x0: Tensor | None = None,
    lean: bool = True,
    known: Mapping[int, Tensor] | None = None,
) -> dict[int, Tensor]:
    wanted = set(stages)
    known = {layer: h.to(inputs.device) for layer, h in (known or {}).items()}
    needed = needed_stages(plan, wanted, known)
    x0 = stack.embed(inputs) if x0 is None else x0
    ctx = stack.layer_context(x0, inputs)
    messages = given_messages(plan, known)
    outputs = {k: known[plan.stages[k].stage.stop] for k in wanted - needed}
    for planned in plan.stages:
        if planned.index not in needed:
            continue
        received = [x0 if output.source == EMBEDDING else messages[output] for output, _ in planned.inputs]
        short = lean and planned.index not in wanted
        h, sent = run_stage(stack, planned, received, ctx, lean=short)
        messages.update(sent)
        for output in planned.last_use:
            messages.pop(output, None)
        if planned.index in wanted:
            outputs[planned.index] = h
    return outputs
