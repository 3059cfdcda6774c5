"""HTTP application: routes, and the response to a request from the progress of its jobs.

Bodies are read with a limit on bytes and time. A request's jobs go to the worker; their progress comes back
through one inbox. The jobs of a client that disconnects are cancelled, whether it streams or not.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from topograd.serve import embeddings
from topograd.serve.chats import Chats
from topograd.serve.jobs import Job, Progress
from topograd.serve.metrics import Counters
from topograd.serve.openapi import document
from topograd.serve.request_schema import (
    CANDIDATES,
    CHAT,
    COMPLETION,
    DETOKENIZE,
    EMBEDDING,
    SHARED,
    TOKENIZE,
    Field,
    RequestError,
    read,
    unsupported,
)
from topograd.serve.responses import OpenAIResponse, error_body, event
from topograd.serve.texts import ServedModel
from topograd.serve.worker import Inbox, Worker

AT_ONCE = 2**14
"""Bodies up to this many bytes are read on the event loop; longer ones would keep others waiting."""
GONE = -1
"""Index in an inbox that stands for a client that disconnected."""


class Service:
    """Everything that the routes need."""

    def __init__(self, served: ServedModel, worker: Worker, counters: Counters) -> None:
        self.served, self.worker, self.counters = served, worker, counters
        self.chats = Chats(served)

    def app(self) -> Starlette:
        """The routes."""
        post, get = ["POST"], ["GET"]
        return Starlette(
            routes=[
                Route("/", self.page, methods=get),
                Route("/v1/completions", self.completions, methods=post),
                Route("/v1/chat/completions", self.chat, methods=post),
                Route("/v1/candidates", self.candidates, methods=post),
                Route("/v1/embeddings", self.embeddings, methods=post),
                Route("/v1/models", self.models, methods=get),
                Route("/v1/models/{model:path}", self.model, methods=get),
                Route("/tokenize", self.tokenize, methods=post),
                Route("/detokenize", self.detokenize, methods=post),
                Route("/tokenizer_info", self.tokenizer_info, methods=get),
                Route("/health", self.health, methods=get),
                Route("/metrics", self.metrics, methods=get),
                Route("/openapi.json", self.openapi, methods=get),
            ],
            exception_handlers={
                RequestError: _refused,
                HTTPException: _http_error,
                ClientDisconnect: _gone,
            },
        )

    async def page(self, request: Request) -> Response:
        text, policy = playground()
        return HTMLResponse(text, headers={"content-security-policy": policy})

    async def health(self, request: Request) -> Response:
        running, waiting = self.worker.busy
        alive = self.worker.alive
        body = {"status": "ok" if alive else "failed", "model": self.served.name}
        return JSONResponse({**body, "running": running, "waiting": waiting}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            self.counters.text(*self.worker.busy), media_type="text/plain; version=0.0.4"
        )

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document())

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": describe(self.served, self.chats)})

    async def model(self, request: Request) -> Response:
        wanted = request.path_params["model"]
        for entry in describe(self.served, self.chats):
            if entry["id"] == wanted:
                return JSONResponse(entry)
        self.served.depth({"model": wanted})
        base = describe(self.served, self.chats)[0]
        return JSONResponse({**base, "id": wanted})

    async def tokenize(self, request: Request) -> Response:
        params = await self._params(request, TOKENIZE)
        self.served.depth(params)
        if (params["prompt"] is None) == (params["content"] is None):
            raise RequestError("give the text as prompt, or as content, but not as both", "prompt")
        text = params["content"] if params["prompt"] is None else params["prompt"]
        way = self.served.encode if params["add_special_tokens"] else self.served.encode_bare
        tokens = await asyncio.to_thread(way, text)
        body = {"tokens": tokens, "count": len(tokens), "max_model_len": self.served.context}
        pieces = [self.served.piece(token).decode("utf-8", "replace") for token in tokens]
        return JSONResponse({**body, "pieces": pieces})

    async def detokenize(self, request: Request) -> Response:
        params = await self._params(request, DETOKENIZE)
        self.served.depth(params)
        tokens = self.served.checked(params["tokens"], "tokens")
        return JSONResponse({"prompt": self.served.decode(tokens)})

    async def tokenizer_info(self, request: Request) -> Response:
        """Special tokens and the chat template: lm-eval reads them and needs no tokenizer of its own."""
        return JSONResponse({**self.served.special_tokens, "chat_template": self.chats.template})

    async def completions(self, request: Request) -> Response:
        params = await self._params(request, COMPLETION)
        if params["best_of"] not in (None, params["n"]):
            raise unsupported("best_of", "only the value of n: every text is returned")
        inbox: Inbox = asyncio.Queue()

        def prepare() -> list[Job]:
            prompts = self.served.prompts(params["prompt"], self.served.vocabulary(params))
            return self.served.jobs(
                params, prompts, params["max_tokens"], lambda i: self.worker.on_progress(inbox, i)
            )

        long = len(params["prompt"]) > AT_ONCE // 4 or params["grammar"] is not None
        jobs = await asyncio.to_thread(prepare) if long else prepare()
        for job in jobs:
            job.logprobs = params["logprobs"]
            job.score_prompt = params["echo"] and params["logprobs"] is not None
        return await self._respond(
            request, OpenAIResponse(self.served, params, jobs, chat=False), jobs, inbox
        )

    async def chat(self, request: Request) -> Response:
        params = await self._params(request, CHAT)
        if params["top_logprobs"] and not params["logprobs"]:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        most = params["max_completion_tokens"]
        tokens = params["max_tokens"] if most is None else most
        inbox: Inbox = asyncio.Queue()

        def prepare() -> list[Job]:
            prompt = self.chats.prompt(params["messages"], self.served.vocabulary(params))
            return self.served.jobs(params, [prompt], tokens, lambda i: self.worker.on_progress(inbox, i))

        jobs = await asyncio.to_thread(prepare)
        for job in jobs:
            job.logprobs = (params["top_logprobs"] or 0) if params["logprobs"] else None
        return await self._respond(request, OpenAIResponse(self.served, params, jobs, chat=True), jobs, inbox)

    async def candidates(self, request: Request) -> Response:
        """The likeliest tokens of each stage at each position, and the log-probability of the actual one."""
        params = await self._params(request, CANDIDATES)
        self.served.depth(params)
        tokens = self.served.checked(params["tokens"], "tokens")
        inbox: Inbox = asyncio.Queue()
        plain = read(SHARED, {"depth": "full", "seed": 0, "temperature": 0})
        jobs = self.served.jobs(plain, [tokens], 0, lambda i: self.worker.on_progress(inbox, i))
        jobs[0].candidates = params["top"]
        (told,) = await self._gathered(request, jobs, inbox)
        candidates = next((progress.candidates for progress in told if progress.candidates), None)
        stages = [
            [
                {
                    "logprob": score.logprob,
                    "top": [{"id": t, "text": self.served.decode([t]), "logprob": p} for t, p in score.top],
                }
                for score in stage
            ]
            for stage in candidates or ()
        ]
        return JSONResponse({"tokens": tokens, "stages": stages})

    async def embeddings(self, request: Request) -> Response:
        """The states of an exit for each text, pooled and of length 1."""
        params = await self._params(request, EMBEDDING)
        embeddings.check(params)
        plain = read(SHARED, {"depth": embeddings.depth_of(self.served, params), "seed": 0, "temperature": 0})
        prompts = await asyncio.to_thread(self.served.prompts, params["input"])
        inbox: Inbox = asyncio.Queue()
        jobs = self.served.jobs(plain, prompts, 0, lambda i: self.worker.on_progress(inbox, i))
        for job in jobs:
            job.embed = params["pooling"]
        told = await self._gathered(request, jobs, inbox)
        made = [next(each.embedding for each in some if each.embedding is not None) for some in told]
        return JSONResponse(embeddings.body(self.served, params, prompts, made))

    async def _gathered(self, request: Request, jobs: list[Job], inbox: Inbox) -> list[list[Progress]]:
        """All progress of jobs that stream nothing, of each job."""
        self._submit(jobs)
        told: list[list[Progress]] = [[] for _ in jobs]
        left = len(jobs)
        async with self._watch(request, jobs, inbox):
            while left:
                index, progress = await inbox.get()
                if index == GONE:
                    raise ClientDisconnect
                _check(progress)
                told[index].append(progress)
                left -= progress.finish is not None
        return told

    async def _respond(
        self, request: Request, response: OpenAIResponse, jobs: list[Job], inbox: Inbox
    ) -> Response:
        self._submit(jobs)
        if response.params["stream"]:
            accepted: list[tuple[int, Progress]] = []
            async with self._watch(request, jobs, inbox):
                while not accepted:  # the first progress is an error where the depth is impossible
                    accepted.append(await inbox.get())
            index, progress = accepted[0]
            if index == GONE:
                raise ClientDisconnect
            if progress.finish == "error":
                _cancel(jobs)
            _check(progress)
            return EventStream(lambda: self._events(response, inbox), jobs)
        left = len(jobs)
        async with self._watch(request, jobs, inbox):
            while left:
                index, progress = await inbox.get()
                if index == GONE:
                    raise ClientDisconnect
                response.choices[index].take(progress)
                if progress.finish in ("error", "cancelled"):
                    _cancel(jobs)
                _check(progress)
                left -= progress.finish is not None
        return JSONResponse(response.whole())

    async def _events(self, response: OpenAIResponse, inbox: Inbox) -> AsyncIterator[str]:
        left = len(response.choices)
        while left:
            events: list[str] = []
            for index, progress in [await inbox.get(), *(inbox.get_nowait() for _ in range(inbox.qsize()))]:
                if progress.finish in ("error", "cancelled"):
                    _cancel([choice.job for choice in response.choices])
                    try:
                        _check(progress)
                    except RequestError as error:
                        yield "".join(events) + event(error_body(error.message, error.status))
                    return
                events += response.chunks(index, progress)
                left -= progress.finish is not None
            if not left:
                events.append(response.end())
            if events:
                yield "".join(events)

    def _submit(self, jobs: list[Job]) -> None:
        if not self.worker.room(len(jobs)):
            raise RequestError(
                f"{self.worker.busy[1]} texts are queued, and this request has {len(jobs)}; try again later",
                status=429,
                code="too_many_requests",
            )
        self.worker.submit(jobs)

    @contextlib.asynccontextmanager
    async def _watch(self, request: Request, jobs: list[Job], inbox: Inbox) -> AsyncIterator[None]:
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

    async def _params(self, request: Request, fields: Mapping[str, Field]) -> dict[str, Any]:
        limits = self.served.limits
        parts, size = [], 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > limits.body:
                        raise RequestError(
                            f"the body has more than {limits.body} bytes; send less", status=413
                        )
        except TimeoutError:
            raise RequestError(f"the body took more than {limits.body_seconds:.0f} s", status=408) from None
        body = b"".join(parts)
        if size > AT_ONCE:
            return await asyncio.to_thread(_read_body, body, fields)
        return _read_body(body, fields)


def describe(served: ServedModel, chats: Chats) -> list[dict[str, Any]]:
    """The entries of /v1/models: the model with its details, and an id name:depth for each known depth."""
    session = served.model.session
    common = {"object": "model", "created": served.started, "owned_by": "topograd"}
    exits = session.plan.predicting()
    about = {
        "context": served.context,
        "vocab": served.vocab,
        "exits": [
            {"exit": k, "stage": stage + 1, "layers": session.plan.stages[stage].stage.stop}
            for k, stage in enumerate(exits, 1)
        ],
        "stages": len(session.plan.stages),
        "depths": served.depths,
        "default_depth": served.default_depth,
        "chat": "template" if chats.template is not None else "plain",
        "specialists": [] if served.specialists is None else served.specialists.names,
    }
    base = {"id": served.name, **common, "topograd": about}
    return [base, *({"id": f"{served.name}:{depth}", **common} for depth in served.depths)]


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


def _cancel(jobs: list[Job]) -> None:
    for job in jobs:
        job.cancelled = True


def _check(progress: Progress) -> None:
    if progress.finish == "error":
        raise RequestError(progress.error, progress.param, status=progress.status)
    if progress.finish == "cancelled":
        raise RequestError("the server is stopping; ask again later", status=503)


def _read_body(body: bytes, fields: Mapping[str, Field]) -> dict[str, Any]:
    try:
        given = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(":")[0][:100]
        raise RequestError(f"the body is not JSON: {reason}; send a JSON object") from None
    return read(fields, given)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {"retry-after": "1"} if error.status == 429 else None
    return JSONResponse(
        error_body(error.message, error.status, error.param, error.code), error.status, headers
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: "there is no such route; see /openapi.json", 405: "this route takes another method"}
    message = messages.get(error.status_code, str(error.detail))
    return JSONResponse(error_body(message, error.status_code), error.status_code, error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client is gone


@cache
def playground() -> tuple[str, str]:
    """The page, and the policy that lets it load nothing and run only its own script."""
    text = (resources.files("topograd.serve") / "playground.html").read_text("utf-8")

    def allowed(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
        return " ".join(f"'sha256-{each}'" for each in hashes)

    policy = (
        f"default-src 'none'; script-src {allowed('script')}; style-src {allowed('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy
