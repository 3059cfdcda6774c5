"""The verbs of specialists, as a program calls them: attach, finetune, generate, route, align."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from topograd.cli.main import INTERRUPTED
from topograd.runs.folder import Run
from topograd.training.trainer import Task, Trainer

Call = Callable[..., Any]


def tune(call: Call, folder: Path, chat: Path, *words: Any) -> Any:
    return call("specialist", "finetune", folder, "--data", chat, "--steps", 4, "--context", 16, *words)


def test_from_a_base_to_two_composed_specialists(
    straight: Run, call: Call, spec: Path, chat: Path, tmp_path: Path
) -> None:
    found = tune(call, spec, chat, "--json").json
    assert found["base_max_abs_logit_delta"] == 0.0
    assert found["steps"] == 4
    second = tmp_path / "second"
    call("specialist", "attach", straight.folder, "--out", second, "--rank", 2, "--json").json  # noqa: B018
    tune(call, second, chat, "--json").json  # noqa: B018
    base = straight.folder
    words = ("--prompt", "stage", "--tokens", 5, "--json")
    made = call("generate", base, "--specialists", f"{spec},{second}*0.5", *words).json
    assert made["specialists"] == {"spec": 1.0, "second": 0.5}
    assert made["tokens"] == 5
    spoken = call("chat", base, "--specialists", spec, *words).json
    assert [message["role"] for message in spoken["messages"]] == ["user", "assistant"]
    plain = call("generate", base, *words).json
    assert "specialists" not in plain


def test_the_base_may_be_any_model(call: Call, source: Any, chat: Path, tmp_path: Path) -> None:
    folder, spec = source("llama")[0], tmp_path / "spec"
    assert call("attach", folder, "--out", spec, "--json").json["identity"] == 0.0
    tune(call, spec, chat, "--base", folder, "--json").json  # noqa: B018
    words = (folder, "--specialists", spec, "--data", chat, "--rows", 4, "--json")
    assert call("compose", *words).json["specialists"] == {"spec": 1.0}
    assert call("route", *words, "--out", tmp_path / "router").code == 0
    assert call("align", spec, "--to", folder, "--out", tmp_path / "there", "--json").code == 0


def test_train_takes_the_chats_that_finetune_takes(
    straight: Run, call: Call, chat: Path, tmp_path: Path
) -> None:
    words = ["--lora-rank", 2, "--data", chat, "--steps", 2, "--out", tmp_path / "lora", "--json"]
    trained = call("train", "--init", straight.folder, *words)
    assert (trained.code, trained.json["steps"], trained.json["finished"]) == (0, 2, True)
    bpb = call("eval", tmp_path / "lora", "--json").json["bpb"]["prediction"]
    assert bpb == pytest.approx(trained.json["bpb"]["prediction"], rel=1e-5)  # its LoRA is merged here


def test_a_stopped_training_goes_on(straight: Run, call: Call, spec: Path, chat: Path) -> None:
    assert tune(call, spec, chat, "--stop-after", 2, "--json").json["finished"] is False
    assert "continue it with --resume" in tune(call, spec, chat).refusal
    assert call("specialist", "finetune", spec, "--resume", "--json").json["finished"] is True
    assert "leave out --steps" in call("specialist", "finetune", spec, "--resume", "--steps", 9).refusal
    table = tune(call, spec, chat)
    assert table.code == 0
    assert "base Δ logit" in table.out
    page = call("report", spec, "--json").json["report"]
    assert "At all 2 checkpoints the base" in Path(page).read_text()
    assert "leave --against" in call("report", spec, "--against", straight.folder).refusal


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["specialist", "attach", "BASE", "--out", "NEW", "--layers", "-1"],
            "--layers is -1; it must be at least 0",
        ),
        (
            ["specialist", "attach", "BASE", "--out", "NEW", "--rank", "2", "--whole-head"],
            "--rank and --whole-head",
        ),
        (
            ["specialist", "attach", "BASE", "--out", "NEW", "--token", "x"],
            "it must be the new token, =, and a related word",
        ),
        (["specialist", "attach", "BASE", "--out", "SPEC"], "is taken; give an empty folder, or a new one"),
        (["specialist", "attach", "SPEC", "--out", "NEW"], "is an adapter and no model"),
        (["report", "SPEC"], "was not trained yet"),
        (["specialist", "finetune", "SPEC"], "--data is not given"),
        (
            ["specialist", "finetune", "SPEC", "--data", "nowhere"],
            "--data is 'nowhere'; it must be a file or a folder that exists",
        ),
        (["specialist", "finetune", "BASE", "--data", "nowhere"], "is no specialist"),
        (["specialist", "finetune", "SPEC", "--data", "x", "--rate", "-1"], "--rate is -1"),
        (
            ["specialist", "finetune", "SPEC", "--data", "CHAT", "--context", "99"],
            "--context is 99; the base sees 16",
        ),
        (["generate", "BASE", "--specialists", "nowhere"], "is no specialist: it does not exist"),
        (["generate", "BASE", "--specialists", "SPEC", "--depth", "wand"], "wand is calibrated"),
        (["generate", "BASE", "--router", "SPEC"], "--specialists is not given; give A,B"),
        (["generate", "BASE", "--specialists", "SPEC", "--router", "SPEC"], "it must be a router"),
        (
            ["generate", "BASE", "--specialists", "SPEC*0.5", "--router", "SPEC"],
            "without weights: a router chooses",
        ),
        (["specialist", "finetune", "SPEC", "--data", "CHAT", "--tasks", "nowhere"], "nowhere is no folder"),
        (["specialist", "finetune", "SPEC", "--data", "CHAT", "--task-items", "0"], "--task-items is 0"),
    ],
)
def test_bad_input_is_one_line(
    straight: Run, call: Call, spec: Path, chat: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    places = {"BASE": straight.folder, "SPEC": spec, "NEW": tmp_path / "new", "CHAT": chat}
    assert said in call(*(places.get(word, word) for word in words)).refusal
    assert not (tmp_path / "new").exists()


def interrupt_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """SIGTERM arrives within a step."""
    before = Trainer._one_step

    def one_step(trainer: Trainer[Task]) -> list[float]:
        if trainer.step == step:
            signal.raise_signal(signal.SIGTERM)
        return before(trainer)

    patch.setattr(Trainer, "_one_step", one_step)


def test_a_signal_saves_and_says_how_to_go_on(
    straight: Run, call: Call, spec: Path, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        stopped = tune(call, spec, chat, "--json")
    assert stopped.code == INTERRUPTED
    assert (
        f"stopped and saved at step 3 of 4; continue with: topograd specialist finetune {spec} --resume"
        in stopped.err
    )
    assert call("specialist", "finetune", spec, "--resume", "--json").json["steps"] == 4
    words = ("specialist", "route", straight.folder, "--specialists", spec, "--data", chat, "--json", "--out")
    whole = call(*words, tmp_path / "whole").json
    with monkeypatch.context() as patch:
        interrupt_at(patch, 9)
        assert call(*words, tmp_path / "parts").code == INTERRUPTED
    assert not (tmp_path / "parts").exists()
    assert (tmp_path / "parts.work" / "checkpoints" / "step-00000010").is_dir()
    assert call(*words, tmp_path / "parts").json == whole
    assert not (tmp_path / "parts.work").exists()


def test_a_router_and_an_alignment(straight: Run, call: Call, spec: Path, chat: Path, tmp_path: Path) -> None:
    tune(call, spec, chat, "--json").json  # noqa: B018
    base, router = straight.folder, tmp_path / "router"
    words = ("specialist", "route", base, "--specialists", spec, "--out", router)
    found = call(*words, "--data", chat, "--json").json
    assert found["regret"] >= 0
    chosen = call(*words, "--prompt", "a?", "--json").json["specialists"]
    assert chosen in ({}, {"spec": 1.0})
    given = ("--specialists", spec, "--router", router, "--tokens", 4, "--json")
    routed = call("generate", base, *given, "--prompt", "a?").json
    assert routed["specialists"] == chosen, "the router is asked about the prompt"
    other = ("--specialists", spec) if chosen else ()
    assert (
        routed["text"]
        == call("generate", base, *other, "--tokens", 4, "--prompt", "a?", "--json").json["text"]
    )
    assert call("chat", base, *given, "--prompt", "a?").json["specialists"] in (
        {},
        {"spec": 1.0},
    )
    assert "give --data to train a router, or --prompt" in call(*words).refusal
    carried = call(
        "specialist", "align", spec, "--to", base, "--out", tmp_path / "new", "--data", chat, "--json"
    ).json
    assert carried["kind"] == "minor"
    assert carried["nats"]["aligned"] == pytest.approx(carried["nats"]["old base with it"], rel=1e-3)
    more = ("--out", tmp_path / "more", "--data", chat, "--context", 16, "--steps", 2, "--json")
    trained = call("specialist", "align", spec, "--to", base, *more).json["nats"]
    assert trained["aligned and trained"] < trained["trained anew"], "it had learned the text already"
    assert trained["aligned and trained"] < trained["aligned"]
    assert (
        "--steps is given and --data is not"
        in call("specialist", "align", spec, "--to", base, "--out", tmp_path / "x", "--steps", 3).refusal
    )
