"""Every command that reads a model takes MODEL: a folder of Hugging Face, or a GGUF file, as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from topograd.cli.main import main
from topograd.convert.model_argument import resolve_model
from topograd.errors import RunError

Source = Callable[[str], tuple[Path, Any]]
WORDS = {
    "generate": ["--prompt", "read", "--tokens", "3", "--json"],
    "chat": ["--prompt", "read", "--tokens", "3", "--json"],
    "score": ["--context", "def", "--continuation", " read", "--json"],
    "eval": ["--bytes", "800", "--json"],
    "probe": ["--prompt", "def", "--target", " read", "--json"],
    "compare": ["--json"],
    "inspect": ["--scans", "1", "--out", "page.html", "--json"],
    "export": ["--out", "there", "--json"],
}


@pytest.fixture(scope="module")
def models(source: Source, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = source("llama")[0]
    out = tmp_path_factory.mktemp("gguf") / "out"
    assert main(["export", str(folder), "--format", "gguf", "--out", str(out)]) == 0
    return {"folder": folder, "gguf": out / "model.gguf"}


@pytest.mark.parametrize("form", ["folder", "gguf"])
@pytest.mark.parametrize("command", WORDS)
def test_a_command_takes_any_model(
    command: str,
    form: str,
    models: dict[str, Path],
    call: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = call(command, models[form], *WORDS[command]).json
    shown = answer["runs"][0] if command == "compare" else answer
    if command in ("generate", "chat", "eval", "compare", "export"):
        assert shown["run"] == str(resolve_model(models[form]))
    elif command != "score":
        assert shown["model" if command == "inspect" else "run"] == str(models[form])
    if command == "inspect":
        assert answer["kind"] == ("llama" if form == "folder" else "run")


def test_both_forms_are_the_same_model(models: dict[str, Path], call: Any) -> None:
    texts = {call("generate", model, *WORDS["generate"]).json["text"] for model in models.values()}
    assert len(texts) == 1


def test_a_converted_model_has_one_exit_to_calibrate(models: dict[str, Path], call: Any) -> None:
    assert "need at least 2" in call("calibrate", models["gguf"]).refusal


def test_the_server_opens_the_converted_run(
    models: dict[str, Path], call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_served(folder: Path, *_: object) -> None:
        raise RunError(f"it would serve {folder}")

    monkeypatch.setattr("topograd.serve.server.open_served", open_served)
    refusal = call("serve", models["gguf"], "--port", 0).refusal
    assert refusal == f"topograd: it would serve {resolve_model(models['gguf'])}\n"


def test_bench_takes_one_too(models: dict[str, Path], call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def bench(session: Any, *_: object) -> dict[str, Any]:
        seen.append(session.run.folder)
        return {"ways": []}

    monkeypatch.setattr("topograd.decode.benchmark.bench_decode", bench)
    assert call("bench", "decode", models["folder"], "--json").json == {"ways": []}
    assert seen == [resolve_model(models["folder"])]


@pytest.mark.parametrize("command", [*WORDS, "calibrate", "serve", "bench decode"])
def test_a_model_that_is_not_there(command: str, call: Any) -> None:
    words = [] if command in ("calibrate", "serve", "bench decode") else WORDS[command]
    refusal = call(*command.split(), "nowhere", *words).refusal
    assert refusal.startswith(
        "topograd: there is no model at nowhere: it does not exist; give a run's folder"
    )


def test_a_folder_of_models_names_them(call: Any, tmp_path: Path) -> None:
    """As that of search pareto, whose trials are runs, or of Hugging Face's Trainer."""
    for trial in ("00000", "00001"):
        (tmp_path / "study" / "trials" / trial).mkdir(parents=True)
        (tmp_path / "study" / "trials" / trial / "config.toml").touch()
    first = tmp_path / "study" / "trials" / "00000"
    for command in ("generate", "report", "eval"):
        assert f"give one of its 2 models, as {first}" in call(command, tmp_path / "study").refusal
    (tmp_path / "trainer" / "checkpoint-500").mkdir(parents=True)
    (tmp_path / "trainer" / "checkpoint-500" / "config.json").touch()
    said = call("generate", tmp_path / "trainer").refusal
    assert f"give {tmp_path / 'trainer' / 'checkpoint-500'}" in said
