import itertools
import random

import pytest

from raising import refused
from tests.oracles.partitions import cheapest_by_trying
from topograd.errors import ConfigError
from topograd.search.dynamic import best_partition, parse_costs


def random_costs(layers: int, seed: int) -> dict[tuple[int, int], float]:
    draw = random.Random(seed)
    return {(a, b): draw.uniform(-1, 3) for a in range(layers) for b in range(a + 1, layers + 1)}


@pytest.mark.parametrize("layers", [1, 2, 5, 8])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_agrees_with_trying_all(layers: int, seed: int) -> None:
    costs = random_costs(layers, seed)
    for min_depth in range(1, layers + 1):
        most = layers // min_depth
        for low in range(1, most + 1):
            for high in range(low, most + 1):
                found = best_partition(costs, layers, min_stages=low, max_stages=high, min_depth=min_depth)
                expected = cheapest_by_trying(costs, layers, range(low, high + 1), min_depth)
                assert (found.composition, found.cost) == expected
        exact = best_partition(costs, layers, stages=most, min_depth=min_depth)
        assert exact.composition.stages == most


def test_of_equal_costs_the_fewest_stages_win() -> None:
    costs = {(a, b): float(b - a) for a in range(4) for b in range(a + 1, 5)}
    assert best_partition(costs, 4).composition.parts == (4,)
    assert best_partition(costs, 4, stages=2).composition.parts == (1, 3)


def test_only_the_costs_of_possible_stages_are_needed() -> None:
    found = best_partition({(0, 2): 1.0, (2, 4): 1.0}, 4, stages=2, min_depth=2)
    assert found.composition.parts == (2, 2)
    assert best_partition({(0, 4): 2.5}, 4, stages=1).cost == 2.5


class Counted(dict[tuple[int, int], float]):
    """Costs that count how often they are read."""

    reads = 0

    def __getitem__(self, stage: tuple[int, int]) -> float:
        self.reads += 1
        return super().__getitem__(stage)


def test_48_layers_read_each_cost_once_and_no_boundary_is_better_elsewhere() -> None:
    """2^47 partitions cannot be tried."""
    costs = Counted(random_costs(48, 0))
    found = best_partition(costs, 48)
    assert costs.reads == 48 * 49 // 2
    ends = list(itertools.accumulate(found.composition.parts, initial=0))
    assert found.cost == pytest.approx(sum(costs[stage] for stage in itertools.pairwise(ends)))
    for low, here, high in zip(ends, ends[1:], ends[2:], strict=False):
        own = costs[low, here] + costs[here, high]
        assert own <= min(costs[low, x] + costs[x, high] for x in range(low + 1, high))
        assert own <= costs[low, high]


@pytest.mark.parametrize(
    ("request_", "setting"),
    [
        ({"stages": 5}, "stages"),
        ({"stages": 2, "min_depth": 3}, "stages"),
        ({"min_depth": 5}, "stages"),
        ({"min_stages": 3, "max_stages": 2}, "min_stages"),
        ({"stages": 2, "max_stages": 3}, "stages"),
        ({"stages": 0}, "stages"),
    ],
)
def test_impossible_requests(request_: dict[str, int], setting: str) -> None:
    with refused(ValueError, setting=setting):
        best_partition(random_costs(4, 0), 4, **request_)


def test_missing_and_bad_costs_are_named() -> None:
    costs = random_costs(4, 0)
    del costs[1, 3], costs[0, 2]
    with refused(ConfigError, setting="costs"):
        best_partition(costs, 4)
    with refused(ConfigError, setting='costs["0,1"]'):
        best_partition({(0, 1): float("inf")}, 1)


def test_costs_from_json() -> None:
    assert parse_costs({"0,1": 2, " 1 , 2": 0.5}, 2) == {(0, 1): 2.0, (1, 2): 0.5}
    for key in ("0", "1,0", "0,3", "a,b", "0,1,2", "-1,1"):
        with refused(ConfigError, setting="costs"):
            parse_costs({key: 1.0}, 2)
    for value in ("1", None, True, float("nan")):
        with refused(ConfigError, setting='costs["0,1"]'):
            parse_costs({"0,1": value}, 2)
    with refused(ConfigError, setting="costs"):
        parse_costs([1, 2], 2)
