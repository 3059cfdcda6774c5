import shutil
from pathlib import Path
from typing import Any

import pytest

from calls import shown
from topograd.cli import bench as module
from topograd.cli.bench import curve_table, decode_table
from topograd.decode.benchmark import EPS
from topograd.decode.calibration import measure
from topograd.runtime.choice import preferred

SHORT = "--prompts 2 --prompt-tokens 4 --tokens 4 --rounds 1 --bytes 300 --rows 2"
NUMBERS = {"speedup": 1.234, "agreement": 0.99876, "identical": 0.83, "mean_stage": 3.21}


def test_what_is_measured_as_json(staged: Path, call: Any) -> None:
    answer = call("bench", "decode", staged, *SHORT.split(), "--json")
    results = answer.json
    assert f"measuring {staged}" in answer.err
    assert list(results) == [
        *(
            "run",
            "runtime",
            "weights",
            "threads",
            "tokens_per_second",
            "settings",
            "full",
            "prefix",
            "wand",
            "speculate",
        ),
        *("sampled", "batch", "row_costs", "rows", "bandwidth_share", "ways"),
    ]
    assert (results["runtime"], results["weights"]) == (preferred(), "float32")
    assert results["rows"]["1"] == 1.0
    assert results["bandwidth_share"] > 0
    assert results["run"] == str(staged)
    assert results["settings"] == {
        "prompts": 2,
        "prompt_tokens": 4,
        "tokens": 4,
        "rounds": 1,
        "bytes": 300,
        "rows": 2,
    }
    assert results["full"]["tokens_per_second"] > 0
    assert [prefix["stages"] for prefix in results["prefix"]] == [1]
    assert results["wand"].keys() >= {"speedup", "agreement", "mean_stage", "exits"}
    assert 0 <= results["wand"]["agreement"] <= 1
    assert sum(results["wand"]["exits"]) == pytest.approx(1)
    assert results["speculate"].keys() >= {"speedup", "acceptance", "mismatches", "ties"}
    assert results["speculate"]["mismatches"] == 0
    assert not (staged / "calibration.json").exists(), "nothing is kept"


def test_tables_for_people_and_the_reference_by_default(
    staged: Path, call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = shutil.copytree(staged, tmp_path / "shipped")
    monkeypatch.setattr(module, "REFERENCE", folder)
    monkeypatch.setattr(measure, "ROUNDS", 1)
    answer = call("bench", "decode", *SHORT.split())
    assert answer.code == 0, answer.err
    assert f"measuring {folder}" in answer.err
    assert "shipped: ways of running it" in answer.out
    ways = ("full", "prefix:1", "wand:", "speculate", "full, 2 rows", "speculate, temperature 0.8")
    for way in ways:
        assert f"│ {way}" in answer.out
    assert "Leaving early: speedup against teacher-forced agreement" in answer.out


def test_the_curve_fits_a_terminal() -> None:
    rules = ["sum-of-bounds", "rival-gain", *(f"flip-rate:{eps}" for eps in EPS)]
    curve = shown(
        curve_table({"wand": {"curve": [NUMBERS | {"rule": rule, "exits": [0.25] * 4} for rule in rules]}})
    )
    for rule in rules:
        assert f"│ {rule} " in curve
    assert "…" not in curve


def test_the_ways_fit_a_terminal() -> None:
    names = ["full", "wand:flip-rate:0.0005", "speculate (off)", "speculate, temperature 0.8"]
    extra: dict[str, object] = {"tokens_per_second": 1234.5, "acceptance": None}
    ways = [NUMBERS | extra | {"way": name} for name in names]
    table = shown(decode_table({"run": "some/where/run", "threads": 2, "ways": ways}))
    for name in names:
        assert f"│ {name} " in table
    for number in ("1234", "1.23", "0.9988", "0.83", "3.21", "–"):
        assert f" {number} " in table
    assert "…" not in table


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--prompts 0", "topograd: --prompts is 0; it must be at least 1"),
        ("--tokens -3", "topograd: --tokens is -3; it must be at least 1"),
        ("--rounds many", "--rounds is 'many'; it must be a whole number"),
        ("--rounds 100000", "more than 1000000 tokens would be written by each mode; ask for fewer"),
        ("--bytes 3", "too small for one window"),
        ("--bytes 20", "--bytes is 20; it must be enough for two windows"),
        ("--stages 2", "Unrecognized options: --stages"),
    ],
)
def test_bad_settings_are_one_line(words: str, why: str, staged: Path, call: Any) -> None:
    answer = call("bench", "decode", staged, *words.split())
    assert (answer.code, answer.out) == (2, "")
    said = [line for line in answer.err.splitlines() if "measuring" not in line]
    assert len(said) == 1
    assert why in said[0]


def test_what_cannot_be_measured(staged: Path, backprop: Path, call: Any) -> None:
    answer = call("bench", "decode", backprop, *SHORT.split())
    assert (answer.code, answer.out) == (2, "")
    assert "has 1 predicting stages of 1; early exits and drafts need" in answer.err.splitlines()[-1]
    assert "it does not exist" in call("bench", "decode", staged / "nowhere").refusal
    assert "decode" in call("bench").refusal
    assert "decode" in call("bench", "encode", staged).refusal


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("decode --rank 4", "Unrecognized options: --rank"),
        ("encode", "'encode' was given to bench; choose one of decode, serve, pipeline"),
        ("", "nothing was given to bench; choose one of decode, serve, pipeline"),
    ],
)
def test_what_is_no_bench(words: str, why: str, call: Any) -> None:
    assert why in call("bench", *words.split()).refusal
