"""`topograd retrofit`, and what it makes in the hands of `generate` and `calibrate`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from topograd.cli.main import main


@pytest.fixture(scope="module")
def retrofitted(staged: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(staged, tmp_path_factory.mktemp("retrofitted") / "run")
    words = [
        "retrofit",
        str(folder),
        "--tokens",
        "256",
        "--vocabulary",
        "64",
        "--data",
        str(corpus),
        "--json",
    ]
    assert main(words) == 0
    return folder


def test_the_adapter_as_json(staged: Path, corpus: Path, tmp_path: Path, call: Any) -> None:
    words = ["retrofit", staged, "--tokens", 128, "--epochs", 1, "--data", corpus, "--out", tmp_path / "side"]
    found = call(*words, "--text", tmp_path / "text", "--json").json
    assert {"run", "adapter", "tokens", "own", "vocabulary", "coverage", "parameters", "agreement"} < set(
        found
    )
    assert found["adapter"] == str(tmp_path / "side")
    assert found["tokens"] >= 128
    again = call(*words, "--text", tmp_path / "text")
    assert "exists and is not an empty folder; pass another --out" in again.refusal
    (tmp_path / "side" / "README.md").unlink()
    shown = call(*words[:-1], tmp_path / "other", "--text", tmp_path / "text")
    assert shown.code == 0
    assert "it says what the model says, by step" in shown.out
    assert "--depth speculate:draft+lookup" in shown.out


@pytest.mark.parametrize(
    "depth", ["speculate:draft", "speculate:table", "speculate:draft+lookup", "speculate:lookup+table+draft"]
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_drafts_write_what_full_depth_writes(
    retrofitted: Path, call: Any, depth: str, temperature: int
) -> None:
    words = ["generate", retrofitted, "--prompt", "def ", "--tokens", 24, "--json"]
    made = call(*words, "--depth", depth, "--temperature", temperature).json
    assert made["drafts"] >= made["accepted"] >= 0
    assert sum(who["drafts"] for who in made["by_drafter"].values()) == made["drafts"]
    if not temperature:
        assert made["text"] == call(*words, "--depth", "full").json["text"]


def test_a_smaller_run_drafts(retrofitted: Path, staged: Path, call: Any) -> None:
    words = ["generate", retrofitted, "--prompt", "def ", "--tokens", 24, "--json"]
    full = call(*words, "--depth", "full").json["text"]
    assert call(*words, "--draft", staged).json["text"] == full
    assert call(*words, "--depth", f"speculate:lookup+{staged}").json["text"] == full
    assert call(*words, "--draft", retrofitted / "draft").json["text"] == full


def test_calibrated_drafts(retrofitted: Path, call: Any) -> None:
    found = call("calibrate", retrofitted, "--bytes", 600, "--json").json["tuning"]
    chosen = found["greedy"]
    assert chosen is None or set(chosen["drafters"]) <= {"lookup", "table", "draft", "stage 1"}
    words = ["generate", retrofitted, "--prompt", "def ", "--tokens", 24, "--json"]
    made = call(*words, "--depth", "speculate").json
    assert made["text"] == call(*words, "--depth", "full").json["text"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--depth", "speculate:nobody"], "names the drafter 'nobody', which is unknown; use lookup, table"),
        (["--depth", "speculate:draft+3"], "at most one of them a prefix, a draft stage or a model"),
        (["--depth", "speculate:lookup+lookup"], "it must be one or more, each once"),
        (["--depth", "speculate:draft"], "has no draft stage; make one with: topograd retrofit"),
        (["--draft", "nowhere"], "--draft 'nowhere' does not exist"),
    ],
)
def test_bad_drafters_are_named(
    staged: Path, retrofitted: Path, call: Any, words: list[str], why: str
) -> None:
    run = retrofitted if "draft+3" in words[1] else staged
    assert why in call("generate", run, "--tokens", 4, *words).refusal


def test_a_model_of_another_tokenizer_is_refused(staged: Path, call: Any) -> None:
    from topograd.pretrained import REFERENCE

    refusal = call("generate", staged, "--tokens", 4, "--draft", REFERENCE).refusal
    assert "has another tokenizer than" in refusal


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--tokens", "3"], "--tokens is 3; it must be at least 64"),
        (["--vocabulary", "1"], "--vocabulary is 1; it must be at least 2"),
        (["--weights", "int3"], "--weights"),
        (["--epochs", "0"], "--epochs is 0.0; it must be at least"),
    ],
)
def test_bad_numbers_are_named(staged: Path, call: Any, words: list[str], why: str) -> None:
    assert why in call("retrofit", staged, *words).refusal
