"""The model's thread: jobs in, progress out on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from topograd.serve.worker import Inbox, Worker


async def _all(worker: Worker, desk: Any, texts: int) -> list[tuple[int, str | None]]:
    worker.start(asyncio.get_running_loop())
    inbox: Inbox = asyncio.Queue()
    jobs = [desk.job([100 + k], 3) for k in range(texts)]
    for index, job in enumerate(jobs):
        job.tell = worker.tell(inbox, index)
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


async def _stopped(worker: Worker, desk: Any) -> str | None:
    worker.start(asyncio.get_running_loop())
    inbox: Inbox = asyncio.Queue()
    job = desk.job([100], 10)
    job.tell = worker.tell(inbox, 0)
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
