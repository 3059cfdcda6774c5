"""Specialists that requests switch on: each text has its own, and what it would have alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raising import refused
from topograd.errors import ConfigError
from topograd.runs.session import LoadedTextRun
from topograd.serve.chats import Chats
from topograd.serve.request_schema import SHARED, RequestError, read
from topograd.serve.server import open_served
from topograd.serve.settings import Limits
from topograd.serve.texts import OnProgress
from topograd.specialists.attach import new_specialist
from topograd.specialists.records import spelled
from topograd.specialists.tokens import NewToken


def _listener(tokens: list[int]) -> OnProgress:
    """Whoever listens keeps the tokens."""
    return lambda choice: lambda progress: tokens.extend(each.token for each in progress.written)


@pytest.fixture(scope="module")
def base(make_session: Callable[..., LoadedTextRun]) -> LoadedTextRun:
    return make_session(3)


@pytest.mark.covers("gpt", "serve", feature="specialists")
def test_rows_with_and_without_specialists(base: LoadedTextRun, tmp_path: Path) -> None:
    new_specialist(tmp_path / "quiet", base)
    served = open_served(base.run.folder, "base", Limits(rows=2), [tmp_path / "quiet"])
    assert served.specialists is not None
    assert served.specialists.names == ["quiet"]

    from topograd.serve.metrics import Counters
    from topograd.serve.scheduler import Scheduler

    model = served.model
    scheduler = Scheduler(model.session, model.engine, served.limits, Counters(), served.specialists)
    asked = read(SHARED, {"seed": 0, "temperature": 0})
    told: dict[str, list[int]] = {"with": [], "without": []}
    active: dict[str, list[str]] = {"with": ["quiet"], "without": []}
    for name, tokens in told.items():
        (job,) = served.jobs(asked | {"specialists": active[name]}, [[100, 101]], 5, _listener(tokens))
        scheduler.add([job])
    while scheduler.step():
        pass
    assert len(told["with"]) == 5
    assert told["with"] == told["without"], "it has learned nothing yet, so it adds nothing"
    expected = served.specialists.generate([[100, 101]], [{"quiet": 1.0}], 5)
    assert told["with"] == expected[0]
    with refused(ConfigError, setting="depth", given="prefix:1"):
        scheduler.strategy("prefix:1", True, (("quiet", 1.0),))


def test_prompts_are_spelled_as_generate_spells_them(base: LoadedTextRun, tmp_path: Path) -> None:
    """A specialist's own tokens are known in its requests alone, and so is the template of its chats."""
    new_specialist(tmp_path / "talks", base, tokens=[NewToken("<|go|>", "g")])
    served = open_served(base.run.folder, "base", Limits(rows=2), [tmp_path / "talks"])
    words = served.vocabulary({"specialists": ["talks"]})
    assert words is not None
    new = words.size - 1
    assert served.specialists is not None
    model = served.specialists.model({"talks": 1.0})
    assert served.prompts("a<|go|>", words) == [model.encode("a<|go|>")] == [[*b"a", new]]
    assert served.prompts(["", [new]], words) == [model.encode(""), [new]] == [[256], [new]]
    assert served.prompts("<|go|>", served.vocabulary({"specialists": []})) == [[*b"<|go|>"]]
    with pytest.raises(RequestError) as caught:
        served.prompts([new])
    assert (caught.value.param, caught.value.status) == ("prompt", 400)
    chats, said = Chats(served), [{"role": "user", "content": "hi"}]
    try:
        assert chats.prompt(said) == [*b"hi"]
        assert chats.prompt(said, words) == words.encode_chat(spelled(words, ["hi"])[0])
    finally:
        chats.close()
