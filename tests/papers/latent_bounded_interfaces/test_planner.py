"""The planner picks the shortest span, says why, and knows that one worker gains nothing from a scan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papers.latent_bounded_interfaces.planner import choose_engine
from papers.latent_bounded_interfaces.timeline import Units, timeline
from raising import refused
from topograd.errors import ConfigError, TopologyError

TIMES = st.floats(0.1, 40.0)
UNITS = st.builds(Units, forward=TIMES, local=TIMES, vjp=TIMES, jacobian=TIMES)


@settings(max_examples=25, deadline=None)
@given(units=UNITS, regions=st.integers(1, 12))
def test_one_worker_always_runs_autograd(units: Units, regions: int) -> None:
    chosen = choose_engine(units, regions, workers=1)
    assert chosen.engine == "autograd"
    assert chosen.span == pytest.approx(regions * (units.forward + units.local))
    extra = max(0, regions - 2) * units.jacobian
    assert chosen.spans["scan"] == pytest.approx(chosen.span + extra)


@settings(max_examples=25, deadline=None)
@given(units=UNITS, regions=st.integers(1, 12))
def test_with_all_workers_the_shortest_span_wins(units: Units, regions: int) -> None:
    chosen = choose_engine(units, regions, workers=regions)
    expected = {
        "autograd": timeline("plain", units, regions).span,
        "scan": timeline("three_phase", units, regions).span,
        "hybrid": timeline("hybrid", units, regions).span,
    }
    assert chosen.spans == expected
    assert chosen.span == pytest.approx(min(expected.values()))
    assert chosen.span == expected[chosen.engine]
    if units.vjp <= units.local:
        assert expected["hybrid"] <= min(expected.values()) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("rank", "regions", "carried", "span", "reason"),
    [
        (16, 16, 8, 26.7, "8 regions carry the adjoint while 7 Jacobians finish; autograd would take 1.7"),
        (8, 32, 4, 38.3, "4 regions carry the adjoint while 27 Jacobians finish; autograd would take 2.4"),
        (
            16,
            6,
            5,
            13.4,
            "VJPs carry the adjoint all the way, sooner than a Jacobian would be ready; autograd",
        ),
    ],
)
def test_the_hybrid_and_its_reason(rank: int, regions: int, carried: int, span: float, reason: str) -> None:
    chosen = choose_engine(Units(jacobian=rank), regions, workers=regions)
    assert (chosen.engine, chosen.carried) == ("hybrid", carried - 1)
    assert chosen.span == pytest.approx(span)
    assert chosen.reason.startswith(f"hybrid: {reason}")


def test_the_three_phases_win_where_a_vjp_costs_more_than_everything_else() -> None:
    # Not a real region: a VJP is a part of the local backward. At equal times the simpler schedule is kept.
    slow_vjp = choose_engine(Units(local=1.0, vjp=3.0, jacobian=0.5), 6, workers=6)
    assert (slow_vjp.engine, slow_vjp.carried) == ("scan", 0)
    assert (
        slow_vjp.reason
        == "scan: 4 Jacobians at the same time and a scan; autograd would take 1.5 times as long"
    )
    tie = choose_engine(Units(local=1.0, vjp=1.0, jacobian=1.0), 6, workers=6)
    assert tie.spans["scan"] == tie.spans["hybrid"] == 8.0
    assert tie.engine == "scan"


def test_autograd_and_its_reasons() -> None:
    serial = choose_engine(Units(jacobian=16), 6, workers=1)
    assert serial.reason == (
        "autograd: on one worker the span is the whole work, and the scan would take 4.7 times as long"
    )
    assert serial.spans["scan"] / serial.span == pytest.approx(4.68, abs=5e-3)
    short = choose_engine(Units(jacobian=16), 2, workers=1)
    assert short.reason == "autograd: with fewer than 3 regions there is no Jacobian to scan"
    slow = choose_engine(Units(local=1.0, vjp=30.0, jacobian=30.0), 4, workers=4)
    assert slow.reason == "autograd: no other schedule is shorter; the scan would take 4.4 times as long"


def test_bad_input_is_one_clear_line() -> None:
    with refused(ConfigError, setting="workers", given=4):
        choose_engine(Units(jacobian=16), 6, workers=4)
    with refused(TopologyError, setting="the number of regions", given=0):
        choose_engine(Units(jacobian=16), 0, workers=1)
