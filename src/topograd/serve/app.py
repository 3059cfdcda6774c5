"""HTTP application: routes, and how a request becomes jobs.

Bodies are read with a limit on bytes and time. A request's jobs go to its model's thread (`models.py`); their
progress comes back through one inbox (`exchange.py`), and is written in the format of the API that was asked
(`responses.py`, `openai_responses.py`, `anthropic.py`).
"""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from topograd.serve import anthropic, embeddings, openai_responses
from topograd.serve.exchange import Answer, gathered, respond, submit
from topograd.serve.jobs import Job, Progress
from topograd.serve.metrics import Counters
from topograd.serve.models import Models, OpenModel
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
from topograd.serve.responses import OpenAIResponse, error_body
from topograd.serve.tools import Toolbox
from topograd.serve.worker import Inbox

AT_ONCE = 2**14
"""Bodies up to this many bytes are read on the event loop; longer ones would keep others waiting."""


class Service:
    """Everything that the routes need."""

    def __init__(self, models: Models, counters: Counters) -> None:
        self.models, self.counters, self.limits = models, counters, models.limits

    def app(self) -> Starlette:
        """The routes."""
        post, get = ["POST"], ["GET"]
        return Starlette(
            routes=[
                Route("/", self.page, methods=get),
                Route("/v1/completions", self.completions, methods=post),
                Route("/v1/chat/completions", self.chat, methods=post),
                Route("/v1/responses", self.responses, methods=post),
                Route("/v1/messages", self.messages, methods=post),
                Route("/v1/messages/count_tokens", self.count_tokens, methods=post),
                Route("/v1/candidates", self.candidates, methods=post),
                Route("/v1/embeddings", self.embeddings, methods=post),
                Route("/v1/models", self.list_models, methods=get),
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
        running, waiting = self.models.busy
        alive = self.models.alive
        body = {"status": "ok" if alive else "failed", "model": self.models.default}
        return JSONResponse({**body, "running": running, "waiting": waiting}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            self.counters.text(*self.models.busy), media_type="text/plain; version=0.0.4"
        )

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document())

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self.models.entries()})

    async def model(self, request: Request) -> Response:
        wanted = request.path_params["model"]
        entries = self.models.describe(self.models.name_of(wanted))
        for entry in entries:
            if entry["id"] == wanted:
                return JSONResponse(entry)
        async with self.models.use(wanted) as model:
            model.served.depth({"model": wanted})
        return JSONResponse({**entries[0], "id": wanted})

    async def tokenize(self, request: Request) -> Response:
        params = await self._params(request, TOKENIZE)
        if (params["prompt"] is None) == (params["content"] is None):
            raise RequestError("give the text as prompt, or as content, but not as both", "prompt")
        text = params["content"] if params["prompt"] is None else params["prompt"]
        async with self.models.use(params["model"]) as model:
            served = model.served
            served.depth(params)
            way = served.encode if params["add_special_tokens"] else served.encode_bare
            tokens = await asyncio.to_thread(way, text)
        body = {"tokens": tokens, "count": len(tokens), "max_model_len": served.context}
        pieces = [served.piece(token).decode("utf-8", "replace") for token in tokens]
        return JSONResponse({**body, "pieces": pieces})

    async def detokenize(self, request: Request) -> Response:
        params = await self._params(request, DETOKENIZE)
        async with self.models.use(params["model"]) as model:
            model.served.depth(params)
            tokens = model.served.checked(params["tokens"], "tokens")
            return JSONResponse({"prompt": model.served.decode(tokens)})

    async def tokenizer_info(self, request: Request) -> Response:
        """Special tokens and the chat template: lm-eval reads them and needs no tokenizer of its own."""
        async with self.models.use(request.query_params.get("model")) as model:
            return JSONResponse({**model.served.special_tokens, "chat_template": model.chats.template})

    async def completions(self, request: Request) -> Response:
        params = await self._params(request, COMPLETION)
        if params["best_of"] not in (None, params["n"]):
            raise unsupported("best_of", "only the value of n: every text is returned")
        inbox: Inbox = asyncio.Queue()
        async with self.models.use(params["model"]) as model:
            served, on_progress = model.served, partial(model.worker.on_progress, inbox)

            def prepare() -> list[Job]:
                prompts = served.prompts(params["prompt"], served.vocabulary(params))
                return served.jobs(
                    params, prompts, params["max_tokens"], on_progress, tenant=self._tenant(request)
                )

            long = len(params["prompt"]) > AT_ONCE // 4 or params["grammar"] is not None
            jobs = await asyncio.to_thread(prepare) if long else prepare()
            for job in jobs:
                job.logprobs = params["logprobs"]
                job.score_prompt = params["echo"] and params["logprobs"] is not None
            submit(model.worker, jobs)
        return await respond(request, OpenAIResponse(served, params, jobs, chat=False), jobs, inbox)

    async def chat(self, request: Request) -> Response:
        params = await self._params(request, CHAT)
        if params["top_logprobs"] and not params["logprobs"]:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return await self._chat(request, params, partial(OpenAIResponse, chat=True))

    async def responses(self, request: Request) -> Response:
        """OpenAI's newer interface, as far as it is a chat."""
        given = await self._params(request, openai_responses.FIELDS)
        params = read(CHAT, openai_responses.to_chat(given))
        return await self._chat(request, params, partial(openai_responses.ResponsesResponse, given))

    async def messages(self, request: Request) -> Response:
        """Anthropic's interface."""
        params = read(CHAT, anthropic.to_chat(await self._params(request, anthropic.FIELDS)))
        return await self._chat(request, params, anthropic.MessagesResponse)

    async def count_tokens(self, request: Request) -> Response:
        """The tokens of a conversation, in Anthropic's format."""
        params = read(CHAT, anthropic.to_chat(await self._params(request, anthropic.COUNTED)))
        async with self.models.use(params["model"]) as model:
            _, prompt = await asyncio.to_thread(_conversation, model, params)
        return JSONResponse({"input_tokens": len(prompt)})

    async def _chat(
        self, request: Request, params: dict[str, Any], answer: Callable[..., Answer]
    ) -> Response:
        most = params["max_completion_tokens"]
        tokens = params["max_tokens"] if most is None else most
        inbox: Inbox = asyncio.Queue()
        async with self.models.use(params["model"]) as model:
            on_progress, tenant = partial(model.worker.on_progress, inbox), self._tenant(request)

            def prepare() -> tuple[Toolbox | None, list[Job]]:
                tools, prompt = _conversation(model, params)
                return tools, model.served.jobs(params, [prompt], tokens, on_progress, tools, tenant)

            tools, jobs = await asyncio.to_thread(prepare)
            for job in jobs:
                job.logprobs = (params["top_logprobs"] or 0) if params["logprobs"] else None
            submit(model.worker, jobs)
        return await respond(request, answer(model.served, params, jobs, tools), jobs, inbox)

    async def candidates(self, request: Request) -> Response:
        """The likeliest tokens of each stage at each position, and the log-probability of the actual one."""
        params = await self._params(request, CANDIDATES)
        async with self.models.use(params["model"]) as model:
            served = model.served
            served.depth(params)
            tokens = served.checked(params["tokens"], "tokens")
            (told,) = await self._read(request, model, "full", [tokens], candidates=params["top"])
        candidates = next((progress.candidates for progress in told if progress.candidates), None)
        stages = [
            [
                {
                    "logprob": score.logprob,
                    "top": [{"id": t, "text": served.decode([t]), "logprob": p} for t, p in score.top],
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
        async with self.models.use(params["model"]) as model:
            served = model.served
            depth = embeddings.depth_of(served, params)
            prompts = await asyncio.to_thread(served.prompts, params["input"])
            told = await self._read(request, model, depth, prompts, embed=params["pooling"])
        made = [next(each.embedding for each in some if each.embedding is not None) for some in told]
        return JSONResponse(embeddings.body(served, params, prompts, made))

    async def _read(
        self, request: Request, model: OpenModel, depth: str, prompts: Sequence[list[int]], **wanted: Any
    ) -> list[list[Progress]]:
        """All that is told of prompts that are read and not continued; `wanted` are fields of their jobs."""
        inbox: Inbox = asyncio.Queue()
        plain = read(SHARED, {"depth": depth, "seed": 0, "temperature": 0})
        on_progress = partial(model.worker.on_progress, inbox)
        jobs = model.served.jobs(plain, prompts, 0, on_progress, tenant=self._tenant(request))
        for job in jobs:
            vars(job).update(wanted)
        submit(model.worker, jobs)
        return await gathered(request, jobs, inbox)

    def _tenant(self, request: Request) -> str:
        """Who asks: what is computed for one token is not reused for another, unless that was allowed."""
        return "" if self.limits.share_prompts else str(request.scope.get("tenant", ""))

    async def _params(self, request: Request, fields: Mapping[str, Field]) -> dict[str, Any]:
        limits = self.limits
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


def _conversation(model: OpenModel, params: Mapping[str, Any]) -> tuple[Toolbox | None, list[int]]:
    """The tools of a chat, and its tokens; not on the event loop."""
    words = model.served.vocabulary(params)
    tools = Toolbox.of(params, model.chats.template_of(words), model.served.tokenizer)
    told = None if tools is None else tools.tools
    return tools, model.chats.prompt(params["messages"], words, told)


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
    body = error_body(error.message, error.status, error.param, error.code, request.url.path)
    return JSONResponse(body, error.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: "there is no such route; see /openapi.json", 405: "this route takes another method"}
    message = messages.get(error.status_code, str(error.detail))
    body = error_body(message, error.status_code, path=request.url.path)
    return JSONResponse(body, error.status_code, error.headers)


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
