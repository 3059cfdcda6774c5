"""Which backward to run: plain autograd, the three phases of Algorithm 1, or the hybrid schedule.

Statement. From the times of one region, the number of regions and the number of workers, take the schedule
whose simulated span is the shortest; of equal ones the simplest, in the order autograd, scan, hybrid.

The outcome, as long as a VJP takes no longer than the backward that contains it (`vjp <= local`):

- On one worker autograd always wins: the scan adds Jacobians and saves nothing.
- With a worker for each region the hybrid is never behind the other two, since it may carry the adjoint
  through all regions (then it is a backward in two parts, without Jacobians) or through the last one only.

Source: the event model of `timeline.py`, with its symbols and its limits. Cost: O(K²).
"""

from __future__ import annotations

from dataclasses import dataclass

from papers.latent_bounded_interfaces.timeline import ScheduleName, Timeline, Units, timeline
from topograd.runs.topology_config import Backward

_SCHEDULES: dict[Backward, ScheduleName] = {
    "autograd": "plain",
    "scan": "three_phase",
    "hybrid": "hybrid",
}
_ROUNDING = 1e-9  # a schedule must be better by more than this to displace a simpler one


@dataclass(frozen=True)
class EngineChoice:
    """The chosen engine, and why; `engines.Hybrid` takes `carried` as it is."""

    engine: Backward
    carried: int
    """Inner regions that hand the adjoint on by VJPs, if it is the hybrid."""
    span: float
    spans: dict[Backward, float]
    reason: str


def choose_engine(units: Units, regions: int, workers: int) -> EngineChoice:
    """Choose the backward with the shortest span on `workers` workers: 1, or one for each region.

    >>> choose_engine(Units(jacobian=16), regions=16, workers=1).reason
    'autograd: on one worker the span is the whole work, and the scan would take 5.8 times as long'
    >>> choose_engine(Units(jacobian=16), regions=16, workers=16).reason
    'hybrid: 8 regions carry the adjoint while 7 Jacobians finish; autograd would take 1.7 times as long'
    """
    runs = {name: timeline(schedule, units, regions, workers) for name, schedule in _SCHEDULES.items()}
    engine: Backward = "autograd"
    for name, run in runs.items():
        if run.span < runs[engine].span * (1 - _ROUNDING):
            engine = name
    chosen = runs[engine]
    return EngineChoice(
        engine=engine,
        carried=max(chosen.carried - 1, 0),  # the last region always does, in its own backward
        span=chosen.span,
        spans={name: run.span for name, run in runs.items()},
        reason=f"{engine}: {_why(engine, runs)}",
    )


def _why(engine: Backward, runs: dict[Backward, Timeline]) -> str:
    chosen = runs[engine]
    if engine == "autograd":
        return _why_autograd(chosen, runs["scan"].span / chosen.span)
    jacobians = sum(interval.kind == "jacobian" for interval in chosen.intervals)
    slower = f"autograd would take {runs['autograd'].span / chosen.span:.1f} times as long"
    if engine == "scan":
        return f"{jacobians} Jacobians at the same time and a scan; {slower}"
    if jacobians:
        return f"{chosen.carried} regions carry the adjoint while {jacobians} Jacobians finish; {slower}"
    return f"VJPs carry the adjoint all the way, sooner than a Jacobian would be ready; {slower}"


def _why_autograd(run: Timeline, ratio: float) -> str:
    if run.regions < 3:
        return "with fewer than 3 regions there is no Jacobian to scan"
    scan = f"the scan would take {ratio:.1f} times as long"
    if run.workers == 1:
        return f"on one worker the span is the whole work, and {scan}"
    return f"no other schedule is shorter; {scan}"
