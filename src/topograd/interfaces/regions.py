"""Regions joined by bounded interfaces: a stack as a chain of maps m_k → m_{k+1}.

Statement: given the canvas, region k computes m_{k+1} = R_k(m_k) and nothing else leaves it ("LBI: Parallel
Scan Backpropagation via Latent Bounded Interfaces", Corollary 2.6, eq. 2). The canvas is x0, a function of
the tokens alone, or the hidden state behind the first layers of region 0, which goes to every later region as
it is. The last region computes the loss. What would make the Jacobians of R_k wrong, or bind the samples of a
batch together, is refused here as far as kinds of modules and edges show it: a second path, a loss in
between, batch statistics, dropout. `exactness.py` tries the Jacobians themselves.

Shapes: m (batch, states, rank); how many states there are, its form says. Cost: none; `visit` runs a region.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from topograd.errors import StackError, TopologyError
from topograd.exec.forward import run_stage
from topograd.nn.interface import bounded_relay
from topograd.nn.preparation import check_prepared
from topograd.nn.relays import BoundedRelay
from topograd.nn.stack import LayerContext, Stack
from topograd.topology.dag import CANVAS, EMBEDDING, Topology, interface_name
from topograd.topology.plan import Plan, PlannedStage

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Regions:
    """A stack and its plan, known to be a chain of regions."""

    stack: Stack
    plan: Plan
    relays: tuple[BoundedRelay, ...]
    """relays[k] joins region k to region k + 1."""

    @classmethod
    def of(cls, stack: Stack, topology: Topology | Plan) -> Regions:
        """Check that `topology` is a chain of interfaces on `stack`, and that its Jacobians are exact."""
        plan = Plan.of(topology, len(stack.layers))
        if len(plan.stages) < 2:
            raise TopologyError(
                setting="topology", given=len(plan.stages), allowed="a chain of at least two regions"
            )
        relays = tuple(bounded_relay(stack, planned.inputs[0][0].relay) for planned in plan.stages[1:])
        _check_root(plan, relays[0])
        for planned in plan.stages:
            _check_chain(planned, len(plan.stages) - 1)
            for layer in planned.layers:
                _check_exact(stack.layers[layer], f"layers.{layer}")
        check_prepared(stack, plan)
        return cls(stack, plan, relays)

    @property
    def count(self) -> int:
        """K, how many regions there are."""
        return len(self.plan.stages)

    @property
    def alike(self) -> bool:
        """Whether all interfaces have the same settings."""
        return len({str(relay.settings) for relay in self.relays}) == 1

    def visit(self, region: int, message: Tensor, ctx: LayerContext) -> Tensor:
        """m_{k+1} = R_k(m_k) of a region that is not the last, at the positions that are read."""
        planned = self.plan.stages[region]
        given = [message] if ctx.canvas is None else [message, ctx.canvas]
        _, sent = run_stage(self.stack, planned, given, ctx, lean=True)
        return next(value for output, value in sent.items() if output.relay != CANVAS)

    def first(self, x0: Tensor, ctx: LayerContext) -> tuple[Tensor, LayerContext]:
        """m_1, and the context with the canvas that region 0 makes, if it makes one."""
        _, sent = run_stage(self.stack, self.plan.stages[0], [x0], ctx, lean=True)
        by_kind = {output.relay == CANVAS: value for output, value in sent.items()}
        return by_kind[False], replace(ctx, canvas=by_kind.get(True))

    def messages(self, x0: Tensor, ctx: LayerContext) -> list[Tensor]:
        """m_1 ... m_{K-1} of one forward."""
        return self._forward(x0, ctx)[0]

    def told(self, x0: Tensor, ctx: LayerContext) -> list[Tensor]:
        """The messages, less what regions send that add nothing to their canvas."""
        messages, ctx = self._forward(x0, ctx)
        canvas = ctx if ctx.canvas is None else replace(ctx, x0=ctx.canvas)
        return [message - relay.empty(canvas) for message, relay in zip(messages, self.relays, strict=True)]

    def _forward(self, x0: Tensor, ctx: LayerContext) -> tuple[list[Tensor], LayerContext]:
        message, ctx = self.first(x0, ctx)
        sent = [message]
        for region in range(1, self.count - 1):
            sent.append(self.visit(region, sent[-1], ctx))
        return sent, ctx


def _check_root(plan: Plan, relay: BoundedRelay) -> None:
    """A form whose canvas makes a state is read by region 0 too."""
    given = plan.stages[0].inputs[0][0].relay
    if relay.settings.first_region == 0 and given != interface_name(0):
        raise TopologyError(
            f"region 1 reads through {given!r}, and this interface begins at the canvas",
            setting="relay",
            given=given,
            remedy="build the topology with Topology.regions(..., first_region=0)",
        )


def _check_chain(planned: PlannedStage, last: int) -> None:
    k = planned.index
    sources = [(port.source, lam) for port, lam in planned.inputs if (port.source, port.relay) != (0, CANVAS)]
    live = all(lam == 1 for _, lam in planned.inputs)
    whole = all(edge.delay == 0 and edge.grad_bits == 32 for edge in planned.stage.sources)
    if sources != [(k - 1 if k else EMBEDDING, 1.0)] or not (whole and live):
        raise TopologyError(
            f"region {k + 1} has the sources {sources}",
            setting="sources",
            given=sources,
            remedy=f"only the interface from region {k} may join it, with λ = 1, no delay and 32 bits",
        )
    if (planned.scale > 0) != (k == last) or planned.stage.frozen:
        raise TopologyError(
            f"region {k + 1} of {last + 1} has weight {planned.stage.weight}",
            setting="weight",
            given=planned.stage.weight,
            remedy=(
                "only the last region may have a loss, and none may be frozen: else use backward 'autograd'"
            ),
        )


def _check_exact(layer: nn.Module, name: str) -> None:
    """Refuse what binds the samples of a batch, or changes when a region is run twice."""
    for path, module in layer.named_modules():
        where = f"{name}.{path}" if path else name
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise StackError(
                f"{where} is a {type(module).__name__}, which mixes the samples of a batch",
                setting=where,
                given=type(module).__name__,
                remedy="use LayerNorm or RMSNorm, or call eval()",
            )
        if isinstance(module, DROPOUT) and module.training and module.p > 0:
            raise StackError(
                f"{where} has dropout p = {module.p}: a region that runs twice would differ from itself",
                setting=where,
                given=module.p,
                remedy="use p = 0 or call eval()",
            )
