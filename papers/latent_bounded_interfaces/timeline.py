"""How long a step takes when every region has a worker: task graphs of five schedules, and an event model.

Statement. A task has a region, a duration and the tasks that it waits for. A worker runs its tasks in the
order in which the schedule lists them, each as soon as the worker is free and what it waits for is done. The
span is the end of the last task; the work is the sum of the durations. With K workers region k lives on
worker k; with one worker everything is serial, and the span is the work.

    plain           forwards 0 .. K-1, then whole backwards K-1 .. 0, each after the one behind it
    split           backwards in two: the input's VJP hands the adjoint on, the parameters' part follows
    three_phase     Algorithm 1: all forwards, all Jacobians, the scan, all local backwards
    overlapped      Algorithm 2: a Jacobian starts as soon as its region's forward is done
    hybrid          overlapped, but the last h regions hand the adjoint on by VJPs while the others' Jacobians
                    finish; the scan starts from there. h is the best one

A Jacobian is needed only for regions 1 .. K-2: the last region has its adjoint from the loss in its own
backward, and nothing lies in front of region 0. Algorithm 1 beats plain backprop only where

    (K - 1) local > max(jacobian, local),      mostly K > 1 + jacobian / local      (`break_even`)

Symbols and units. K `regions`, h `carried`, times of one region as multiples of anything (`Units`). Measured
on a CPU: forward 1, local backward 1.9, an input's VJP 1.1, a Jacobian r for an interface of width r.
Cost: O(K) tasks for a schedule; hybrid simulates each h, O(K²).

Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces" §3.3 (Algorithm 1) and Appendix C
(Algorithm 2). The hybrid schedule is not in the source. It is as exact as they are: a VJP and a product with
the Jacobian are the same linear map.

Limits. Every region costs the same, communication and the scan cost nothing, one step has one micro-batch,
and a backward in two parts costs no more than a whole one. Algorithm 2's overlap saves one forward and no
more: the Jacobian of region K-2 can start only when its forward is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from topograd.errors import ConfigError
from topograd.topology.composition import positive_int

Kind = Literal["forward", "jacobian", "vjp", "weights", "local", "scan"]
Key = tuple[Kind, int]  # a kind of task and its region; the scan is with the last Jacobian
ScheduleName = Literal["plain", "split", "three_phase", "overlapped", "hybrid"]
_ROUNDING = 1e-12  # two spans that differ by less are equal


@dataclass(frozen=True, kw_only=True)
class Units:
    """Times of one region, all in the same unit."""

    forward: float = 1.0
    local: float = 1.9
    """The whole backward of a region: gradients of its parameters and of its input."""
    vjp: float = 1.1
    """The part of the backward that hands the adjoint to the region in front."""
    jacobian: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(
                    f"Units.{field.name} is {value}",
                    setting=field.name,
                    given=value,
                    remedy="give a finite time above 0",
                )

    @property
    def weights(self) -> float:
        """The rest of a local backward after its VJP; 0 where noise has measured the VJP as the longer."""
        return max(0.0, self.local - self.vjp)


@dataclass(frozen=True)
class Task:
    """Something that one region does, and what it waits for."""

    kind: Kind
    region: int
    duration: float
    needs: tuple[Key, ...] = ()

    @property
    def key(self) -> Key:
        return self.kind, self.region


@dataclass(frozen=True)
class Interval:
    """A task as it ran."""

    kind: Kind
    region: int
    worker: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step. `carried` is the h of a hybrid schedule, 0 elsewhere."""

    schedule: ScheduleName
    regions: int
    workers: int
    carried: int
    intervals: tuple[Interval, ...]
    span: float
    work: float


def timeline(schedule: ScheduleName, units: Units, regions: int, workers: int | None = None) -> Timeline:
    """Simulate one step on `workers` workers: 1, or one for each region (the default).

    >>> round(timeline("three_phase", Units(jacobian=16), regions=6).span, 1)
    23.9
    """
    regions = positive_int(regions, "the number of regions")
    workers = regions if workers is None else workers
    if workers not in (1, regions):
        raise ConfigError(
            f"{workers} workers were given for {regions} regions",
            setting="workers",
            given=workers,
            remedy="give 1, or one for each region",
        )
    if schedule == "hybrid":
        return _best_hybrid(units, regions, workers)
    if schedule not in _TASKS:
        raise ConfigError(
            f"there is no schedule {schedule!r}",
            setting="schedule",
            given=schedule,
            remedy=f"choose one of {', '.join(_TASKS)} or hybrid",
        )
    return _run(schedule, _TASKS[schedule](units, regions), regions, workers)


