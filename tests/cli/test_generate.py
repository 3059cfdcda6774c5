from pathlib import Path
from typing import Any

import pytest

from topograd.cli import generate as module


def test_a_continuation_as_json(staged: Path, call: Any) -> None:
    answer = call("generate", staged, "--prompt", "def ", "--tokens", 32, "--stages", 1, "--json").json
    assert answer.keys() == {"run", "prompt", "text", "stages", "tokens"}
    assert (answer["run"], answer["prompt"]) == (str(staged), "def ")
    assert (answer["stages"], answer["tokens"]) == (1, 32)
    assert 0 < len(answer["text"]) <= 32


def test_all_stages_by_default_and_each_prefix_is_a_model(staged: Path, call: Any) -> None:
    words = ["generate", staged, "--prompt", "stack", "--tokens", 60, "--json", "--temperature", 1]
    whole = call(*words).json
    assert whole["stages"] == 2
    assert whole == call(*words, "--stages", 2).json
    assert whole["text"] != call(*words, "--stages", 1).json["text"]


def test_the_text_streams_to_a_terminal(staged: Path, call: Any) -> None:
    words = ["generate", staged, "--prompt", "loss é", "--tokens", 40, "--seed", 3, "--temperature", 1.5]
    answer = call(*words)
    assert answer.code == 0
    assert answer.out == "loss é" + call(*words, "--json").json["text"] + "\n"


def test_seeds_temperature_and_top_k(staged: Path, call: Any) -> None:
    def text(*words: object) -> str:
        written: str = call("generate", staged, "--tokens", 30, "--json", *words).json["text"]
        return written

    assert text() == text("--seed", 5), "the likeliest token needs no seed"
    assert text("--temperature", 1, "--seed", 1) == text("--temperature", 1, "--seed", 1)
    assert text("--temperature", 1, "--seed", 1) != text("--temperature", 1, "--seed", 2)
    assert text("--temperature", 1, "--top-k", 1) == text()


def test_an_empty_prompt_starts_a_document(staged: Path, call: Any) -> None:
    answer = call("generate", staged, "--tokens", 0, "--json").json
    assert (answer["prompt"], answer["text"], answer["tokens"]) == ("", "", 0)
    assert call("generate", staged, "--prompt", "", "--tokens", 5, "--json").json["tokens"] == 5


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--stages 3", "has 2: give 1 to 2"),
        ("--stages 0", "--stages is 0"),
        ("--tokens -1", "tokens is -1"),
        ("--tokens 100001", "--tokens is 100001; at most 100000"),
        ("--tokens some", "Error parsing --tokens"),
        ("--temperature -1", "temperature is -1.0; it must be finite and at least 0"),
        ("--temperature nan", "temperature is nan"),
        ("--temperature inf", "temperature is inf"),
        ("--top-k 0", "top-k is 0"),
        ("--seed -1", "seed is -1"),
        ("--prompt", "Missing value for argument '--prompt'"),
    ],
)
def test_bad_questions_are_one_line(words: str, why: str, staged: Path, call: Any) -> None:
    assert why in call("generate", staged, "--json", *words.split()).refusal


def test_a_prompt_that_is_too_long_or_no_text(
    staged: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_PROMPT", 20)
    why = call("generate", staged, "--prompt", "x" * 21).refusal
    assert "the prompt has 21 characters; give at most 20" in why
    assert "half a surrogate pair" in call("generate", staged, "--prompt", "\udcff").refusal
    assert "it does not exist" in call("generate", staged / "nowhere").refusal
