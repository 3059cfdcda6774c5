"""The arms of the studies of edges: what crosses a border, when, and how the rates follow it.

Statement. w_t are the weights at step t, τ_k the steps by which stage k learns late (`Plan.lateness`), η its
learning rates. Beside cut, whole, late and thin edges, which are points of the topology's space, there are

    uniform    w_{t+1} from the gradient of batch t-1 at w_{t-1}, for all of the model: one stage, one loss
    slower     stage k learns with η / √(1 + τ_k), and so does the embedding with its τ
    ahead      stage k runs batch t on w_t + τ_k (w_t - w_{t-1}), about where its weights will be when the
               gradient comes; the gradient is the true one of those weights
    head       only what lies below the head is late: what early losses tell the shared head is not
    own        stage k learns at once from its own loss, and τ_k steps late from the others: of batch t from
               the gradient of the first, of batch t - τ_k from that of the second

Uniform is what a pipeline has that is one step late everywhere (PipeDream-2BW): no edge can say it, since the
lateness of edges begins at a loss. Early losses weigh `EXITS` of the last one's, or nothing. With nothing,
late edges are run as what they are by definition (`exec/late.py`): the gradient of one graph, each stage's
part taken τ steps later. The executor gives the same numbers (a test compares them) and takes a third longer.

Cost: `uniform`, `head`, `own` and late edges without early losses keep τ gradients, `ahead` one more copy of
the weights; `own` runs every batch twice.
Sources. D. Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (uniform); B. Yang et al.,
"PipeMare" (rates that fall with the lateness; the root is ours); C.-C. Chen et al., "Efficient and Robust
Parallel DNN Training through Model Parallelism on Multi-GPU Platform" (SpecTrain: weights foretold). Limits.
`ahead` and `own` need batches in one part, and do not move the head, which is never late.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from papers.product_of_experts.gap_arms import early
from papers.product_of_experts.gap_training import Training
from topograd.exec.late import LateQueue
from topograd.nn.stack import Stack
from topograd.runs.config import OptimizerConfig, StageOptimizer
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

LAYERS = 6
THREE, SIX = "2,2,2", "1,1,1,1,1,1"
EXITS = 0.1
"""The weight of early losses."""
BACKPROP, CUT, WHOLE, LATE, BOTH = "backprop", "cut", "whole", "late", "thin 4, late"
UNIFORM, SLOWER, AHEAD = "uniform", "late, slower", "late, ahead"
HEAD, OWN = "late, head at once", "late, own at once"
THIN = {bits: f"thin {bits}" for bits in (8, 4, 3)}


@dataclass(frozen=True)
class Way:
    """One arm."""

    topology: Topology
    rate_of: str | None = None
    """The arm whose rate it takes; by default one of its own."""
    settings: Callable[[OptimizerConfig], OptimizerConfig] | None = None
    """What else of the optimizer differs."""
    change: Callable[[Training], None] | None = None
    """What is done to a training before its first step."""


def ways(partition: str = THREE, exits: float = EXITS) -> dict[str, Way]:
    """Every arm with stages of these layers, by name."""
    chain = Topology.chain(partition)
    whole = early(chain.with_grad_scale(1.0), weight=exits)
    late, backprop = whole.with_gradient(delay=1), Topology.chain(str(LAYERS))
    plan = Plan.of(late, LAYERS)
    late_of = partial(lateness, plan=plan)
    return {
        BACKPROP: Way(backprop),
        CUT: Way(chain),
        WHOLE: Way(whole, BACKPROP),
        **{name: Way(whole.with_gradient(bits=bits), BACKPROP) for bits, name in THIN.items()},
        LATE: Way(late) if exits else Way(backprop, change=partial(hold_back, late=late_of)),
        BOTH: Way(whole.with_gradient(delay=1, bits=4), LATE),
        UNIFORM: Way(
            backprop, change=partial(hold_back, late=lambda stack: dict.fromkeys(stack.parameters(), 1))
        ),
        SLOWER: Way(late, settings=slower(plan)),
        AHEAD: Way(late, change=look_ahead),
        HEAD: Way(whole, LATE, change=partial(hold_back, late=late_of)),
        OWN: Way(whole, LATE, change=partial(learn_own_at_once, late=late_of)),
    }


def slower(plan: Plan) -> Callable[[OptimizerConfig], OptimizerConfig]:
    """Rates of every stage and of the embedding over √(1 + τ)."""
    shares = [1 / math.sqrt(1 + late) for late in plan.lateness]
    stages = tuple(StageOptimizer(stage=k, rate=share) for k, share in enumerate(shares, start=1))

    def settings(config: OptimizerConfig) -> OptimizerConfig:
        embedding = config.lr_embedding / math.sqrt(1 + plan.embedding_lateness)
        return replace(config, stages=stages, lr_embedding=embedding)

    return settings


def lateness(stack: Stack, plan: Plan) -> dict[nn.Parameter, int]:
    """τ of every parameter where there is one loss, at the end: the head, which it reads, is never late."""
    late = {
        p: plan.embedding_lateness
        for m in stack.modules()
        if isinstance(m, nn.Embedding)
        for p in m.parameters()
    }
    for planned in plan.stages:
        for i in planned.layers:
            late |= dict.fromkeys(stack.layers[i].parameters(), plan.lateness[planned.index])
    return {p: late.get(p, 0) for p in stack.parameters()}


Late = Callable[[Stack], Mapping[nn.Parameter, int]]
"""τ of every parameter."""


def hold_back(training: Training, late: Late) -> None:
    """Every step of the optimizers takes a parameter's gradient of τ steps before; the first τ take none."""
    queues = _queues(training, late)

    def exchange(*_: Any) -> None:
        for parameter, queue in queues.items():
            queue.append(parameter.grad)
            parameter.grad = queue.popleft()

    first = next(iter(training.optimizers.values()))
    first.register_step_pre_hook(exchange)


