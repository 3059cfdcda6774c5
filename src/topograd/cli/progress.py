"""Long work, as it goes: a bar on a terminal, otherwise a line every few seconds. Both on stderr."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from topograd.cli.console import note
from topograd.cli.main import INTERRUPTED

if TYPE_CHECKING:
    from topograd.training.trainer import OnStep, Reading

OnMore = Callable[[int, int], None]
"""Called with how much is done, and of how much."""
SECONDS_BETWEEN_LINES = 5.0
_SHOWN = 6  # losses; of more stages, the first and the last few


@contextmanager
def training_progress(
    title: str, tokens_per_step: int | None = None, unit: str = "tokens"
) -> Iterator[OnStep]:
    """Progress of a training: `with training_progress("staged") as on_step: ...`.

    The speed in tokens, or in another unit, is shown where `tokens_per_step` is given.
    """
    with trainings_progress([title], tokens_per_step, unit) as shown:
        yield shown[title]


@contextmanager
def trainings_progress(
    titles: Sequence[str], tokens_per_step: int | None = None, unit: str = "tokens"
) -> Iterator[dict[str, OnStep]]:
    """The same for several trainings that run at the same time, by title."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield {title: _Lines(console, title, tokens_per_step, unit) for title in titles}
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}", markup=False),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {title: progress.add_task(title, total=None, words="") for title in titles}
        yield {title: _Bar(progress, task, tokens_per_step, unit) for title, task in tasks.items()}


@contextmanager
def work_progress(title: str) -> Iterator[OnMore]:
    """Shows at once that work has begun, and how far it is as soon as that is known."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        note(title)
        yield counted(title)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None))
    with Progress(*columns, MofNCompleteColumn(), TimeRemainingColumn(compact=True), console=console) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def counted(what: str) -> OnMore:
    """A line every few seconds, with an estimate of what is left."""
    last = time.monotonic()
    begun: tuple[int, float] | None = None

    def on_more(done: int, total: int) -> None:
        nonlocal begun, last
        now = time.monotonic()
        begun = begun or (done, now)
        if now - last >= SECONDS_BETWEEN_LINES:
            last, rate = now, (done - begun[0]) / max(now - begun[1], 1e-9)
            left = f", {max(total - done, 0) / rate:.0f} s left" if rate > 0 and done < total else ""
            note(f"{what}: {done} of {total}{left}")

    return on_more


def counted_by_name() -> Callable[[str, int, int], None]:
    """The same for several works, each with a name."""
    lines: dict[str, OnMore] = {}
    return lambda what, done, total: lines.setdefault(what, counted(what))(done, total)


def say_how_to_resume(
    results: Mapping[str, Any],
    steps: int,
    again: str,
    stop_after: int | None = None,
    began: int | None = None,
) -> int:
    """Name the command that continues a training that is not finished; returns the exit code.

    `began` is the step at which it was taken up.
    """
    if results["finished"]:
        return 0
    where = f"step {results['steps']} of {steps}"
    if stop_after is not None and began == results["steps"]:
        note(
            f"nothing was trained: it is at {where} already, and --stop-after is {stop_after}; "
            f"continue with: {again}"
        )
    else:
        note(f"stopped and saved at {where}; continue with: {again}")
    return 0 if results["steps"] >= min(stop_after or steps, steps) else INTERRUPTED


class _Speed:
    """Steps per second since the first step that was seen."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def __call__(self, step: int) -> float | None:
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
        since, began = self._first
        return (step - since) / (now - began) if step > since and now > began else None


class _Bar:
    def __init__(self, progress: Progress, task: TaskID, tokens: int | None, unit: str) -> None:
        self._progress, self._task, self._tokens, self._unit = progress, task, tokens, unit
        self._speed = _Speed()
        self._bpb = ""

    def __call__(self, step: int, steps: int, losses: list[float], readings: Reading | None) -> None:
        if readings is not None:
            self._bpb = f"  {readings.words}"
        speed = _per_second(self._speed(step), self._tokens, self._unit)
        words = f"loss {_losses(losses)}{self._bpb}{'  ' if speed else ''}{speed}"
        self._progress.update(self._task, completed=step, total=steps, words=words)


class _Lines:
    def __init__(self, console: Console, title: str, tokens: int | None, unit: str) -> None:
        self._console, self._title, self._tokens, self._unit = console, title, tokens, unit
        self._speed = _Speed()
        self._last = time.monotonic()

    def __call__(self, step: int, steps: int, losses: list[float], readings: Reading | None) -> None:
        rate = self._speed(step)
        now = time.monotonic()
        if readings is None and step < steps and now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        parts = [f"{self._title}: step {step}/{steps}", f"loss {_losses(losses)}"]
        if readings is not None:
            parts.append(readings.words)
        parts.append(_per_second(rate, self._tokens, self._unit))
        if rate and step < steps:
            parts.append(f"{(steps - step) / rate:.0f} s left")
        self._console.print(", ".join(filter(None, parts)), soft_wrap=True, markup=False)


def _per_second(rate: float | None, units: int | None, unit: str) -> str:
    return f"{rate * units:,.0f} {unit}/s" if rate and units else ""


def _losses(losses: list[float]) -> str:
    shown = ["-" if math.isnan(loss) else f"{loss:.3f}" for loss in losses]  # a frozen stage has none
    if len(shown) > _SHOWN:
        shown[_SHOWN // 2 : -_SHOWN // 2] = ["…"]
    return " ".join(shown)
