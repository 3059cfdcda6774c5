"""Closed-form properties of a plan.

For the hard chain of a partition π they reduce to the paper's: gradient depth max d_k (P2), activation
memory O(max d_k) (P4), pipeline granularity |π| (P5) ("Stage-Partitioned Learning" §7). For any other DAG
they follow the executor's rule: a stage's activations live from its forward until its backward, and its
backward runs as soon as every stage that sends it gradient has run its own.

The gradient coupling C_global = Σ_i λ_i of eq. 30 (with c_i = 1) counts the joints between layers that
gradient crosses: L - K for a hard chain, Σ λ_i for soft boundaries. Over L - 1 it is our reading of the
coordination of P6: 1 for backprop, 0 for layers that learn alone. C_head is the number of
vocabulary matrices, 1 + K with per-stage heads.

What goes back. With b bits an edge carries b / 32 of float32's bytes and a scale of 32 bits a position. With
a delay a stage learns from a batch τ steps after it ran forward (`Plan.lateness`) and keeps its graph, or its
input, and a copy of its weights until then, τ of each. Within a step only edges with gradient and delay 0 are
waited for.
"""

from typing import Any

from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import Plan, gradient_edges


def gradient_depth(plan: Plan) -> int:
    """The largest number of layers that one gradient passes through."""
    reach: list[int] = []
    for planned in plan.stages:
        behind = 0
        for output, grad_scale in planned.inputs:
            if grad_scale > 0 and output.source != EMBEDDING:
                source = plan.stages[output.source]
                far = reach[output.source] if plan.topology.reach == "all" else len(source.layers)
                behind = max(behind, far - (source.stage.stop - output.layer))
        reach.append(behind + len(planned.layers))
    return max(reach[planned.index] for planned in plan.stages if planned.scale > 0)


def activation_layers(plan: Plan) -> int:
    """The largest number of layers whose activations are held at once during a step.

    A stage counts whole until its backward, one that is late once for each batch that it keeps. One without a
    loss that is tapped only before its end drops the rest at once, so there this is a bound.
    """
    waiting = {planned.index: planned.num_grad_consumers for planned in plan.stages}
    held = {p.index: late * len(p.layers) for p, late in zip(plan.stages, plan.lateness, strict=True) if late}
    peak = 0
    for planned in plan.stages:
        if planned.stage.frozen:
            continue
        if plan.lateness[planned.index]:
            held[planned.index] += len(planned.layers)
            peak = max(peak, sum(held.values()))
            continue
        held[planned.index] = len(planned.layers)
        peak = max(peak, sum(held.values()))
        ready = [planned.index] if not waiting[planned.index] else []
        if plan.topology.reach == "next":  # it sends gradient back before it receives any
            ready += _newly_ready(plan, planned.index, waiting)
        while ready:
            done = ready.pop()
            del held[done]
            if plan.topology.reach == "all":
                ready += _newly_ready(plan, done, waiting)
    return peak


def _newly_ready(plan: Plan, stage: int, waiting: dict[int, int]) -> list[int]:
    """The stages that wait for nothing more, once `stage` has sent its gradient back."""
    sources = plan.gradient_sources(stage)
    for source in sources:
        waiting[source] -= 1
    return [source for source in sources if not waiting[source] and not plan.lateness[source]]


def pipeline_granularity(plan: Plan) -> int:
    """The number of groups of stages that train without exchanging gradients within a step."""
    return len(plan.groups())


def coupling_cost(plan: Plan) -> float:
    """Σ over joints of their grad_scale: 1 inside a stage that learns, λ between two that do."""
    learns = [False] * len(plan.stages)
    cost = 0.0
    for planned in reversed(plan.stages):
        k = planned.index
        learns[k] = not planned.stage.frozen and (learns[k] or planned.scale > 0)
        if not learns[k]:
            continue
        cost += len(planned.layers) - 1
        for output, grad_scale in planned.inputs:
            if output.source != EMBEDDING and not plan.stages[output.source].stage.frozen:
                learns[output.source] |= grad_scale > 0
                cost += grad_scale
    return cost


def coordination(plan: Plan) -> float:
    """The coupling cost over that of backprop through the same layers; 0 for a single layer."""
    joints = plan.topology.layers - 1
    return coupling_cost(plan) / joints if joints else 0.0


def head_matrices(plan: Plan) -> int:
    """Matrices of vocabulary × width: the shared one, and one for each stage where heads are per stage."""
    return 1 + (len(plan.stages) if plan.topology.heads == "per-stage" else 0)


def gradient_bits(plan: Plan) -> int:
    """Bits that go back for each number of a hidden state, over all edges: 32 (K - 1) in hierarchical
    training. A scale of 32 bits a position comes with each edge of fewer than 32."""
    return sum(edge.grad_bits for planned in plan.stages for _, edge in gradient_edges(planned))


def staleness(plan: Plan) -> int:
    """The steps after which a batch is learned whole: max τ_k."""
    return max(plan.lateness)


def stashed_layers(plan: Plan) -> int:
    """Copies of layers' weights that are kept for batches whose gradient has not come: Σ τ_k d_k."""
    return sum(late * len(p.layers) for late, p in zip(plan.lateness, plan.stages, strict=True))


def waiting_stages(plan: Plan) -> int:
    """The stages that wait for another's gradient within a step."""
    return len({s for planned in plan.stages for s, edge in gradient_edges(planned) if not edge.delay})


def exit_layers(plan: Plan) -> list[int]:
    """For each predicting stage, the layers that run to reach its head."""
    return [sum(len(needed.layers) for needed in plan.needed(k)) for k in plan.predicting()]


def closed_forms(plan: Plan) -> dict[str, Any]:
    """Every property that is known without training, by name."""
    return {
        "gradient_depth": gradient_depth(plan),
        "activation_layers": activation_layers(plan),
        "pipeline_granularity": pipeline_granularity(plan),
        "coupling_cost": coupling_cost(plan),
        "coordination": coordination(plan),
        "head_matrices": head_matrices(plan),
        "exit_layers": exit_layers(plan),
        "gradient_bits": gradient_bits(plan),
        "staleness": staleness(plan),
        "stashed_layers": stashed_layers(plan),
        "waiting_stages": waiting_stages(plan),
    }