def learn_own_at_once(training: Training, late: Late) -> None:
    """Every step takes the gradient of a stage's own loss, and what else came to it τ steps before."""
    queues, run = _queues(training, late), training.loop.gradients
    cut = Plan.of(training.plan.topology.with_grad_scale(0.0), LAYERS)

    def gradients(plan: Plan, *given: Any) -> Tensor:
        run(cut, *given)
        own = {p: p.grad for p in queues}
        training.stack.zero_grad(set_to_none=True)
        losses = run(plan, *given)
        for parameter, queue in queues.items():
            mine, all_of_it = own[parameter], parameter.grad
            queue.append(all_of_it if mine is None or all_of_it is None else all_of_it - mine)
            held = queue.popleft()
            parameter.grad = mine if held is None else held if mine is None else mine + held
        return losses

    training.loop.gradients = gradients  # type: ignore[method-assign,assignment]


def _queues(training: Training, late: Late) -> dict[nn.Parameter, deque[Tensor | None]]:
    """The gradients that parameters have not learned from, none at first."""
    return {p: deque([None] * steps) for p, steps in late(training.stack).items()}


def look_ahead(training: Training) -> None:
    """Late stages run on weights that are foretold."""
    training.loop.late = AheadQueue(training.stack, training.plan)


class AheadQueue(LateQueue):
    """Late batches whose copies of the weights go on as far as the last step went, τ times."""

    def __init__(self, stack: Stack, plan: Plan) -> None:
        super().__init__()
        late = lateness(stack, plan)
        self._late = {name: (p, late[p]) for name, p in stack.named_parameters() if late[p]}
        self._before: dict[str, Tensor] = {}
        self._now: dict[str, Tensor] = {}
        self._ahead: dict[str, Tensor] = {}

    def begin(self, step: int, count: int = 1) -> None:
        super().begin(step, count)
        self._now = {name: parameter.detach().clone() for name, (parameter, _) in self._late.items()}
        for name, now in self._now.items():
            self._ahead[name] = now + self._late[name][1] * (now - self._before.get(name, now))

    def commit(self) -> None:
        super().commit()
        self._before = self._now  # the optimizers step after it

    def copies(self, stack: Stack, plan: Plan, stages: Iterable[int]) -> dict[str, Tensor]:
        own = super().copies(stack, plan, stages)
        return {name: self._ahead.get(name, copy) for name, copy in own.items()}
