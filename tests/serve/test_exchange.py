"""From jobs to a response: gathered, refused, in the middle of a stream, and for a client that is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from topograd.decode.sampling import Sampling
from topograd.decode.text import TextStream
from topograd.serve.exchange import GONE, EventStream, gathered, respond
from topograd.serve.jobs import Job, Progress, Written
from topograd.serve.request_schema import CHAT, RequestError, read
from topograd.serve.responses import OpenAIResponse
from topograd.serve.texts import ServedModel
from topograd.serve.worker import Inbox

PART = Progress((Written(5, "a", 0),))
LAST = Progress((Written(6, "b", 0),), finish="length")


class Client:
    """A request whose client stays, or leaves after so many looks."""

    def __init__(self, leaves: bool = False) -> None:
        self.leaves = leaves

    async def receive(self) -> dict[str, str]:
        if not self.leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}


@pytest.fixture
def make(served: ServedModel) -> Callable[..., tuple[OpenAIResponse, list[Job], Inbox]]:
    def make(*told: Progress, **fields: Any) -> tuple[OpenAIResponse, list[Job], Inbox]:
        params = read(CHAT, {"messages": [{"role": "user", "content": "x"}], **fields})
        job = Job([1], 4, "full", Sampling(), TextStream(served.tokenizer), lambda _: None)
        inbox: Inbox = asyncio.Queue()
        for progress in told:
            inbox.put_nowait((0, progress))
        return OpenAIResponse(served, params, [job], chat=True), [job], inbox

    return make


def run(make: Any, *told: Progress, leaves: bool = False, **fields: Any) -> tuple[Any, Job]:
    async def run() -> tuple[Any, Job]:
        answer, jobs, inbox = make(*told, **fields)
        client: Any = Client(leaves)
        return await respond(client, answer, jobs, inbox), jobs[0]

    return asyncio.run(run())


def test_a_whole_response(make: Any) -> None:
    response, job = run(make, Progress(), PART, LAST)
    assert json.loads(response.body)["choices"][0]["message"]["content"] == "ab"
    assert not job.cancelled


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_at_first_has_its_status(make: Any, stream: bool) -> None:
    failed = Progress(finish="error", error="no", status=400, param="depth")
    with pytest.raises(RequestError) as problem:
        run(make, failed, stream=stream)
    assert (problem.value.status, problem.value.param) == (400, "depth")


def test_a_server_that_stops(make: Any) -> None:
    with pytest.raises(RequestError) as problem:
        run(make, Progress(), Progress(finish="cancelled"))
    assert problem.value.status == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_cancels_its_jobs(make: Any, stream: bool) -> None:
    seen: list[Job] = []

    def spied(*told: Progress, **fields: Any) -> Any:
        made = make(*told, **fields)
        seen.extend(made[1])
        return made

    with pytest.raises(ClientDisconnect):
        run(spied, leaves=True, stream=stream)
    assert seen[0].cancelled


def streamed(make: Any, *told: Progress) -> tuple[str, Job]:
    async def run() -> tuple[str, Job]:
        answer, jobs, inbox = make(Progress(), *told, stream=True)
        client: Any = Client()
        response = await respond(client, answer, jobs, inbox)
        assert isinstance(response, EventStream)
        sent: list[bytes] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message.get("body", b""))

        await response({}, client.receive, send)
        return b"".join(sent).decode(), jobs[0]

    return asyncio.run(run())


def test_a_stream_ends_with_done(make: Any) -> None:
    text, _ = streamed(make, PART, LAST)
    assert text.endswith("data: [DONE]\n\n")
    assert text.count('"content":"a"') == 1


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(make: Any) -> None:
    text, job = streamed(make, PART, Progress(finish="error", error="it failed", status=500), LAST)
    event = json.loads(text.strip().split("data: ")[-1])
    assert event["error"]["message"] == "it failed"
    assert "[DONE]" not in text
    assert job.cancelled


def test_gathered_jobs(make: Any) -> None:
    async def run(*told: tuple[int, Progress]) -> Any:
        _, jobs, inbox = make()
        for entry in told:
            inbox.put_nowait(entry)
        client: Any = Client()
        return await gathered(client, jobs, inbox)

    assert asyncio.run(run((0, Progress()), (0, LAST))) == [[Progress(), LAST]]
    with pytest.raises(ClientDisconnect):
        asyncio.run(run((GONE, Progress())))
