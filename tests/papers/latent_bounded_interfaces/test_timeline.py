"""The event model: the table of spans, their closed forms, and the rules that every run keeps."""

import math
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papers.latent_bounded_interfaces.timeline import (
    Key,
    ScheduleName,
    Task,
    Timeline,
    Units,
    break_even,
    simulate,
    timeline,
)
from raising import refused
from topograd.errors import ConfigError, TopologyError

NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
TIMES = st.floats(0.1, 40.0)
UNITS = st.builds(Units, forward=TIMES, local=TIMES, vjp=TIMES, jacobian=TIMES)

# r, K, then the spans of plain, split, Algorithm 1, Algorithm 2 and hybrid; a Jacobian costs r forwards.
SPANS = [
    (16, 6, (17.4, 13.4, 23.9, 22.9, 13.4)),
    (16, 16, (46.4, 34.4, 33.9, 32.9, 26.7)),
    (16, 32, (92.8, 68.0, 49.9, 48.9, 42.7)),
    (8, 16, (46.4, 34.4, 25.9, 24.9, 22.3)),
    (8, 32, (92.8, 68.0, 41.9, 40.9, 38.3)),
]


@pytest.mark.parametrize(("rank", "regions", "spans"), SPANS)
def test_spans_with_a_worker_for_each_region(rank: int, regions: int, spans: tuple[float, ...]) -> None:
    units = Units(jacobian=rank)
    assert [timeline(name, units, regions).span for name in NAMES] == pytest.approx(spans)


def test_the_published_configuration_loses_with_free_workers() -> None:
    plain, overlapped = (timeline(name, Units(jacobian=16), 6) for name in ("plain", "overlapped"))
    assert round(plain.span / overlapped.span, 2) == 0.76


@settings(max_examples=25, deadline=None)
@given(units=UNITS, regions=st.integers(3, 12))
def test_spans_have_closed_forms(units: Units, regions: int) -> None:
    F, local, v, J = units.forward, units.local, units.vjp, units.jacobian
    K = regions
    forms = {
        "plain": K * (F + local),
        "split": K * F + (K - 1) * v + local,
        "three_phase": K * F + max(J, local) + local,
        "overlapped": max(K * F + local, (K - 1) * F + J) + local,
        "hybrid": min(
            K * F + (K - 1) * v + local,
            *(max(K * F + h * v, (K - h) * F + J) + local for h in range(1, K - 1)),
        ),
    }
    for name in NAMES:
        assert timeline(name, units, K).span == pytest.approx(forms[name]), name


@settings(max_examples=25, deadline=None)
@given(units=UNITS, regions=st.integers(1, 9), name=st.sampled_from(NAMES), each_has_a_worker=st.booleans())
def test_a_run_keeps_the_rules(
    units: Units, regions: int, name: ScheduleName, each_has_a_worker: bool
) -> None:
    run = timeline(name, units, regions, regions if each_has_a_worker else 1)
    ends = {(i.kind, i.region): i.end for i in run.intervals}
    starts = {(i.kind, i.region): i.start for i in run.intervals}
    assert len(ends) == len(run.intervals)
    for worker in range(run.workers):  # a worker does one thing at a time
        own = sorted((i.start, i.end) for i in run.intervals if i.worker == worker)
        assert all(end <= start for (_, end), (start, _) in pairwise(own))
    for k in range(regions):
        assert k == 0 or starts["forward", k] >= ends["forward", k - 1]
        backward = starts["local", k] if ("local", k) in ends else starts["vjp", k]
        assert backward >= ends["forward", regions - 1]  # no adjoint before the loss
        assert ("local", k) in ends or ("weights", k) in ends  # every region's parameters get gradients
        if ("vjp", k) in ends:
            assert starts["weights", k] >= ends["vjp", k]
    _check_adjoints_arrive_in_time(run, starts, ends)
    assert run.span == max(ends.values())
    assert run.work == pytest.approx(sum(i.end - i.start for i in run.intervals))


def _check_adjoints_arrive_in_time(run: Timeline, starts: dict[Key, float], ends: dict[Key, float]) -> None:
    """Walk from the loss to the front: when can the adjoint behind region k be known at the earliest?"""
    known, last = 0.0, run.regions - 1
    for k in reversed(range(run.regions)):
        first: Key = ("vjp", k) if ("vjp", k) in starts else ("local", k)
        assert starts[first] >= known or math.isclose(starts[first], known)
        if first[0] == "vjp":
            known = max(known, ends[first])
        elif 0 < k < last and ("jacobian", k) in ends:
            known = max(known, ends["jacobian", k])
        else:
            known = max(known, ends["local", k])


