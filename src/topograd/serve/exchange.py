"""From a request's jobs to its response: submitted, watched, gathered or streamed.

The jobs of a client that disconnects are cancelled, whether it streams or not.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from topograd.serve.jobs import Job, Progress
from topograd.serve.request_schema import RequestError
from topograd.serve.responses import Choice
from topograd.serve.worker import Inbox, Worker

GONE = -1
"""Index in an inbox that stands for a client that disconnected."""


class Answer(Protocol):
    """A response in the format of one API."""

    params: Mapping[str, Any]
    choices: list[Choice]

    def whole(self) -> dict[str, Any]:
        """The response to a request that does not stream."""

    def chunks(self, index: int, progress: Progress) -> Iterator[str]:
        """The events of a stream for some progress."""

    def error(self, error: RequestError) -> str:
        """The event of an error."""

    def end(self) -> str:
        """The events at the end of a stream."""


def submit(worker: Worker, jobs: list[Job]) -> None:
    """Queue a request's jobs, or raise 429."""
    if not worker.room(len(jobs)):
        raise RequestError(
            f"{worker.busy[1]} texts are queued, and this request has {len(jobs)}; try again later",
            status=429,
            code="too_many_requests",
        )
    worker.submit(jobs)


async def gathered(request: Request, jobs: list[Job], inbox: Inbox) -> list[list[Progress]]:
    """All progress of jobs that stream nothing, of each job."""
    told: list[list[Progress]] = [[] for _ in jobs]
    await _finished(request, jobs, inbox, lambda index, progress: told[index].append(progress))
    return told


async def respond(request: Request, answer: Answer, jobs: list[Job], inbox: Inbox) -> Response:
    """The response to a request whose jobs are queued."""
    if answer.params["stream"]:
        async with _watch(request, jobs, inbox):
            index, progress = await inbox.get()  # no text yet; an error where the depth is impossible
            _check(index, progress)
        return EventStream(lambda: _events(answer, inbox), jobs)
    await _finished(request, jobs, inbox, lambda index, progress: answer.choices[index].take(progress))
    return JSONResponse(answer.whole())


async def _finished(
    request: Request, jobs: list[Job], inbox: Inbox, take: Callable[[int, Progress], object]
) -> None:
    """Hand over all progress of jobs that stream nothing."""
    left = len(jobs)
    async with _watch(request, jobs, inbox):
        while left:
            index, progress = await inbox.get()
            _check(index, progress)
            take(index, progress)
            left -= progress.finish is not None


async def _events(answer: Answer, inbox: Inbox) -> AsyncIterator[str]:
    left = len(answer.choices)
    while left:
        events: list[str] = []
        for index, progress in [await inbox.get(), *(inbox.get_nowait() for _ in range(inbox.qsize()))]:
            if progress.finish in ("error", "cancelled"):
                _cancel([choice.job for choice in answer.choices])
                try:
                    _check(index, progress)
                except RequestError as error:
                    yield "".join(events) + answer.error(error)
                return
            events += answer.chunks(index, progress)
            left -= progress.finish is not None
        if not left:
            events.append(answer.end())
        if events:
            yield "".join(events)


@contextlib.asynccontextmanager
async def _watch(request: Request, jobs: list[Job], inbox: Inbox) -> AsyncIterator[None]:
    """Cancel the jobs if the client disconnects meanwhile."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        _cancel(jobs)
        inbox.put_nowait((GONE, Progress()))

    task = asyncio.create_task(watch())
    try:
        yield
    except BaseException:
        _cancel(jobs)
        raise
    finally:
        task.cancel()


class EventStream(Response):
    """Server-sent events, whose jobs are cancelled when the client disconnects."""

    def __init__(self, events: Callable[[], AsyncIterator[str]], jobs: list[Job]) -> None:
        super().__init__(media_type="text/event-stream")
        self.events, self.jobs = events, jobs

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for chunk in self.events():
                await send({"type": "http.response.body", "body": chunk.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        tasks = [asyncio.create_task(watch()), asyncio.create_task(write())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            _cancel(self.jobs)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _cancel(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.cancelled = True


def _check(index: int, progress: Progress) -> None:
    if index == GONE:
        raise ClientDisconnect
    if progress.finish == "error":
        raise RequestError(progress.error, progress.param, status=progress.status)
    if progress.finish == "cancelled":
        raise RequestError("the server is stopping; ask again later", status=503)
