"""Whether the interfaces are all that joins the regions: found by disturbing one layer at a time.

Statement. The Jacobians of a chain of regions are exact only if region k reaches a later region through its
messages alone ("LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", Corollary 2.6: the
message separates what is before it from what is behind). So hold every message of every `BoundedRelay` at
its value in one forward, disturb what layer i of region k reads and returns by noise, and leave all else
alone: other edges, attributes, buffers, modules that regions share. Then nothing behind region k may
change, bit for bit. The message into a region is disturbed in the same way, for a relay may keep things as
well as a layer.

The canvas goes into every region and is allowed. Layers are tried from the last to the first of a
region, so that the error names the one from which the path starts. Parameters have noise on them meanwhile,
for a path through a matrix of zeros would not show; they and the buffers are put back, whatever happens.

Cost: one forward for each layer of all regions but the last, and two more. No gradients. Limits: call it
between steps, not within one; a path that opens only for some inputs is found only with such inputs, and
one that noise in a layer cannot move (a sign of large numbers) is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from topograd.errors import TopologyError
from topograd.exec.forward import run_stage
from topograd.nn.relays import BoundedRelay
from topograd.nn.stack import Stack
from topograd.topology.dag import CANVAS, EMBEDDING, Topology
from topograd.topology.plan import EdgeOutput, Plan, PlannedStage

PARAMETER_NOISE = 0.1

Seen = dict[tuple[int, str], Tensor]
"""What happened in one forward, in order: (region, name of what it is) -> its value."""
Disturbed = tuple[int, int | None]
"""A region and one of its layers, or None for the message into the region."""


@torch.no_grad()
def check_separator(stack: Stack, topology: Topology, inputs: Tensor) -> None:
    """Raise a TopologyError that names the path if a region reaches a later one past the interfaces."""
    plan = Plan.of(topology, len(stack.layers))
    with _noise_on_parameters(stack) as put_buffers_back:

        def run(held: dict[EdgeOutput, Tensor], disturbed: Disturbed | None = None) -> _Forward:
            put_buffers_back()
            return _Forward(stack, plan, inputs, held, disturbed)

        first = run({})
        held = {port: m for port, m in first.sent.items() if _is_interface(stack, port)}
        expected = run(held).seen
        _check_repeatable(first.seen, expected)
        for planned in plan.stages[:-1]:
            for layer in (*reversed(planned.layers), None):
                if layer is None and planned.index == 0:
                    continue  # only the canvas goes into the first region
                actual = run(held, (planned.index, layer)).seen
                changed = _first_change(expected, actual, behind=planned.index)
                if changed is not None:
                    raise TopologyError(_path(stack, plan, planned, layer, changed))


class _Forward:
    """One forward of all the stages, at every position, with some messages held and one layer disturbed."""

    def __init__(
        self,
        stack: Stack,
        plan: Plan,
        inputs: Tensor,
        held: dict[EdgeOutput, Tensor],
        disturbed: Disturbed | None,
    ) -> None:
        self.stack, self.held, self.disturbed = stack, held, disturbed
        self.seen: Seen = {}
        self.sent: dict[EdgeOutput, Tensor] = {}
        self.region = 0
        x0 = stack.embed(inputs)
        ctx = stack.layer_context(x0, inputs)
        with ExitStack() as hooks:
            for i, layer in enumerate(stack.layers):
                hooks.callback(layer.register_forward_pre_hook(self._before(i)).remove)
                hooks.callback(layer.register_forward_hook(self._behind(i)).remove)
            for planned in plan.stages:
                self.region = planned.index
                messages = [self._message(port, x0) for port, _ in planned.inputs]
                h, sent = run_stage(stack, planned, messages, ctx)
                self.sent |= sent
                for port, message in sent.items():
                    name = f"its message behind layer {port.layer} through {port.relay!r}"
                    self.seen[planned.index, name] = message
                if planned.predicts:
                    self.seen[planned.index, "its readout"] = stack.readout(h, planned.index)

    def _message(self, port: EdgeOutput, x0: Tensor) -> Tensor:
        if port.source == EMBEDDING:
            return x0
        message = self.held.get(port, self.sent[port])
        return _shaken(message) if self.disturbed == (self.region, None) else message

    def _before(self, layer: int) -> Callable[..., Any]:
        def hook(_: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
            self.seen[self.region, f"the input of layers.{layer}"] = arguments[0]
            if self.disturbed != (self.region, layer):
                return None
            return _shaken(arguments[0]), *arguments[1:]

        return hook

    def _behind(self, layer: int) -> Callable[..., Any]:
        def hook(_: torch.nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            if self.disturbed == (self.region, layer):
                output = _shaken(output)
            self.seen[self.region, f"layers.{layer}"] = output
            return output

        return hook


def _shaken(x: Tensor) -> Tensor:
    """x with noise as large as its largest number; the same noise at every call."""
    generator = torch.Generator().manual_seed(x.numel())
    return x + torch.randn(x.shape, generator=generator).to(x) * (1 + x.abs().max())


@contextmanager
def _noise_on_parameters(stack: Stack) -> Iterator[Callable[[], None]]:
    """Random parameters as long as this is open; yields what puts the buffers back to where they were."""
    parameters = [(p, p.detach().clone()) for p in stack.parameters()]
    buffers = [(b, b.detach().clone()) for b in stack.buffers()]

    def put_buffers_back() -> None:
        for buffer, value in buffers:
            buffer.copy_(value)

    generator = torch.Generator().manual_seed(0)
    try:
        for parameter, value in parameters:
            noise = torch.randn(value.shape, generator=generator).to(value)
            parameter.copy_(value + PARAMETER_NOISE * noise)
        yield put_buffers_back
    finally:
        put_buffers_back()
        for parameter, value in parameters:
            parameter.copy_(value)


def _is_interface(stack: Stack, port: EdgeOutput) -> bool:
    return port.relay == CANVAS or isinstance(stack.relay(port.relay), BoundedRelay)


def _check_repeatable(first: Seen, second: Seen) -> None:
    changed = _first_change(first, second, behind=-1)
    if changed is not None:
        region, what = changed
        raise TopologyError(
            f"two forwards of the same batch differ at {what} in region {region + 1}: something "
            "is random or kept from one forward to the next, so paths cannot be found",
            setting="stack",
            given=what,
            remedy="remove it, or call eval()",
        )


def _first_change(expected: Seen, actual: Seen, behind: int) -> tuple[int, str] | None:
    """The first thing that differs in the regions behind one; what is not a number equals itself."""
    for key, value in expected.items():
        if key[0] > behind and not _same(value, actual[key]):
            return key
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _path(
    stack: Stack, plan: Plan, planned: PlannedStage, layer: int | None, changed: tuple[int, str]
) -> str:
    """One line: where the path starts, which region it reaches, and how."""
    region, what = changed
    origin = f"layers.{layer}" if layer is not None else "its message"
    edges = [
        f"an edge from layers.{port.layer - 1} (region {port.source + 1}) through {port.relay!r}"
        for port, _ in plan.stages[region].inputs
        if port.source != EMBEDDING and not _is_interface(stack, port)
    ]
    if what == f"the input of layers.{plan.stages[region].stage.start}" and edges:
        how = f"{' and '.join(edges)} leads there"
    else:
        how = f"no edge leads there, yet {what} changes, by a module or a value that both of them use"
    return (
        f"{origin} (region {planned.index + 1}) reaches region {region + 1} past the interface: {how}; "
        "remove that path"
    )
