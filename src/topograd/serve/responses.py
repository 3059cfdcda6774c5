"""Responses in OpenAI's format: complete ones, and chunks of streams.

A stream has one id and one time in all its chunks; `finish_reason` is null until a choice ends; the first
chunk of a chat's choice has the role; the usage is a chunk of its own, only with `include_usage`; then
[DONE]. `timings` is an extension: in a complete response, and in the last chunk of each choice.
"""

import codecs
import json
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from topograd.convert.tool_calls import Delta
from topograd.serve.jobs import Job, Progress, Scored, Written
from topograd.serve.request_schema import RequestError
from topograd.serve.texts import ServedModel
from topograd.serve.tools import Toolbox, call_id


@dataclass
class Call:
    """A call of a tool, as far as it has come."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=call_id)


class Choice:
    """One text of a request, as far as it has come."""

    def __init__(self, job: Job, tools: Toolbox | None = None) -> None:
        self.job = job
        self.text = ""
        """Its content."""
        self.calls: list[Call] = []
        self.blocks: list[str | Call] = []
        """Content and calls in their order."""
        self.written: list[Written] = []
        self.prompt: Sequence[Scored | None] = ()
        self.finish: str | None = None
        self.begun = False
        """Whether its first chunk was sent."""
        self._parser = None if tools is None else tools.parser()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def take(self, progress: Progress) -> list[Delta]:
        """Add what is new; the new content and calls."""
        new = "".join(token.text for token in progress.written) + progress.rest
        self.written += progress.written
        if progress.prompt is not None:
            self.prompt = progress.prompt
        if self._parser is None:
            deltas = [Delta(new)] if new else []
        else:
            deltas = self._parser.feed(new, last=progress.finish is not None)
        for delta in deltas:
            self._add(delta)
        ended = progress.finish == "stop" and self.calls
        self.finish = "tool_calls" if ended else progress.finish
        return deltas

    def _add(self, delta: Delta) -> None:
        if delta.call is not None:
            if delta.name:
                self.calls.append(Call(delta.name))
                self.blocks.append(self.calls[-1])
            self.calls[delta.call].arguments += delta.text
            return
        self.text += delta.text
        if self.blocks and isinstance(self.blocks[-1], str):
            self.blocks[-1] += delta.text
        else:
            self.blocks.append(delta.text)

    def offset(self, piece: bytes) -> int:
        """Where the next token begins in the text; in the middle of a character, where that begins."""
        here = self._characters
        self._characters += len(self._decoder.decode(piece))
        return here


class OpenAIResponse:
    """The response to one request."""

    def __init__(
        self,
        served: ServedModel,
        params: Mapping[str, Any],
        jobs: Sequence[Job],
        tools: Toolbox | None = None,
        *,
        chat: bool,
    ) -> None:
        self.served, self.params, self.chat = served, params, chat
        self.choices = [Choice(job, tools) for job in jobs]
        kind = "chat.completion" if chat else "text_completion"
        self.echo = not chat and params["echo"]
        self.scored = bool(params["logprobs"]) if chat else params["logprobs"] is not None
        self.include_usage = bool(params["stream_options"].get("include_usage"))
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if chat and params["stream"] else kind,
            "created": int(time.time()),
            "model": params["model"] or served.name,
            "system_fingerprint": served.fingerprint,
        }
        self._begins = event(self.head).rpartition("}")[0]
        """How every chunk begins, written once."""

    def whole(self) -> dict[str, Any]:
        """The response to a request that does not stream."""
        choices = [self._whole(index, choice) for index, choice in enumerate(self.choices)]
        jobs = [choice.job for choice in self.choices]
        return {**self.head, "choices": choices, "usage": self.usage(), "timings": timings(jobs)}

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        text = self._echoed(choice) + choice.text
        scored = self._logprobs(choice, choice.written, self.echo) if self.scored else None
        body: dict[str, Any] = {"index": index, "logprobs": scored, "finish_reason": choice.finish}
        if self.chat:
            body["message"] = {"role": "assistant", "content": text, "refusal": None}
            if choice.calls:
                called = [
                    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                    for c in choice.calls
                ]
                body["message"] |= {"content": text or None, "tool_calls": called}
        else:
            body["text"] = text
        return body | self._stages(choice.written)

    def _echoed(self, choice: Choice) -> str:
        return self.served.decode(choice.job.prompt) if self.echo else ""

    def usage(self) -> dict[str, Any]:
        """Tokens read and written."""
        read, made, cached = counts(self.choices)
        return {
            "prompt_tokens": read,
            "completion_tokens": made,
            "total_tokens": read + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def chunks(self, index: int, progress: Progress) -> Iterator[str]:
        """The events of a stream for some progress."""
        choice = self.choices[index]
        if not choice.begun and (progress.written or progress.finish or (self.chat and not choice.begun)):
            if self.chat:
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})
                choice.begun = True
            elif self.echo and (not self.scored or choice.prompt or progress.prompt):
                choice.prompt = choice.prompt or progress.prompt or ()
                first: dict[str, Any] = {"text": self._echoed(choice)}
                first["logprobs"] = self._logprobs(choice, (), True) if self.scored else None
                yield self._chunk(index, first)
                choice.begun = True
        deltas = choice.take(progress)
        if not progress.written and not progress.finish:
            return
        reported = self._reported(progress.written)
        scored = self._logprobs(choice, reported, False) if self.scored else None
        body: dict[str, Any] = {"logprobs": scored, **self._stages(reported)}
        if not self.chat:
            if deltas or reported or progress.finish:
                words = {"text": "".join(delta.text for delta in deltas), **body}
                yield self._chunk(index, words, choice.finish, choice if progress.finish else None)
            return
        if not deltas and reported:
            deltas = [Delta("")]
        for delta in deltas:
            yield self._chunk(index, {"delta": _spelled(delta, choice), **body})
            body = {"logprobs": None}
        if progress.finish:
            yield self._chunk(index, {"delta": {}, "logprobs": None}, choice.finish, choice)

    def _chunk(
        self, index: int, words: Mapping[str, Any], finish: str | None = None, ended: Choice | None = None
    ) -> str:
        chunk: dict[str, Any] = {"choices": [{"index": index, **words, "finish_reason": finish}]}
        if self.include_usage:
            chunk["usage"] = None
        if ended is not None:
            chunk["timings"] = timings([ended.job])
        return f"{self._begins},{_json(chunk)[1:]}\n\n"

    def error(self, error: RequestError) -> str:
        """An error in the middle of a stream."""
        return event(error_body(error.message, error.status))

    def end(self) -> str:
        """The end of a stream."""
        usage = event({**self.head, "choices": [], "usage": self.usage()}) if self.include_usage else ""
        return usage + "data: [DONE]\n\n"

    def _reported(self, written: Sequence[Written]) -> list[Written]:
        """The tokens in the response: a stop token only among the scores of a completion.

        There a client may count on one entry for each generated token, as lm-eval does.
        """
        return [w for w in written if not w.end or (self.scored and not self.chat)]

    def _stages(self, written: Sequence[Written]) -> dict[str, Any]:
        if not self.params["stages"]:
            return {}
        each = [
            {"id": w.token, "text": w.text, "stage": w.exit + 1, "drafted": w.drafted}
            for w in written
            if not w.end
        ]
        return {"tokens": each}

    def _logprobs(self, choice: Choice, written: Sequence[Written], prompt: bool) -> dict[str, Any]:
        tokens = [(w.token, w.score) for w in self._reported(written)]
        if prompt:
            tokens = [*zip(choice.job.prompt, choice.prompt, strict=False), *tokens]
        if self.chat:
            return {"content": [self._chat_token(*each) for each in tokens if each[1]], "refusal": None}
        texts, offsets = [], []
        for token, _ in tokens:
            texts.append(self._name(token))
            offsets.append(choice.offset(self.served.piece(token)))
        return {
            "tokens": texts,
            "token_logprobs": [None if score is None else finite(score.logprob) for _, score in tokens],
            "top_logprobs": [self._top(*each) for each in tokens] if self.params["logprobs"] else None,
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """A token as text; incomplete UTF-8 as OpenAI writes it."""
        piece = self.served.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def _top(self, token: int, score: Scored | None) -> dict[str, float] | None:
        if score is None:
            return None
        top: dict[str, float] = {}
        for other, logprob in (*score.top, (token, score.logprob)):
            top.setdefault(self._name(other), finite(logprob))
        return top

    def _chat_token(self, token: int, score: Scored | None) -> dict[str, Any]:
        assert score is not None
        top = [self._entry(*each) for each in score.top]
        return {**self._entry(token, score.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.served.piece(token)
        text = piece.decode("utf-8", "replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(piece)}


class BlockResponse(ABC):
    """A response of one text, whose content and calls are blocks: in a stream each begins and ends."""

    def __init__(
        self, params: Mapping[str, Any], jobs: Sequence[Job], tools: Toolbox | None, head: Mapping[str, Any]
    ) -> None:
        self.params, self.head = params, head
        self.choices = [Choice(job, tools) for job in jobs]
        self._open = -1
        self._last: int | None = None
        """The block that deltas are added to, and its call."""

    def chunks(self, index: int, progress: Progress) -> Iterator[str]:
        """The events of a stream for some progress."""
        (choice,) = self.choices
        if not choice.begun:
            choice.begun = True
            yield from self._created()
        for delta in choice.take(progress):
            if self._open < 0 or delta.call != self._last or delta.name:
                yield from self._close(choice)
                self._open, self._last = self._open + 1, delta.call
                yield from self._begin(choice)
            if delta.text:
                yield self._delta(choice, delta)
        if progress.finish:
            yield from self._finish(choice)

    def _event(self, kind: str, words: Mapping[str, Any]) -> str:
        return f"event: {kind}\n" + event({"type": kind, **words})

    def _close(self, choice: Choice) -> Iterator[str]:
        if self._open >= 0:
            yield from self._end(choice)

    def _finish(self, choice: Choice) -> Iterator[str]:
        yield from self._close(choice)

    @abstractmethod
    def _created(self) -> Iterator[str]:
        """The events before the first block."""

    @abstractmethod
    def _begin(self, choice: Choice) -> Iterator[str]:
        """The events that begin the open block."""

    @abstractmethod
    def _delta(self, choice: Choice, delta: Delta) -> str:
        """The event of more of the open block."""

    @abstractmethod
    def _end(self, choice: Choice) -> Iterator[str]:
        """The events that end it."""


def _spelled(delta: Delta, choice: Choice) -> dict[str, Any]:
    if delta.call is None:
        return {"content": delta.text}
    function: dict[str, Any] = {"arguments": delta.text}
    if not delta.name:
        return {"tool_calls": [{"index": delta.call, "function": function}]}
    begun = {"id": choice.calls[delta.call].id, "type": "function"}
    return {"tool_calls": [{"index": delta.call, **begun, "function": {"name": delta.name, **function}}]}


def counts(choices: Sequence[Choice]) -> tuple[int, int, int]:
    """Tokens read, written and cached; a prompt counts once however many texts follow it."""
    prompts = {id(choice.job.prompt): choice.job for choice in choices}
    read = sum(len(job.prompt) for job in prompts.values())
    made = sum(choice.job.tokens - choice.job.remaining for choice in choices)
    return read, made, sum(job.timings.cached for job in prompts.values())


def finite(value: float) -> float:
    """A log-probability as JSON: -inf is -9999, as OpenAI has it."""
    return value if math.isfinite(value) else -9999.0


def timings(jobs: Sequence[Job]) -> dict[str, Any]:
    """Times of some texts in milliseconds, and counts of tokens and drafts."""
    clocks = [job.timings for job in jobs]
    received = min(clock.received for clock in clocks)
    admitted = min((clock.admitted for clock in clocks if clock.admitted is not None), default=received)
    first = min((clock.first for clock in clocks if clock.first is not None), default=None)
    done = max((clock.finished for clock in clocks if clock.finished is not None), default=admitted)
    stages = [exit_ + 1 for job in jobs for exit_ in job.exits]
    tokens = sum(job.tokens - job.remaining for job in jobs)
    drafted = sum(clock.drafted for clock in clocks)
    accepted = sum(clock.accepted for clock in clocks)
    writing = None if first is None else done - first
    later = tokens - sum(clock.at_first for clock in clocks)
    speed = later / writing if writing and later > 0 else None
    return {
        "queued_ms": _ms(admitted - received),
        "first_token_ms": None if first is None else _ms(first - received),
        "total_ms": _ms(done - received),
        "tokens_per_second": speed,
        "prompt_tokens": sum(len(job.prompt) for job in jobs),
        "cached_tokens": sum(clock.cached for clock in clocks),
        "completion_tokens": tokens,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted if drafted else None,
        "mean_stage": sum(stages) / len(stages) if stages else None,
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def event(value: Mapping[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {_json(value)}\n\n"


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None, path: str = ""
) -> dict[str, Any]:
    """An error in OpenAI's format, or in Anthropic's where the path is theirs."""
    kinds = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    if path.startswith("/v1/messages"):
        theirs = {403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
        other = {"service_unavailable_error": "overloaded_error", "server_error": "api_error"}
        return {
            "type": "error",
            "error": {"type": theirs.get(status, other.get(kind, kind)), "message": message},
        }
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
