"""The cheapest partition under a cost per stage, by constrained dynamic programming.

Statement. With Q(a, b) the cost of a stage of layers a+1..b, the cheapest partition into m stages obeys

    DP[m, b] = min over a of  DP[m-1, a] + Q(a, b),      DP[1, b] = Q(0, b)

and the answer is the least DP[K, L] over the allowed K. The paper's penalty R(a, b) is here the hard rule
that a stage has at least d_min layers, R = 0 or infinite; a gentle R may be added to the costs by the caller.
Among partitions of equal cost the one with the fewest stages is taken, then the one whose last boundary is
earliest, and so on backwards.

Symbols. L `layers`, K `stages` or from `min_stages` to `max_stages`, d_min `min_depth`, Q `costs`.
Cost: O(K L²) time, O(K L) memory; L = 48 with every K takes about 20 ms.
Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning"
§10.2.3, eq. 36. Costs from short trainings are in `stage_costs.py`.
Limits. The cost of a stage may not depend on where the other boundaries lie. For a trained network it does.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from topograd.errors import ConfigError, TopologyError, shown
from topograd.topology.composition import MAX_LAYERS, Composition, positive_int

Costs = Mapping[tuple[int, int], float]
"""Q: {(a, b): cost of a stage of layers a+1..b}."""


@dataclass(frozen=True)
class BestPartition:
    """The cheapest partition and what it costs."""

    composition: Composition
    cost: float


def best_partition(
    costs: Costs,
    layers: int,
    *,
    stages: int | None = None,
    min_stages: int = 1,
    max_stages: int | None = None,
    min_depth: int = 1,
) -> BestPartition:
    """The cheapest composition of `layers`; `stages` asks for exactly that many.

    >>> found = best_partition({(0, 1): 3.0, (1, 2): 1.0, (0, 2): 5.0}, 2)
    >>> str(found.composition), found.cost
    ('1,1', 4.0)
    """
    counts = stage_counts(layers, stages, min_stages, max_stages, min_depth)
    rows = _checked_costs(costs, layers, counts, min_depth)
    before: list[float] = [math.inf] * (layers + 1)
    before[0] = 0.0
    came_from: list[list[int]] = []
    best = (math.inf, 0)
    for m in range(1, counts.stop):
        now = [math.inf] * (layers + 1)
        origin = [0] * (layers + 1)
        for b in range(m * min_depth, layers + 1):
            for a in range((m - 1) * min_depth, b - min_depth + 1):
                total = before[a] + rows[a][b]
                if total < now[b]:
                    now[b], origin[b] = total, a
        came_from.append(origin)
        before = now
        if m in counts and now[layers] < best[0]:
            best = now[layers], m
    return BestPartition(_trace(came_from, layers, best[1]), best[0])


def stage_counts(
    layers: int, stages: int | None, min_stages: int, max_stages: int | None, min_depth: int
) -> range:
    """The numbers of stages that the request allows and L layers can have; never empty."""
    layers = positive_int(layers, "layers", MAX_LAYERS)
    min_depth = positive_int(min_depth, "min_depth")
    if stages is not None:
        if min_stages != 1 or max_stages is not None:
            raise ConfigError(setting="stages", given=stages, allowed="left out where a range is given")
        min_stages = max_stages = positive_int(stages, "stages")
    least = positive_int(min_stages, "min_stages")
    most = layers if max_stages is None else positive_int(max_stages, "max_stages")
    if least > most:
        raise ConfigError(setting="min_stages", given=least, allowed=f"at most max_stages, which is {most}")
    if least * min_depth > layers:
        each = "" if min_depth == 1 else f" of at least {min_depth} layers each"
        raise TopologyError(
            f"{least} stages{each} need {least * min_depth} layers and there are {layers}",
            setting="stages",
            given=least,
            remedy=f"ask for at most {layers // min_depth} stages, or for a smaller min_depth",
        )
    return range(least, min(most, layers // min_depth) + 1)


def parse_costs(values: object, layers: int) -> dict[tuple[int, int], float]:
    """Costs from JSON, {"a,b": cost of layers a+1..b, ...}."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            setting="costs", given=values, allowed='one JSON object {"0,1": 2.5, "0,2": 3, ...}'
        )
    costs = {}
    for key, value in values.items():
        ends = [int(part) if part.strip().isdecimal() else -1 for part in str(key).split(",")]
        if len(ends) != 2 or not 0 <= ends[0] < ends[1] <= layers:
            raise ConfigError(
                f"costs has the interval {shown(key)}",
                setting="costs",
                given=key,
                allowed=f'"a,b" with 0 <= a < b <= {layers}',
            )
        costs[ends[0], ends[1]] = _finite(ends[0], ends[1], value)
    return costs


def _checked_costs(costs: Costs, layers: int, counts: range, min_depth: int) -> list[list[float]]:
    """rows[a][b], infinite where no allowed partition has the stage a+1..b; a missing cost is named."""
    rows = [[math.inf] * (layers + 1) for _ in range(layers + 1)]
    missing = []
    for a in range(layers):
        for b in range(a + min_depth, layers + 1):
            if not _possible(a, b, layers, counts, min_depth):
                continue
            if (a, b) in costs:
                rows[a][b] = _finite(a, b, costs[a, b])
            else:
                missing.append((a, b))
    if missing:
        a, b = missing[0]
        more = f" and {len(missing) - 1} more intervals" if len(missing) > 1 else ""
        raise ConfigError(
            f'costs has no "{a},{b}"{more}', setting="costs", remedy="give a cost for every possible stage"
        )
    return rows


def _possible(a: int, b: int, layers: int, counts: range, min_depth: int) -> bool:
    """Whether some allowed partition has the stage a+1..b."""
    left, right = a // min_depth, (layers - b) // min_depth  # the most stages that fit on either side
    if (a and not left) or (b < layers and not right):
        return False
    fewest = bool(a) + 1 + bool(b < layers)
    return fewest <= counts[-1] and left + 1 + right >= counts[0]


def _finite(a: int, b: int, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(setting=f'costs["{a},{b}"]', given=value, allowed="a finite number")
    return float(value)


def _trace(came_from: list[list[int]], layers: int, stages: int) -> Composition:
    parts = []
    stop = layers
    for origin in reversed(came_from[:stages]):
        parts.append(stop - origin[stop])
        stop = origin[stop]
    return Composition.of(reversed(parts))
