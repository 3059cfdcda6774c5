"""Bubble fractions against a simulated schedule, and against the table of "Product of Experts" §4.2."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raising import refused
from topograd.errors import TopologyError
from topograd.topology.pipeline import backprop_bubble, pipeline_speedup, staged_bubble

# P, backprop %, stages %, speedup.
TABLE = [(6, 83, 14, 1.7), (12, 92, 8, 1.8), (24, 96, 4, 1.9), (96, 99, 1, 2.0)]


def backprop_slots(stages: int, batches: int) -> int:
    """Length of a step when a forward or a backward takes one slot, and backwards wait for later stages."""
    free = [0] * stages
    forward = [[0] * batches for _ in range(stages)]
    for i in range(batches):
        for k in range(stages):
            free[k] = forward[k][i] = max(free[k], forward[k - 1][i] if k else 0) + 1
    for i in range(batches):
        arrived = forward[-1][i]
        for k in reversed(range(stages)):
            free[k] = arrived = max(free[k], arrived) + 1
    return max(free)


def staged_slots(stages: int, batches: int) -> int:
    """The same when every stage runs its backward right after its forward."""
    free = [0] * stages
    for _ in range(batches):
        arrived = 0
        for k in range(stages):
            arrived = max(free[k], arrived) + 1
            free[k] = arrived + 1
    return max(free)


@pytest.mark.parametrize("stages", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("batches", [1, 2, 5, 16])
def test_the_formulas_are_exact_when_m_counts_slots(stages: int, batches: int) -> None:
    slots = 2 * batches  # a forward and a backward for each micro-batch
    backprop, staged = backprop_slots(stages, batches), staged_slots(stages, batches)
    assert math.isclose(backprop_bubble(stages, slots), 1 - slots / backprop, abs_tol=1e-15)
    assert math.isclose(staged_bubble(stages, slots), 1 - slots / staged, abs_tol=1e-15)
    assert math.isclose(pipeline_speedup(stages, slots), backprop / staged, rel_tol=1e-15)
    # Read as the number of micro-batches, M makes both bubbles too large, as the module says.
    if stages > 1:
        assert backprop_bubble(stages, batches) > 1 - slots / backprop
        assert staged_bubble(stages, batches) > 1 - slots / staged
    assert math.isclose(1 - slots / backprop, (stages - 1) / (batches + stages - 1), abs_tol=1e-15)


@pytest.mark.parametrize(("stages", "backprop", "staged", "speedup"), TABLE)
def test_the_papers_table(stages: int, backprop: int, staged: int, speedup: float) -> None:
    # The backprop and speedup columns are M = 2. The column for stages is not: it is 1/(P + 1), which the
    # formula gives at M = P(P - 1), another M in each row. At M = 2 the formula gives (P - 1)/(P + 1).
    assert round(100 * backprop_bubble(stages, 2)) == backprop
    assert round(pipeline_speedup(stages, 2), 1) == speedup
    assert round(100 * staged_bubble(stages, 2)) == {6: 71, 12: 85, 24: 92, 96: 98}[stages] != staged
    assert round(100 * staged_bubble(stages, stages * (stages - 1))) == staged
    assert math.isclose(staged_bubble(stages, stages * (stages - 1)), 1 / (stages + 1), rel_tol=1e-15)


def test_no_single_m_gives_the_papers_table() -> None:
    candidates = range(1, 20_000)
    for stages, backprop, staged, speedup in TABLE:
        by_backprop = {m for m in candidates if round(100 * backprop_bubble(stages, m)) == backprop}
        by_speedup = {m for m in candidates if round(pipeline_speedup(stages, m), 1) == speedup}
        by_stages = {m for m in candidates if round(100 * staged_bubble(stages, m)) == staged}
        assert 2 in by_backprop & by_speedup
        assert by_stages
        assert not by_stages & (by_backprop | by_speedup)
        if stages < 96:
            assert by_backprop == {2}


def test_appendix_b2_is_a_ratio_of_times() -> None:
    # "Net ratio" 0.93 at M = 16 and 0.99 at M = 32, for P = 4: it grows with M, so it is staged time over
    # backprop time, c / speedup, and one overhead c of the stages explains both to the digits printed.
    low = max((net - 0.005) * pipeline_speedup(4, m) for net, m in ((0.93, 16), (0.99, 32)))
    high = min((net + 0.005) * pipeline_speedup(4, m) for net, m in ((0.93, 16), (0.99, 32)))
    assert 1.07 < low < high < 1.085


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 500), st.integers(1, 10_000))
def test_shape_of_the_formulas(stages: int, microbatches: int) -> None:
    backprop, staged = backprop_bubble(stages, microbatches), staged_bubble(stages, microbatches)
    speedup = pipeline_speedup(stages, microbatches)
    assert 0 <= staged <= backprop < 1
    assert 1 <= speedup < 2
    assert math.isclose(speedup, (1 - staged) / (1 - backprop), rel_tol=1e-9)  # 1 - backprop cancels digits
    assert staged_bubble(stages + 1, microbatches) > staged
    assert backprop_bubble(stages + 1, microbatches) > backprop
    assert pipeline_speedup(stages + 1, microbatches) > speedup
    if stages == 1:
        assert (backprop, staged, speedup) == (0, 0, 1)
    else:
        assert staged_bubble(stages, microbatches + 1) < staged
        assert backprop_bubble(stages, microbatches + 1) < backprop


@pytest.mark.parametrize("bubble", [backprop_bubble, staged_bubble, pipeline_speedup])
@pytest.mark.parametrize(
    ("stages", "microbatches", "setting"),
    [
        (0, 1, "stages"),
        (-1, 1, "stages"),
        (4, 0, "microbatches"),
        (4, 2.0, "microbatches"),
        ("4", 2, "stages"),
        (True, 2, "stages"),
    ],
)
def test_bad_numbers_are_refused(
    bubble: Callable[[int, int], float], stages: int, microbatches: int, setting: str
) -> None:
    given = stages if setting == "stages" else microbatches
    with refused(TopologyError, setting=setting, given=given):
        bubble(stages, microbatches)
