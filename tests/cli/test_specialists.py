"""The verbs of specialists, as a program calls them: attach, finetune, probe, compose, generate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from topograd.runs.folder import Run

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    line = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}
    path.write_text((json.dumps(line) + "\n") * 6)
    return path


@pytest.fixture
def spec(straight: Run, call: Call, tmp_path: Path) -> Path:
    folder = tmp_path / "spec"
    found = call("attach", straight.folder, "--layers", 1, "--out", folder, "--json").json
    assert found["insertion_max_abs_logit_delta"] == 0.0
    assert found["first_layer"] == 2
    return folder


def tune(call: Call, folder: Path, chat: Path, *words: Any) -> Any:
    return call("finetune", folder, "--data", chat, "--steps", 4, "--context", 16, *words)


def test_from_a_base_to_two_composed_specialists(
    straight: Run, call: Call, spec: Path, chat: Path, tmp_path: Path
) -> None:
    found = tune(call, spec, chat, "--json").json
    assert found["base_max_abs_logit_delta"] == 0.0
    assert found["steps"] == 4
    second = tmp_path / "second"
    call("attach", straight.folder, "--out", second, "--rank", 2, "--json").json  # noqa: B018
    tune(call, second, chat, "--json").json  # noqa: B018
    base = straight.folder
    words = ("--prompt", "stage", "--tokens", 5, "--json")
    made = call("generate", base, "--specialists", f"{spec},{second}*0.5", *words).json
    assert made["specialists"] == {"spec": 1.0, "second": 0.5}
    assert made["tokens"] == 5
    spoken = call("generate", base, "--specialists", spec, "--chat", *words).json
    assert [message["role"] for message in spoken["messages"]] == ["user", "assistant"]
    plain = call("generate", base, *words).json
    assert "specialists" not in plain
    read = call("compose", base, "--specialists", f"{spec},{second}", "--data", chat, "--json").json
    assert set(read["texts"][0]["nats"]) == {"base", "spec", "second", "together"}
    assert call("compose", base, "--specialists", spec, "--data", chat).out.startswith("nats a token")


def test_probe_has_every_stage(straight: Run, call: Call, spec: Path) -> None:
    words = ("probe", straight.folder, "--prompt", "sta", "--target", "ge")
    found = call(*words, "--json").json
    names = {"stage", "layers", "specialist", "rank", "logit", "probability", "sequence", "top"}
    assert found["stages"][0].keys() == names
    assert len(found["stages"]) == 2
    more = call(*words, "--specialist", spec, "--passage", "loss", "--json").json
    assert len(more["stages"]) == 3
    assert len(more["with_passage"]["stages"]) == 3
    assert more["stages"][2]["logit"] == more["stages"][1]["logit"], "inserted, it changes nothing"
    spoken = ("probe", straight.folder, "--prompt", "", "--target", "d", "--specialist", spec, "--chat")
    assert "the base sees 16" in call(*spoken).refusal, "User: and Assistant: are most of its context"
    assert "path: spec" in call(*words, "--specialist", spec).out
    assert "ladder" in call("probe", "--help").out


def test_a_stopped_training_goes_on(straight: Run, call: Call, spec: Path, chat: Path) -> None:
    assert tune(call, spec, chat, "--stop-after", 2, "--json").json["finished"] is False
    assert "continue it with --resume" in tune(call, spec, chat).refusal
    assert call("finetune", spec, "--resume", "--json").json["finished"] is True
    assert "leave out --steps" in call("finetune", spec, "--resume", "--steps", 9).refusal
    table = tune(call, spec, chat)
    assert table.code == 0
    assert "base Δ logit" in table.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["attach", "BASE", "--out", "NEW", "--layers", "0"], "--layers is 0; it must be at least 1"),
        (["attach", "BASE", "--out", "NEW", "--rank", "2", "--whole-head"], "--rank and --whole-head"),
        (["attach", "BASE", "--out", "NEW", "--token", "x"], "has no source"),
        (["attach", "BASE", "--out", "SPEC"], "not an empty folder"),
        (["attach", "SPEC", "--out", "NEW"], "is not a run"),
        (["finetune", "SPEC"], "--data is not given"),
        (["finetune", "SPEC", "--data", "nowhere"], "--data is 'nowhere', which does not exist"),
        (["finetune", "BASE", "--data", "nowhere"], "is no specialist"),
        (["finetune", "SPEC", "--data", "x", "--rate", "-1"], "--rate is -1"),
        (["finetune", "SPEC", "--data", "CHAT", "--context", "99"], "--context is 99; the base sees 16"),
        (["probe", "BASE", "--prompt", "x", "--target", ""], "--target is empty"),
        (["probe", "BASE", "--prompt", "x"], "target"),
        (["generate", "BASE", "--specialists", "nowhere"], "is no specialist: it does not exist"),
        (["generate", "BASE", "--specialists", "SPEC", "--depth", "wand"], "wand is calibrated"),
        (["generate", "BASE", "--specialists", "SPEC", "--weights", "int8"], "--specialists run in torch"),
        (["compose", "BASE", "--specialists", "SPEC"], "--data is not given"),
    ],
)
def test_bad_input_is_one_line(
    straight: Run, call: Call, spec: Path, chat: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    places = {"BASE": straight.folder, "SPEC": spec, "NEW": tmp_path / "new", "CHAT": chat}
    assert said in call(*(places.get(word, word) for word in words)).refusal
    assert not (tmp_path / "new").exists()


def test_a_router_and_an_alignment(straight: Run, call: Call, spec: Path, chat: Path, tmp_path: Path) -> None:
    tune(call, spec, chat, "--json").json  # noqa: B018
    base, router = straight.folder, tmp_path / "router"
    words = ("route", base, "--specialists", spec, "--out", router)
    found = call(*words, "--data", chat, "--json").json
    assert found["regret"] >= 0
    assert call(*words, "--prompt", "a?", "--json").json["specialists"] in ({}, {"spec": 1.0})
    assert "give --data to train a router, or --prompt" in call(*words).refusal
    carried = call("align", spec, "--to", base, "--out", tmp_path / "new", "--data", chat, "--json").json
    assert carried["kind"] == "minor"
    assert carried["nats"]["aligned"] == pytest.approx(carried["nats"]["old base with it"], rel=1e-3)
    assert (
        "--steps is given and --data is not"
        in call("align", spec, "--to", base, "--out", tmp_path / "x", "--steps", 3).refusal
    )
