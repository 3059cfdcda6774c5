"""Embeddings of every exit against the states of a whole forward pass, in float64, and by openai's client."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Literal

import httpx
import numpy as np
import openai
import pytest
import torch
from torch import Tensor

from topograd.exec.forward import stage_outputs
from topograd.serve.embeddings import pooled
from topograd.serve.server import Running


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_every_exit_has_the_states_of_a_forward_pass(
    make_desk: Callable[..., Any], pooling: Literal["mean", "last"]
) -> None:
    """Also where a prompt is read in parts, and begins in the cache of another."""
    desk = make_desk(chunk=4)
    stack = desk.session.stack
    prompts = [list(range(3, 14)), [1], [*range(3, 12), 9, 9]]
    depths = {"full": 3, "prefix:1": 0, "prefix:3": 2}
    jobs = [
        (desk.job(prompt, 0, depth, embed=pooling), prompt, stage)
        for _ in range(2)
        for prompt in prompts
        for depth, stage in depths.items()
    ]
    for job, *_ in jobs:
        desk.scheduler.add([job])
    desk.run()
    for job, prompt, stage in jobs:
        (found,) = [told.embedding for told in desk.told[job.number] if told.embedding is not None]
        with torch.no_grad():
            outputs = stage_outputs(stack, desk.session.plan, torch.tensor([prompt]), [stage])
        states: Tensor = outputs[stage][0]
        mean = states.mean(0) if pooling == "mean" else states[-1]
        expected = mean / mean.norm()
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=1e-12)


def test_states_of_zero_stay_zero() -> None:
    assert pooled(torch.zeros(2, 3), "mean") == (0.0, 0.0, 0.0)


def test_openais_client(running: Running) -> None:
    name = running.served.name
    with openai.OpenAI(base_url=running.address() + "/v1", api_key="none", max_retries=0) as client:
        full = client.embeddings.create(model=name, input=["def a", "def a", "class B:"])
        first = client.embeddings.create(model=f"{name}:prefix-1", input=["def a", "class B:"])
        exact = client.embeddings.create(model=f"{name}:speculate", input="def a", encoding_format="float")
    vectors = [np.array(each.embedding) for each in (*full.data, *first.data, *exact.data)]
    assert all(abs(np.linalg.norm(vector) - 1) < 1e-5 for vector in vectors)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[5], atol=1e-5)
    assert abs(vectors[0] @ vectors[3]) < 0.99, "exits have states of their own"
    assert [each.index for each in full.data] == [0, 1, 2]
    assert full.usage.prompt_tokens == full.usage.total_tokens > 0


def test_both_spellings_are_the_same_numbers(client: httpx.Client) -> None:
    numbers, coded = (
        client.post("/v1/embeddings", json={"input": [5, 6], "encoding_format": kind}).json()["data"][0]
        for kind in ("float", "base64")
    )
    spelled = np.frombuffer(base64.b64decode(coded["embedding"]), dtype="<f4")
    np.testing.assert_allclose(spelled, numbers["embedding"], atol=1e-6)  # the second begins in a cache


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {}),
        ("input", {"input": ""}),
        ("input", {"input": []}),
        ("input", {"input": ["a"] * 129}),
        ("depth", {"input": "a", "depth": "wand"}),
        ("depth", {"input": "a", "depth": "prefix:9"}),
        ("pooling", {"input": "a", "pooling": "max"}),
        ("dimensions", {"input": "a", "dimensions": 8}),
        ("prompt", {"input": [[10**6]]}),
    ],
)
def test_what_cannot_be_done_is_refused(client: httpx.Client, param: str, fields: dict[str, Any]) -> None:
    answer = client.post("/v1/embeddings", json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
