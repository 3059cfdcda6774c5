"""The directions of residual interfaces, from data: U before the training begins.

Statement. With h_k (positions, width) the dense model's hidden states at boundary k, x0 its canvas and
g_k = ∂L/∂h_k, U is the leading r right singular vectors of

    basis=hidden      h_k - x0: no U of r directions loses less of what the interface carries
    basis=adjoints    g_k: no U loses less of the gradient that passes back through it

at each boundary by itself. It stays as it is from then on (`nn/residual_interface.py`).

A new model adds nothing to its canvas and has no gradient: its output matrices and its head are zero. So a
dense copy of it learns first for `STEPS` steps, with the run's own optimizers and first batches, and is
thrown away; a run that begins with a trained model (`init`) needs no such steps. The states are of `READ`
batches.

Cost: STEPS + READ dense steps and an SVD of (positions, width) at each boundary. Source: ours; what U is
compared with is in `papers/latent_bounded_interfaces/interface_verdict.py`. Limits: directions of a model
that is STEPS old may not be those that a later one needs.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from topograd.exec.train_step import train_step
from topograd.nn.host_numbers import to_device
from topograd.nn.preparation import prepare
from topograd.nn.residual_interface import ResidualRelay
from topograd.nn.stack import Stack
from topograd.runs.config import OptimizerConfig
from topograd.topology.dag import CANVAS, Topology
from topograd.topology.plan import Plan
from topograd.training.optimizers import make_optimizers
from topograd.training.step_runner import StepRunner

STEPS, READ = 50, 8


def begin_interfaces(
    stack: Stack,
    plan: Plan,
    optimizer: OptimizerConfig,
    batches: Iterator[tuple[Tensor, Tensor]],
    steps: int = STEPS,
) -> bool:
    """Set U of the boundaries that take it from data; whether there were any, and batches were read."""
    relays = {
        planned.layers[0] - 1: relay
        for planned in plan.stages[1:]
        if isinstance(relay := stack.learned_relays().get(planned.inputs[0][0].relay), ResidualRelay)
        and relay.settings.basis in ("hidden", "adjoints")
    }
    if not relays:
        return False
    dense = copy.deepcopy(stack)
    del dense.relays
    chain = prepare(dense, Topology.chain(str(len(dense.layers))))
    canvas = next((port.layer for port, _ in plan.stages[1].inputs if port.relay == CANVAS), 0)
    optimizers = make_optimizers(dense, optimizer, chain)
    loop = StepRunner(dense, optimizers, clip=optimizer.clip)
    for step in range(steps):
        optimizers.set_rates(step, steps)
        loop.step(chain, [next(batches)], step + 1)
    seen = [boundary_rows(dense, chain, *next(batches), canvas) for _ in range(READ)]
    with torch.no_grad():
        for layer, relay in relays.items():
            rows = torch.cat([one[relay.settings.basis][layer] for one in seen])
            relay.basis.copy_(leading_directions(rows, relay.settings.rank))
    return True


def leading_directions(rows: Tensor, rank: int) -> Tensor:
    """(width, rank): the leading right singular vectors of (positions, width); any where rows are fewer."""
    return torch.linalg.svd(rows.double(), full_matrices=True).Vh[:rank].T.to(rows.dtype)


def boundary_rows(
    dense: Stack, plan: Plan, inputs: Tensor, targets: Tensor, canvas: int = 0
) -> dict[str, dict[int, Tensor]]:
    """`hidden` and `adjoints` (positions, width) behind each layer of a chain, by the layer's number; the
    canvas lies behind so many layers."""
    states: dict[int, Tensor] = {}

    def keep(number: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            states.setdefault(number, args[0])
            states[number + 1] = output
            output.retain_grad()

        return hook

    device = next(dense.parameters()).device
    with ExitStack() as hooks:
        for number, layer in enumerate(dense.layers):
            hooks.enter_context(layer.register_forward_hook(keep(number)))
        train_step(dense, plan, to_device(inputs, device), to_device(targets, device))
    dense.zero_grad(set_to_none=True)
    found: dict[str, dict[int, Tensor]] = {"hidden": {}, "adjoints": {}}
    for number in range(len(dense.layers)):
        adjoint = states[number + 1].grad
        assert adjoint is not None, "every layer of a chain reaches the loss"
        found["adjoints"][number] = adjoint.flatten(0, -2)
        found["hidden"][number] = (states[number + 1] - states[canvas]).detach().flatten(0, -2)
    return found
