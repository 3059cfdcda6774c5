"""The server as clients meet it: the openai package, curl, plain HTTP, sockets that close."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
import torch

from topograd.serve.server import Running
from topograd.serve.texts import ServedModel
from waiting import LIMIT, wait_until

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def openai_client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.address()}/v1", api_key="none", max_retries=0, timeout=LIMIT)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


@pytest.mark.covers("gpt", "serve")
@pytest.mark.covers("gpt", "serve", feature="early exit")
@pytest.mark.covers("gpt", "serve", feature="speculation")
def test_depths_by_field_and_by_id_are_what_generate_writes(ask: Ask, served: ServedModel) -> None:
    for suffix, depth in {
        "full": "full",
        "prefix-1": "prefix:1",
        "speculate": "speculate",
        "wand-0.01": "wand:flip-rate:0.01",
        "path-1,2,3": "path:1,2,3",
    }.items():
        expected = str(served.model.generate("def read(", 12, depth=depth))
        assert text_of(ask(model=f"reference:{suffix}", max_tokens=12)) == expected
        assert text_of(ask(depth=depth, max_tokens=12)) == expected
    both = ask(model="reference:prefix-1", depth="prefix:1", max_tokens=2)
    assert both["model"] == "reference:prefix-1"


def test_a_whole_answer(ask: Ask) -> None:
    answer = ask(max_tokens=6, stop=["):"], stages=True)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"], choice["logprobs"]) == (
        "self",
        "stop",
        0,
        None,
    )
    assert choice["tokens"][0] == {
        "id": choice["tokens"][0]["id"],
        "text": "self",
        "stage": 4,
        "drafted": False,
    }
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    timings = answer["timings"]
    assert 0 <= timings["queued_ms"] <= timings["first_token_ms"] <= timings["total_ms"]
    assert timings["mean_stage"] == 4
    drafted = ask(max_tokens=24, depth="speculate:3")["timings"]
    assert 0 < drafted["accepted"] <= drafted["drafted"]
    assert drafted["acceptance"] == drafted["accepted"] / drafted["drafted"]


def test_the_openai_package(openai_client: openai.OpenAI, ask: Ask) -> None:
    names = [model.id for model in openai_client.models.list()]
    assert names[0] == "reference"
    assert "reference:prefix-1" in names
    assert openai_client.models.retrieve("reference:prefix-2").id == "reference:prefix-2"
    done = openai_client.completions.create(
        model="reference", prompt="def ", max_tokens=5, temperature=0, logprobs=2
    )
    scored = done.choices[0].logprobs
    assert scored is not None
    assert scored.tokens is not None
    assert "".join(scored.tokens) == done.choices[0].text
    chat = openai_client.chat.completions.create(
        model="reference:speculate",
        messages=[{"role": "user", "content": "def read("}],
        max_completion_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content == text_of(ask(max_tokens=5))
    content = chat.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert len(content.content[0].top_logprobs) == 2
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.completions.create(model="gpt-4", prompt="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.completions.create(model="reference", prompt="a", max_tokens=300)
    assert refused.value.code == "context_length_exceeded"


def test_a_chat_streams_as_clients_expect(openai_client: openai.OpenAI) -> None:
    stream = openai_client.chat.completions.create(
        model="reference",
        messages=[
            {"role": "system", "content": "def"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ],
        max_tokens=6,
        temperature=0,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"depth": "speculate"},
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    *told, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    for index in range(2):
        own = [chunk.choices[0] for chunk in told if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in own[1:])
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in told)


def test_a_completion_streams(client: httpx.Client, ask: Ask) -> None:
    body = {
        "prompt": "def read(",
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "echo": True,
        "logprobs": 1,
    }
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    whole = ask(max_tokens=8, echo=True, logprobs=1)["choices"][0]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        together = [item for choice in choices if choice["logprobs"] for item in choice["logprobs"][name]]
        if name == "token_logprobs":
            assert together[1:] == pytest.approx(whole["logprobs"][name][1:], abs=1e-4)
        else:
            assert together == whole["logprobs"][name]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert "usage" not in chunks[0]
    assert chunks[-1]["timings"]["completion_tokens"] == 8


def test_echo_with_logprobs_is_the_models_log_softmax(ask: Ask, served: ServedModel) -> None:
    tokens = served.encode("def read(self, size=-1):\n    return self.")
    for depth, stage in (("full", 3), ("prefix:2", 1)):
        choice = ask(prompt=tokens, echo=True, logprobs=1, max_tokens=1, depth=depth)["choices"][0][
            "logprobs"
        ]
        from topograd.exec.forward import stage_logits

        session = served.model.session
        with torch.no_grad():
            z = stage_logits(session.stack, session.plan, stage, torch.tensor([tokens]))[0].log_softmax(-1)
        expected = [float(z[i, token]) for i, token in enumerate(tokens[1:])]
        assert choice["token_logprobs"][0] is None
        assert choice["token_logprobs"][1:-1] == pytest.approx(expected, abs=2e-4)
        for i, top in enumerate(choice["top_logprobs"][1:-1]):
            assert max(top.values()) == pytest.approx(float(z[i].max()), abs=2e-4)
    alone = ask(prompt=tokens, echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert alone["text"] == served.decode(tokens)
    assert len(alone["logprobs"]["tokens"]) == len(tokens)
    assert alone["logprobs"]["top_logprobs"] is None


def test_several_prompts_texts_and_seeds(ask: Ask) -> None:
    settings = {"temperature": 1.0, "max_tokens": 6, "seed": 7}
    answer = ask(prompt=["def ", "class "], n=2, **settings)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts[0] != texts[1]
    assert text_of(ask(prompt="def ", **settings)) == texts[0], "a seed gives the same text again"
    assert text_of(ask(prompt="def ", **{**settings, "seed": 8})) == texts[1], "n counts the seeds up"
    free = {text_of(ask(prompt="def ", temperature=1.5, max_tokens=8)) for _ in range(3)}
    assert len(free) > 1, "without a seed each time another"


def test_curl(running: Running) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    body = '{"model": "reference:prefix-1", "prompt": "def ", "max_tokens": 8, "temperature": 0}'
    done = subprocess.run(
        ["curl", "-s", "--noproxy", "*", f"{running.address()}/v1/completions", "-d", body],
        capture_output=True,
        check=True,
        timeout=LIMIT,
    )
    assert json.loads(done.stdout)["choices"][0]["finish_reason"] == "length"


def test_tokens_and_candidates(client: httpx.Client, served: ServedModel) -> None:
    found = client.post("/tokenize", json={"content": "def read("}).json()
    assert served.decode(found["tokens"]) == "".join(found["pieces"]) == "def read("
    assert found["count"] == len(found["tokens"])
    again = client.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert again["prompt"] == "def read("
    assert client.post("/detokenize", json={"tokens": [10**6]}).json()["error"]["param"] == "tokens"
    bare = client.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json()
    assert bare["tokens"] == []
    assert client.get("/tokenizer_info").json()["eos_token"] is None, "its separator has no spelling"
    answer = client.post("/v1/candidates", json={"tokens": found["tokens"], "top": 2}).json()
    assert len(answer["stages"]) == 4
    assert all(len(stage) == len(found["tokens"]) - 1 for stage in answer["stages"])
    assert len(answer["stages"][0][0]["top"]) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "depth": "deep"}, "depth"),
        ({"prompt": "a", "depth": "speculate:/etc"}, "depth"),
        ({"prompt": "a", "depth": "speculate:lookup+../run"}, "depth"),
        ({"prompt": "a", "depth": "prefix:9"}, "depth"),
        ({"prompt": "a", "depth": "prefix:1", "model": "reference:full"}, "depth"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"prompt": "a", "depth": "deep", "stream": True}, "depth"),
    ],
)
def test_refusals_name_the_field(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"]


def test_other_addresses_and_methods(client: httpx.Client) -> None:
    assert client.get("/nowhere").json()["error"]["type"] == "invalid_request_error"
    wrong = client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "topograd_texts_running" in client.get("/metrics").text
    assert client.get("/v1/models/reference:deep").status_code == 404
    for body in (
        b"",
        b"{",
        b"[1]",
        b"\xff",
        b'{"prompt": NaN}',
        b"[" * 5000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ):
        answer = client.post("/v1/completions", content=body)
        assert answer.status_code == 400
        assert "Traceback" not in answer.text
    long = client.post("/v1/completions", json={"prompt": "a" * (9 * 2**20)})
    assert long.status_code == 413


def _busy(running: Running) -> int:
    return sum(running.worker.busy)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_is_cancelled(
    running: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A raw socket that closes in the middle: its row is free again long before the text would have ended."""
    wait_until(lambda: _busy(running) == 0, "the end of other texts")
    scheduler, steps = running.worker.scheduler, itertools.count()
    plain = scheduler.step

    def step() -> bool:
        """As ever, but nothing is written to its end before the client's going was noticed."""
        if next(steps) > 20:
            wait_until(lambda: all(row.job.cancelled for row in scheduler.active), "the cancellation")
        return plain()

    monkeypatch.setattr(scheduler, "step", step)
    before = running.counters.finishes["cancelled"]
    body = json.dumps({"prompt": "a", "max_tokens": 250, "n": 3, "temperature": 1, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(running.sock.getsockname()[:2]) as client:
        client.sendall(head.encode() + body)
        wait_until(lambda: _busy(running) > 0, "the text's beginning")
        if stream:
            assert client.recv(100)
    wait_until(lambda: running.counters.finishes["cancelled"] == before + 3, "three ends")
    wait_until(lambda: _busy(running) == 0, "free rows")


def test_too_many_wait_is_refused_and_said(start_server: Callable[..., Any]) -> None:
    server, stop = start_server(rows=1, waiting=2, grace=1)
    try:
        with httpx.Client(base_url=server.address(), timeout=LIMIT, trust_env=False) as client:
            answer = client.post("/v1/completions", json={"prompt": "a", "n": 5, "max_tokens": 1})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["code"] == "too_many_requests"
            assert (
                client.post("/v1/completions", json={"prompt": "a", "n": 2, "max_tokens": 1}).status_code
                == 200
            )
    finally:
        stop()


def test_many_clients_at_once_get_their_own_answers(client: httpx.Client, ask: Ask) -> None:
    depths = ["full", "prefix:1", "prefix:2", "speculate:3", "wand", "speculate:lookup"] * 2
    expected = {depth: text_of(ask(depth=depth, max_tokens=16)) for depth in set(depths)}
    found: dict[int, str] = {}

    def one(index: int) -> None:
        found[index] = text_of(ask(depth=depths[index], max_tokens=16))

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(depths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(depths))] == [expected[depth] for depth in depths]
