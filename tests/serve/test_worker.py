"""The model's thread: jobs in, progress out on the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from topograd.serve import worker as module
from topograd.serve.worker import Inbox, Worker


async def _all(worker: Worker, desk: Any, texts: int) -> list[tuple[int, str | None]]:
    worker.start(asyncio.get_running_loop())
    inbox: Inbox = asyncio.Queue()
    jobs = [desk.job([100 + k], 3) for k in range(texts)]
    for index, job in enumerate(jobs):
        job.on_progress = worker.on_progress(inbox, index)
    assert worker.room(texts)
    worker.submit(jobs)
    found: list[tuple[int, str | None]] = []
    while len(found) < texts:
        index, progress = await inbox.get()
        if progress.finish:
            found.append((index, progress.finish))
    await asyncio.to_thread(worker.stop)
    return found


def test_every_text_ends_and_so_does_the_thread(make_desk: Callable[..., Any]) -> None:
    desk = make_desk(rows=2, waiting=5)
    worker = Worker(desk.scheduler)
    found = asyncio.run(_all(worker, desk, 5))
    assert sorted(found) == [(k, "length") for k in range(5)]
    assert not worker.alive
    assert worker.busy == (0, 0)
    assert not worker.room(6)


async def _writes(worker: Worker, desk: Any, waits: float) -> list[int]:
    """How many tokens came with each hand-over, if a step takes `waits` seconds."""
    inbox: Inbox = asyncio.Queue()
    job = desk.job([100], 9)
    job.on_progress = worker.on_progress(inbox, 0)
    plain = worker.scheduler.step

    def step() -> bool:
        time.sleep(waits)
        return plain()

    worker.scheduler.step = step  # type: ignore[method-assign]
    counts: list[int] = []
    deliver = worker._deliver

    def counted() -> None:
        counts.append(sum(len(progress.written) for _, _, progress in worker._outbox))
        deliver()

    worker._deliver = counted  # type: ignore[method-assign]
    worker.start(asyncio.get_running_loop())
    worker.submit([job])
    while (await inbox.get())[1].finish is None:
        pass
    await asyncio.to_thread(worker.stop)
    return [count for count in counts if count]


def test_tokens_of_short_steps_are_handed_over_together(
    make_desk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for together, waits, expected in ((60.0, 0.0, [1, 8]), (0.001, 0.002, [1] * 9)):
        monkeypatch.setattr(module, "TOGETHER", together)
        desk = make_desk(rows=1)
        assert asyncio.run(_writes(Worker(desk.scheduler), desk, waits)) == expected


async def _stopped(worker: Worker, desk: Any) -> str | None:
    worker.start(asyncio.get_running_loop())
    inbox: Inbox = asyncio.Queue()
    job = desk.job([100], 10)
    job.on_progress = worker.on_progress(inbox, 0)
    worker.submit([job])
    await asyncio.to_thread(worker.stop)
    finish = None
    while finish is None:
        _, progress = await inbox.get()
        finish = progress.finish
    return finish


def test_a_stop_tells_every_text(make_desk: Callable[..., Any]) -> None:
    desk = make_desk(rows=1)
    assert asyncio.run(_stopped(Worker(desk.scheduler), desk)) in {"cancelled", "length"}
