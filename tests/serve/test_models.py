"""Several models behind one server: opened when they are asked for, closed by memory, and by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from topograd.cli.main import main
from topograd.errors import RunError
from topograd.pretrained import REFERENCE
from topograd.serve.server import Running, bind, open_served
from topograd.serve.settings import Limits
from topograd.serve.texts import ServedModel
from waiting import LIMIT

LIMITS = Limits(rows=2, waiting=8, seconds=60, grace=2)


@pytest.fixture
def opened() -> list[str]:
    return []


@pytest.fixture
def client(served: ServedModel, opened: list[str], run_server: Callable[..., Any]) -> Iterator[httpx.Client]:
    """Three names of one model, of which two fit into memory."""

    def opener(name: str) -> Callable[[], ServedModel]:
        def open_() -> ServedModel:
            opened.append(name)
            return ServedModel(served.model, LIMITS, name=name)

        return open_

    size = sum(p.numel() * p.element_size() for p in served.model.session.stack.parameters())
    openers = {name: opener(name) for name in ("one", "two", "three")}
    running = Running(openers["one"](), bind("127.0.0.1", 0), None, openers, 2.5 * size)
    stop = run_server(running)
    with httpx.Client(base_url=running.address(), timeout=LIMIT, trust_env=False) as made:
        made.headers["x-open"] = ""
        made.running = running  # type: ignore[attr-defined]
        yield made
    stop()


def ask(client: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "def ", "max_tokens": 4, "temperature": 0}
    return client.post("/v1/completions", json=body)


def test_least_recently_used_models_are_closed(client: httpx.Client, opened: list[str]) -> None:
    models = client.running.models  # type: ignore[attr-defined]
    texts = {}
    for name, still in (
        ("one", {"one"}),
        ("two:prefix-1", {"one", "two"}),
        ("one", {"one", "two"}),
        ("three", {"one", "three"}),
        ("two:full", {"three", "two"}),
        ("one", {"two", "one"}),
    ):
        answer = ask(client, name)
        assert answer.status_code == 200, answer.text
        texts[name] = answer.json()["choices"][0]["text"]
        assert set(models.open) == still
    assert opened == ["one", "two", "three", "two", "one"]
    assert texts["one"] == texts["three"] == texts["two:full"]
    assert client.get("/health").json()["status"] == "ok"


def test_names_and_lists(client: httpx.Client) -> None:
    listed = [entry["id"] for entry in client.get("/v1/models").json()["data"]]
    assert "one:speculate" in listed
    assert {"one", "two", "three"} <= set(listed)
    assert client.get("/v1/models/two").json()["id"] == "two"
    answer = ask(client, "four")
    assert answer.status_code == 404
    assert "'one', 'two', 'three'" in answer.json()["error"]["message"]
    body = {"model": "three", "prompt": "def "}
    assert client.post("/tokenize", json=body).json()["count"] > 0


def test_a_model_is_opened_once_for_many(client: httpx.Client, opened: list[str]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: ask(client, "two"), range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert opened == ["one", "two"]


def test_a_model_that_cannot_be_opened(
    served: ServedModel, run_server: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> ServedModel:
        raise RunError("it is damaged", remedy="restore /secret/path")

    openers = {"one": lambda: served, "bad": fail}
    first = ServedModel(served.model, LIMITS, name="one")
    running = Running(first, bind("127.0.0.1", 0), None, openers)
    stop = run_server(running)
    with httpx.Client(base_url=running.address(), timeout=LIMIT, trust_env=False) as client:
        answer = ask(client, "bad")
        assert answer.status_code == 503
        assert "secret" not in answer.text
        assert ask(client, "one").status_code == 200
    stop()
    assert "it is damaged" in capfd.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [["--name", "a,b"], ["--name", "a:b"], ["--name", ""], ["--memory", "0"], ["--prompt-cache-gb", "-1"]],
)
def test_names_and_sizes_are_checked_first(flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *flags]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert flags[0] in line


def test_two_folders_of_one_name(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(REFERENCE), str(REFERENCE), "--port", "0"]) == 2
    assert "--name" in capfd.readouterr().err


def test_a_missing_model_is_said_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(REFERENCE), "no/such/model", "--port", "0"]) == 2
    assert "no/such/model" in capfd.readouterr().err


def test_the_real_thing_opens_again() -> None:
    """What is closed leaves nothing behind that a second opening would meet."""
    first = open_served(REFERENCE, "a", LIMITS)
    second = open_served(REFERENCE, "a", LIMITS)
    assert first.model.generate("def ", 4) == second.model.generate("def ", 4)