def break_even(units: Units) -> int:
    """The smallest number of regions for which Algorithm 1, with as many workers, beats plain backprop.

    >>> [break_even(Units(jacobian=r)) for r in (8, 16, 32)]
    [6, 10, 18]
    """
    return 2 + math.floor(max(units.jacobian / units.local, 1.0) * (1 + _ROUNDING))


def simulate(tasks: list[Task], workers: int) -> tuple[Interval, ...]:
    """Run tasks, listed after everything that they wait for; region k is on worker k modulo `workers`."""
    free = [0.0] * workers
    done: dict[Key, float] = {}
    intervals = []
    for task in tasks:
        worker = task.region % workers
        start = max([free[worker], *(done[key] for key in task.needs)])
        free[worker] = done[task.key] = start + task.duration
        intervals.append(Interval(task.kind, task.region, worker, start, free[worker]))
    return tuple(intervals)


def _run(schedule: ScheduleName, tasks: list[Task], regions: int, workers: int, carried: int = 0) -> Timeline:
    intervals = simulate(tasks, workers)
    span = max(interval.end for interval in intervals)
    work = math.fsum(task.duration for task in tasks)
    return Timeline(schedule, regions, workers, carried, intervals, span, work)


def _best_hybrid(units: Units, regions: int, workers: int) -> Timeline:
    """The hybrid of the shortest span; of equal ones that with the fewest Jacobians."""
    best: Timeline | None = None
    for carried in range(regions - 1, 0, -1) or (0,):
        run = _run("hybrid", _hybrid(units, regions, carried), regions, workers, carried)
        if best is None or run.span < best.span * (1 - _ROUNDING):
            best = run
    assert best is not None
    return best


def _forwards(units: Units, regions: int) -> list[Task]:
    return [Task("forward", k, units.forward, (("forward", k - 1),) if k else ()) for k in range(regions)]


def _plain(units: Units, regions: int) -> list[Task]:
    last = regions - 1
    tasks = [*_forwards(units, regions), Task("local", last, units.local, (("forward", last),))]
    return tasks + [Task("local", k, units.local, (("local", k + 1),)) for k in reversed(range(last))]


def _carry(units: Units, regions: int, carried: int) -> list[Task]:
    """The last h regions: the VJPs one after the other, each region's other half behind its own."""
    last = regions - 1
    tasks = []
    for k in range(last, last - carried, -1):
        behind: Key = ("forward", last) if k == last else ("vjp", k + 1)
        tasks += [Task("vjp", k, units.vjp, (behind,)), Task("weights", k, units.weights, (("vjp", k),))]
    return tasks


def _split(units: Units, regions: int) -> list[Task]:
    """Region 0 hands nothing on: its backward is whole."""
    before: Key = ("vjp", 1) if regions > 1 else ("forward", 0)
    tasks = _forwards(units, regions) + _carry(units, regions, regions - 1)
    return [*tasks, Task("local", 0, units.local, (before,))]


def _three_phase(units: Units, regions: int) -> list[Task]:
    """Phase 1 holds the Jacobians and the last region's own backward, which gives the adjoint to scan."""
    return _scanned(units, regions, jacobian_after=lambda k: ("forward", regions - 1))


def _overlapped(units: Units, regions: int) -> list[Task]:
    return _scanned(units, regions, jacobian_after=lambda k: ("forward", k))


def _scanned(units: Units, regions: int, jacobian_after: Callable[[int], Key]) -> list[Task]:
    last = regions - 1
    jacobians = [Task("jacobian", k, units.jacobian, (jacobian_after(k),)) for k in range(1, last)]
    terminal = Task("local", last, units.local, (("forward", last),))
    tasks = [*_forwards(units, regions), *jacobians, terminal]
    return tasks + _scan_and_local(units, last, (terminal.key, *(task.key for task in jacobians)))


def _hybrid(units: Units, regions: int, carried: int) -> list[Task]:
    first = regions - carried  # the first region that hands its adjoint on by a VJP
    if first < 2:
        return _split(units, regions)
    jacobians = [Task("jacobian", k, units.jacobian, (("forward", k),)) for k in range(1, first)]
    tasks = [*_forwards(units, regions), *jacobians, *_carry(units, regions, carried)]
    return tasks + _scan_and_local(units, first, (("vjp", first), *(task.key for task in jacobians)))


def _scan_and_local(units: Units, below: int, needs: tuple[Key, ...]) -> list[Task]:
    """The scan, and then the local backward of every region before `below`."""
    if below == 0:
        return []
    scan = Task("scan", below - 1, 0.0, needs)
    return [scan, *(Task("local", k, units.local, (scan.key,)) for k in range(below))]


_TASKS: dict[ScheduleName, Callable[[Units, int], list[Task]]] = {
    "plain": _plain,
    "split": _split,
    "three_phase": _three_phase,
    "overlapped": _overlapped,
}
