"""Model thread: it takes jobs and delivers their progress to the event loop, which never blocks on it.

The progress of a step goes to the loop in one call. Waking the loop and writing to a socket cost more than a
small model's token, so short steps are delivered together: a text's first token and its end at once, the
others at most TOGETHER seconds late. Each token stays an event of its own; they only share a write.

A client that disconnects only sets a flag on its jobs.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from topograd.serve.jobs import Job, Progress
from topograd.serve.scheduler import Scheduler

TOGETHER = 0.01
"""Seconds that a token may wait for others to be sent with."""
Inbox = asyncio.Queue[tuple[int, Progress]]
"""Progress of a request's texts: (index of the text, progress)."""


class Worker:
    """Runs a scheduler in a thread of its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._new: deque[Sequence[Job]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._outbox: list[tuple[Inbox, int, Progress]] = []
        self._urgent, self._handed_over = False, 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """End every text and the thread; returns when it has ended."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def busy(self) -> tuple[int, int]:
        """Texts that are written, and that wait."""
        return len(self.scheduler.active), self.scheduler.waiting + sum(map(len, self._new))

    def room(self, texts: int) -> bool:
        """Whether that many texts may join the queue."""
        return self.busy[1] + texts <= self.scheduler.limits.waiting

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the texts of one request; from any thread."""
        with self._wake:
            self._new.append(jobs)
            self._wake.notify()

    def on_progress(self, inbox: Inbox, index: int) -> Callable[[Progress], None]:
        """A callback that puts a job's progress into an inbox of the loop."""
        begun = False

        def put(progress: Progress) -> None:
            nonlocal begun
            self._urgent |= not begun or not progress.written or progress.finish is not None
            begun = begun or bool(progress.written)
            self._outbox.append((inbox, index, progress))

        return put

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._new or self._stopping or self.scheduler.active or self.scheduler.waiting):
                    self._wake.wait()
                if self._stopping:
                    break
                arrived = list(self._new)
                self._new.clear()
            for jobs in arrived:
                self.scheduler.add(jobs)
            began = time.perf_counter()
            self.scheduler.step()
            now = time.perf_counter()
            if self._urgent or 2 * now - began - self._handed_over > TOGETHER:  # a step more were too late
                self._deliver()
        for jobs in self._new:
            for job in jobs:
                job.on_progress(Progress(finish="cancelled"))
        self.scheduler.stop()
        self._deliver()

    def _deliver(self) -> None:
        messages, self._outbox = self._outbox, []
        self._urgent, self._handed_over = False, time.perf_counter()
        if messages and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_hand_out, messages)
            time.sleep(0)  # let the loop have the interpreter


def _hand_out(messages: Sequence[tuple[Inbox, int, Progress]]) -> None:
    for inbox, index, progress in messages:
        inbox.put_nowait((index, progress))
