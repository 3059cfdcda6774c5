"""The shapes of answers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from topograd.serve.jobs import Job, Progress, Scored, Written
from topograd.serve.request_schema import CHAT, COMPLETION, read
from topograd.serve.responses import OpenAIResponse, error_body, finite, timings
from topograd.serve.texts import ServedModel


def job_of(served: ServedModel, prompt: list[int]) -> Job:
    asked = read(COMPLETION, {"prompt": prompt, "max_tokens": 3})
    (job,) = served.jobs(asked, [prompt], 3, lambda index: lambda progress: None)
    return job


@pytest.fixture
def job(served: ServedModel) -> Job:
    return job_of(served, served.encode("é"))


def _chunks(response: OpenAIResponse, *steps: Progress) -> list[dict[str, Any]]:
    said = "".join(chunk for step in steps for chunk in response.chunks(0, step))
    return [json.loads(event[6:]) for event in said.split("\n\n") if event]


def test_tokens_that_are_no_text_alone_are_spelled_as_bytes(served: ServedModel, job: Job) -> None:
    response = OpenAIResponse(served, read(COMPLETION, {"logprobs": 1}), [job], chat=False)
    first, second = "é".encode()
    response.choices[0].take(
        Progress(
            (
                Written(first, "", 3, score=Scored(-1.0, ((first, -1.0),))),
                Written(second, "é", 3, score=Scored(-math.inf)),
            ),
            finish="length",
        )
    )
    (choice,) = response.whole()["choices"]
    assert choice["text"] == "é"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert choice["logprobs"]["token_logprobs"] == [-1.0, -9999.0]
    assert choice["logprobs"]["text_offset"] == [0, 0], "both are of the first character"
    assert finite(-0.5) == -0.5


def test_chunks_of_a_chat(served: ServedModel, job: Job) -> None:
    response = OpenAIResponse(
        served, read(CHAT, {"messages": [{"role": "user"}], "stream": True}), [job], chat=True
    )
    chunks = _chunks(
        response,
        Progress(),
        Progress((Written(5, "a", 0),)),
        Progress((Written(6, "b", 3),), "c", finish="stop"),
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "bc"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert "timings" in chunks[-1]
    assert response.end() == "data: [DONE]\n\n"


def test_chunks_with_an_echo_come_after_the_prompts_scores(served: ServedModel, job: Job) -> None:
    fields = {"echo": True, "logprobs": 0, "stream": True, "stream_options": {"include_usage": True}}
    response = OpenAIResponse(served, read(COMPLETION, fields), [job], chat=False)
    scores = (None, *(Scored(-1.0) for _ in job.prompt[1:]))
    chunks = _chunks(
        response,
        Progress(),
        Progress(prompt=scores),
        Progress((Written(97, "a", 3, score=Scored(-2.0)),), finish="length"),
    )
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["é", "a"]
    assert chunks[1]["choices"][0]["logprobs"]["text_offset"] == [1]
    assert chunks[0]["usage"] is None
    usage = json.loads(response.end().split("\n\n")[0][6:])
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == len(job.prompt)


def test_the_token_that_ends_a_text_is_scored_but_not_shown(served: ServedModel, job: Job) -> None:
    """lm-eval drops the last score, that of the token it did not ask for: there must be one."""
    ended = Progress(
        (Written(97, "a", 3, score=Scored(-1.0)), Written(5, "", 3, score=Scored(-2.0), end=True)),
        finish="stop",
    )
    for stream in (False, True):
        fields = {"logprobs": 0, "stages": True, "stream": stream}
        response = OpenAIResponse(served, read(COMPLETION, fields), [job], chat=False)
        if stream:
            (choice,) = _chunks(response, ended)[0]["choices"]
        else:
            response.choices[0].take(ended)
            (choice,) = response.whole()["choices"]
        assert choice["text"] == "a"
        assert choice["logprobs"]["token_logprobs"] == [-1.0, -2.0]
        assert [token["id"] for token in choice["tokens"]] == [97]
    said = {"messages": [{"role": "user"}], "logprobs": True, "stream": True}
    chunks = _chunks(OpenAIResponse(served, read(CHAT, said), [job], chat=True), ended)
    assert [len((chunk["choices"][0]["logprobs"] or {"content": ()})["content"]) for chunk in chunks] == [
        0,
        1,
        0,
    ]


def test_times_and_errors(served: ServedModel, job: Job) -> None:
    clock = job.timings
    clock.received, clock.admitted, clock.first, clock.finished = 0.0, 1.0, 2.0, 4.0
    clock.drafted, clock.accepted, job.remaining, job.exits = 4, 3, 0, [0, 0, 3]
    found = timings([job])
    assert (found["queued_ms"], found["first_token_ms"], found["total_ms"]) == (1000, 2000, 4000)
    assert (found["tokens_per_second"], found["acceptance"], found["mean_stage"]) == (1.0, 0.75, 2.0)
    clock.at_first = 3
    assert timings([job])["tokens_per_second"] is None, "all came at once"
    kinds = [error_body("a", status)["error"]["type"] for status in (400, 401, 429, 500, 503)]
    assert kinds == [
        "invalid_request_error",
        "authentication_error",
        "rate_limit_error",
        "server_error",
        "service_unavailable_error",
    ]
