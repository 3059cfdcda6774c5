"""Closed-form properties of a compiled topology, read from its plan.

For the hard chain of a partition π they reduce to the paper's: gradient depth max d_k (P2), activation
memory O(max d_k) (P4), pipeline granularity |π| (P5) ("Stage-Partitioned Learning" §7). For any other DAG
they follow the executor's rule: a stage's activations live from its forward until its backward, and its
backward runs as soon as every stage that sends it gradient has run its own.
"""

from __future__ import annotations

from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import Plan


def gradient_depth(plan: Plan) -> int:
    """The largest number of layers that one gradient passes through."""
    reach: list[int] = []
    for planned in plan.stages:
        behind = 0
        for port, transmissivity in planned.hears:
            if transmissivity > 0 and port.source != EMBEDDING:
                unused = plan.stages[port.source].stage.stop - port.layer
                behind = max(behind, reach[port.source] - unused)
        reach.append(behind + len(planned.layers))
    return max(reach[planned.index] for planned in plan.stages if planned.scale > 0)


def activation_layers(plan: Plan) -> int:
    """The largest number of layers whose activations are held at once during a step.

    A stage counts whole until its backward. One without a loss that is tapped only before its end drops the
    rest at once, so there this is a bound.
    """
    waiting = {planned.index: planned.listeners for planned in plan.stages}
    held: dict[int, int] = {}
    peak = 0
    for planned in plan.stages:
        if planned.stage.frozen:
            continue
        held[planned.index] = len(planned.layers)
        peak = max(peak, sum(held.values()))
        ready = [planned.index] if not waiting[planned.index] else []
        while ready:
            done = ready.pop()
            del held[done]
            for source in plan.gradient_sources(done):
                waiting[source] -= 1
                if not waiting[source]:
                    ready.append(source)
    return peak


def pipeline_granularity(plan: Plan) -> int:
    """The number of groups of stages that train without exchanging gradients within a step.

    Two stages are in one group when gradient crosses between them or when they share a layer. The head and
    the embedding, which all stages share, do not count.
    """
    group = list(range(len(plan.stages)))

    def find(k: int) -> int:
        while group[k] != k:
            k = group[k]
        return k

    for planned in plan.stages:
        neighbours = plan.gradient_sources(planned.index)
        mine = set(planned.layers)
        neighbours += [q.index for q in plan.stages[: planned.index] if mine & set(q.layers)]
        for other in neighbours:
            group[find(planned.index)] = find(other)
    return len({find(planned.index) for planned in plan.stages if not planned.stage.frozen})
