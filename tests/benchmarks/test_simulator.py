"""The simulator against what can be worked out by hand."""

from dataclasses import replace

import pytest

from simulator import METHODS, Machine, Times, Work, goodput, simulate, simulate_step
from topograd.errors import ConfigError

FAST = Machine(mbit=1e12, latency=0.0)
UNITS = Times(forward=1, backward=2, head=0, embed=0, optimizer=0)
EVEN = Work(microbatches=8, shared=0.0, head=0.0, times=UNITS, machine=FAST)


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_on_a_free_wire_bubbles_are_the_textbook_ones(ranks: int) -> None:
    P, M = ranks, EVEN.microbatches
    for name in ("gpipe", "1f1b"):
        step = simulate_step(name, P, EVEN)
        assert step.seconds == pytest.approx(3 * (M + P - 1))
        assert step.bubble == pytest.approx((P - 1) / (M + P - 1))
    staged = simulate_step("staged", P, EVEN)
    assert staged.seconds == pytest.approx(3 * M + (P - 1))  # only forwards fill the pipeline
    assert simulate_step("free", P, EVEN).bubble == pytest.approx(0)
    assert simulate_step("data", P, EVEN).throughput == pytest.approx(
        P / (3 * P)
    )  # a rank has all the stages


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_gradient_that_is_late_is_waited_for_by_nobody(ranks: int) -> None:
    P, M = ranks, EVEN.microbatches
    exact = replace(EVEN, times=replace(UNITS, rounding=0, copies=0))
    assert simulate_step("whole", P, exact).seconds == simulate_step("1f1b", P, exact).seconds
    assert simulate_step("late", P, exact).seconds == pytest.approx(3 * M + (P - 1))
    assert simulate_step("late", P, exact).memory == (P - 1) * M + 1, (
        "the first rank keeps what is not learned"
    )
    priced = replace(EVEN, times=replace(UNITS, rounding=1, copies=5))
    extra = M * (P - 1) / P
    assert simulate_step("thin", P, priced).seconds >= simulate_step("whole", P, priced).seconds + extra
    late = simulate_step("thin-late", P, priced).seconds
    assert late == pytest.approx(3 * M + (P - 1) + extra + (5 if P > 1 else 0))


def test_bits_are_saved_on_the_way_back_alone() -> None:
    slow = replace(EVEN, message=1e6, thin=125e3, machine=Machine(mbit=0.8, latency=0.0))
    slow = replace(slow, times=replace(UNITS, rounding=0, copies=0))
    # ten seconds a message forward, and the last one's gradient comes back
    assert simulate_step("late", 2, slow).seconds == pytest.approx(1 + 8 * 10 + 3 + 10)
    assert simulate_step("thin-late", 2, slow).seconds == pytest.approx(1 + 8 * 10 + 3 + 1.25)
    assert simulate_step("thin", 2, slow).seconds < simulate_step("whole", 2, slow).seconds
    assert simulate_step("thin", 2, slow).bytes == 8 * (1e6 + 125e3)
    far = replace(slow, message=0.0, thin=0.0, machine=Machine(mbit=1e12, latency=7.0))
    # the first message, the last gradient, and the meeting at the end
    assert simulate_step("late", 2, far).seconds == pytest.approx(7 + 1 + 8 * 3 + 7 + 7)
    assert simulate_step("thin", 2, far).seconds > 3 * simulate_step("late", 2, far).seconds / 2


def test_a_slow_wire_costs_backprop_both_ways() -> None:
    slow = replace(EVEN, message=1e6, machine=Machine(mbit=0.8, latency=0.0))  # ten seconds a message
    assert simulate_step("staged", 2, slow).seconds == pytest.approx(1 + 8 * 10 + 3)
    assert simulate_step("free", 2, slow).seconds == pytest.approx(80)
    assert simulate_step("gpipe", 2, slow).seconds > 1.9 * simulate_step("staged", 2, slow).seconds
    assert simulate_step("1f1b", 2, slow).bytes == 2 * simulate_step("staged", 2, slow).bytes


def test_one_rank_is_one_rank() -> None:
    for name in ("gpipe", "1f1b", "whole", "thin-late", "staged", "free", "data"):
        step = simulate_step(name, 1, EVEN)
        assert step.speedup == pytest.approx(1)
        assert step.bytes == 0


def test_fewer_cores_than_ranks_slow_them_down() -> None:
    shared = replace(EVEN, machine=replace(FAST, cores=2))
    assert simulate_step("free", 4, shared).seconds == pytest.approx(
        2 * simulate_step("free", 4, EVEN).seconds
    )
    # bubbles are filled, but where one rank alone can run: the first F, the last F, the first B, the last B
    assert simulate_step("gpipe", 4, shared).seconds == pytest.approx((4 * 8 * 3 + 1 + 1 + 2 + 2) / 2)
    alone = replace(EVEN, machine=replace(FAST, cores=1))
    assert simulate_step("gpipe", 4, alone).seconds == pytest.approx(4 * 8 * 3)
    crowd = replace(EVEN, machine=replace(FAST, cores=2))
    assert simulate_step("1f1b", 64, crowd).seconds == pytest.approx(64 * 8 * 3 / 2), "by its work alone"


def test_a_job_that_must_be_whole_fails_with_any_of_its_ranks() -> None:
    machine = Machine(mtbf=1e6, restart=100, save=5)
    whole = [goodput("1f1b", ranks, machine)["whole"] for ranks in (1, 32, 1024)]
    assert whole == sorted(whole, reverse=True)
    assert goodput("free", 1024, machine)["replay"] == goodput("free", 1, machine)["replay"] > whole[-1]
    assert goodput("free", 64, machine)["wait"] > goodput("1f1b", 64, machine)["whole"]


def test_a_table_up_to_many_ranks() -> None:
    found = simulate(1024, Work())
    assert set(found["methods"]) == set(METHODS)
    assert [row["ranks"] for row in found["methods"]["staged"]] == [2**k for k in range(11)]
    assert [row["ranks"] for row in simulate(6, Work())["methods"]["data"]] == [1, 2, 4, 6]
    with pytest.raises(ConfigError, match="ranks is 0"):
        simulate(0, Work())
    with pytest.raises(ConfigError, match="unknown"):
        simulate_step("magic", 2, Work())