@settings(max_examples=25, deadline=None)
@given(units=UNITS, regions=st.integers(1, 9), name=st.sampled_from(NAMES))
def test_one_worker_is_serial_and_never_beats_plain_autograd(
    units: Units, regions: int, name: ScheduleName
) -> None:
    run = timeline(name, units, regions, workers=1)
    assert run.span == pytest.approx(run.work)
    assert {i.worker for i in run.intervals} == {0}
    assert run.span >= timeline("plain", units, regions, workers=1).span * (1 - 1e-12)


def test_work_counts_only_the_jacobians_that_somebody_reads() -> None:
    units = Units(jacobian=16)
    for name in ("three_phase", "overlapped"):
        run = timeline(name, units, 6)
        assert [i.region for i in run.intervals if i.kind == "jacobian"] == [1, 2, 3, 4]
        assert run.work == pytest.approx(6 * 2.9 + 4 * 16)
    hybrid = timeline("hybrid", units, 16)
    assert hybrid.carried == 8
    assert sorted(i.region for i in hybrid.intervals if i.kind == "vjp") == list(range(8, 16))
    assert [i.region for i in hybrid.intervals if i.kind == "jacobian"] == list(range(1, 8))
    assert hybrid.work == pytest.approx(16 * 2.9 + 7 * 16)


def test_of_equal_hybrids_the_one_with_fewest_jacobians() -> None:
    # With K = 4, h = 3 carries the adjoint until 4 + 3 = 7, and h = 2 waits for a Jacobian until 2 + 5 = 7.
    run = timeline("hybrid", Units(local=1.0, vjp=1.0, jacobian=5.0), 4)
    assert (run.span, run.carried) == (8.0, 3)


@settings(max_examples=25, deadline=None)
@given(units=UNITS)
def test_break_even_is_where_algorithm_1_starts_to_win(units: Units) -> None:
    first = break_even(units)
    if first > 200:  # a Jacobian of 40 and a backward of 0.1
        first = 200
    for regions in {1, 2, 3, first - 1, first, first + 1}:
        plain, scanned = (timeline(name, units, regions).span for name in ("plain", "three_phase"))
        wins = scanned < plain * (1 - 1e-12)
        assert wins == (regions >= break_even(units)), regions


def test_break_even_against_the_split_backward() -> None:
    assert [break_even(Units(jacobian=r)) for r in (8, 16, 32)] == [6, 10, 18]
    assert break_even(Units(local=2.0, jacobian=6.0)) == 5  # K = 4 is a tie
    wins = [
        timeline("three_phase", Units(jacobian=16), K).span < timeline("split", Units(jacobian=16), K).span
        for K in range(3, 20)
    ]
    assert wins.index(True) + 3 == 16
    assert all(wins[13:])


@settings(max_examples=25, deadline=None)
@given(units=UNITS, regions=st.integers(1, 12))
def test_the_forward_bounds_every_speedup(units: Units, regions: int) -> None:
    plain = timeline("plain", units, regions).span
    for name in NAMES:
        assert plain / timeline(name, units, regions).span < (units.forward + units.local) / units.forward
    assert timeline("hybrid", units, regions).span <= timeline("split", units, regions).span * (1 + 1e-12)


def test_a_small_graph_by_hand() -> None:
    tasks = [
        Task("forward", 0, 2.0),
        Task("forward", 1, 3.0, (("forward", 0),)),
        Task("local", 0, 4.0, (("forward", 0),)),
        Task("local", 1, 1.0, (("local", 0),)),
    ]
    assert [(i.start, i.end) for i in simulate(tasks, workers=2)] == [(0, 2), (2, 5), (2, 6), (6, 7)]
    assert [(i.start, i.end) for i in simulate(tasks, workers=1)] == [(0, 2), (2, 5), (5, 9), (9, 10)]


def test_bad_input_is_one_clear_line() -> None:
    units = Units(jacobian=16)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with refused(ConfigError, setting="jacobian"):
            Units(jacobian=bad)
    with refused(ConfigError, setting="workers", given=3):
        timeline("plain", units, 6, workers=3)
    with refused(ConfigError, setting="schedule", given="gpipe"):
        timeline("gpipe", units, 6)  # type: ignore[arg-type]
    with refused(TopologyError, setting="the number of regions", given=0):
        timeline("plain", units, 0)
