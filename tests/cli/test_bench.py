import shutil
from pathlib import Path
from typing import Any

import pytest

from scan import Settings
from topograd.cli import bench as module
from topograd.cli.bench import curve_table, decode_table, kernel_table, monitors_table, scan_tables
from topograd.decode import calibrate
from topograd.decode.benchmark import EPS

SHORT = "--prompts 2 --prompt-tokens 4 --tokens 4 --rounds 1 --bytes 300 --rows 2"
TINY = (
    "--regions 3 --region-layers 1 --width 16 --heads 2 --vocab 11 --context 12 --segments 3 "
    "--scan-segments 3 --causal-rank 4 --rank 4 --scan-maps 2 --repeats 1"
)
NUMBERS = {"speedup": 1.234, "agreement": 0.99876, "identical": 0.83, "mean_stage": 3.21}


def test_what_is_measured_as_json(staged: Path, call: Any) -> None:
    answer = call("bench", "decode", staged, *SHORT.split(), "--json")
    results = answer.json
    assert f"measuring {staged}" in answer.err
    assert list(results) == [
        *("run", "runtime", "weights", "threads", "settings", "full", "prefix", "wand", "speculate"),
        *("sampled", "batch", "row_costs", "rows", "bandwidth_share", "ways"),
    ]
    assert (results["runtime"], results["weights"]) == ("onnx", "float32")
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
    monkeypatch.setattr(calibrate, "ROUNDS", 1)
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
    curve = shown(curve_table({"curve": [NUMBERS | {"rule": rule, "exits": [0.25] * 4} for rule in rules]}))
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
        ("--rounds many", "--rounds was given 'many'; it must be a whole number"),
        ("--rounds 100000", "more than 1000000 tokens would be written by each mode; ask for fewer"),
        ("--bytes 3", "too small for one window"),
        ("--bytes 20", "20 bytes are too little held-out text; give more --bytes"),
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


def test_scan_as_json(call: Any) -> None:
    answer = call("bench", "scan", *TINY.split(), "--json")
    results = answer.json
    assert results.keys() >= {"threads", "settings", "steps", "jacobians", "trimming", "scans", "agreement"}
    assert (results["settings"]["regions"], results["settings"]["scan_maps"]) == (3, [2])
    assert all(set(row) == {"name", "ratio", "spread", "goal", "met"} for row in results["steps"])
    assert results["agreement"]["worst"] < 1e-6
    assert answer.err.startswith("topograd: measuring bounded interfaces")


def test_scan_as_tables(call: Any) -> None:
    answer = call("bench", "scan", *TINY.split())
    assert answer.code == 0, answer.err
    for words in (
        "Training steps over the dense one",
        "A Jacobian, in forwards of its region",
        "A trimmed Jacobian over a larger one",
        "Suffix scans, microseconds",
        "gradients differ from autograd's by at most",
    ):
        assert words in answer.out


def test_the_scan_tables_fit_a_terminal() -> None:
    spread = {"median": 12.34, "low": 10.01, "high": 15.67}
    goal = {"ratio": 12.34, "spread": spread, "goal": 0.75, "met": False}
    other = {"ratio": float("nan"), "spread": spread, "goal": None, "met": None}
    rows = [{"name": "S=4 r=8 cumulative, pullback / every row", **goal}, {"name": "dense", **other}]
    scans = [{"maps": 256, "width": 16, "microseconds": dict.fromkeys(("matvec", "tree"), spread)}]
    results = {"threads": 2, "steps": rows, "jacobians": rows[1:], "trimming": rows, "scans": scans}
    more = {"agreement": {"worst": 3e-7}, "memory": {"a step": 0.5}}
    steps, jacobians, _, scan, memory = map(shown, scan_tables({**results, **more}))
    assert "0.50" in memory
    assert " │ 12.34 │ 10.01–15.67 │ ≤ 0.75 │  no │\n" in steps
    assert "│ dense " in steps
    assert " │     – │ 10.01–15.67 │      – │   – │\n" in steps
    assert "at most 3.0e-07 of their length" in steps
    assert "goal" not in jacobians
    assert "│  256 │    16 │     12 │   12 │" in scan
    assert "…" not in steps


def test_the_scan_is_measured_at_the_sizes_of_the_goals() -> None:
    settings = Settings()
    assert (settings.regions, settings.region_layers, settings.width, settings.context) == (6, 2, 256, 256)
    assert (settings.rank, settings.segments, settings.causal_rank, settings.batch) == (16, 8, 8, 1)


SMALL_KERNEL = (
    "--examples 6 --width 8 --depth 2 --growth-examples 3 --growth-width 4 --growth-depth 2 "
    "--transport-examples 3 --transport-width 4 --rounds 1"
)


def test_monitors_as_json_and_as_a_table(call: Any) -> None:
    words = "--seeds 1 --steps 24 --fault-at 21 --rounds 0 --json"
    found = call("bench", "monitors", *words.split()).json
    assert {"loss", "gradient_norm", "rank", "anisotropy"} <= found["signals"].keys()
    assert all({"lead", "false_alarms"} <= row.keys() for row in found["signals"].values())
    assert monitors_table(found).row_count == len(found["signals"])
    assert (
        "--fault-at is 30 of 24 steps"
        in call("bench", "monitors", "--steps", "24", "--fault-at", "30").refusal
    )


def test_kernel_as_json(call: Any) -> None:
    answer = call("bench", "kernel", *SMALL_KERNEL.split(), "--json")
    results = answer.json
    assert list(results) == ["threads", "settings", "kernel", "growth", "transport"]
    assert (results["settings"]["examples"], results["kernel"]["width"]) == (6, 8)
    assert results["kernel"]["relative_difference"] < 1e-5
    assert [row["doubled"] for row in results["growth"]] == ["", "M", "N", "L"]
    assert answer.err.startswith("topograd: measuring kernels")


def test_kernel_as_a_table(call: Any) -> None:
    answer = call("bench", "kernel", *SMALL_KERNEL.split())
    assert answer.code == 0, answer.err
    assert "K from fields against Jacobians" in answer.out
    assert "goals not met" in answer.out, "so small a kernel cannot meet them"
    assert answer.out.count("│ ") > 5


def test_the_kernel_table_fits_a_terminal() -> None:
    spread = {"median": 123.45, "low": 120.04, "high": 130.06}
    row: dict[str, Any] = {"examples": 512, "width": 512, "depth": 6, "relative_difference": 3e-7}
    row |= {"seconds": {"fields": {"median": 0.0567}}, "peak_bytes": {"fields": 36 * 2**20}}
    row |= {
        "faster": {**spread, "goal": 50.0, "met": True},
        "smaller": {"ratio": 88.8, "goal": 20.0, "met": True},
    }
    change = {"examples": 64, "width": 256, "depth": 6, "peak_bytes": 2**22, "as_matrices_bytes": 2**34}
    results = {"threads": 2, "kernel": row, "growth": [row], "transport": {**change, "met": True}}
    table = shown(kernel_table(results))
    assert "│ 512 │ 512 │ 6 │ 56.7 │  123.5 │ 120.0–130.1 │ 36.0 │    88.8 │  3e-07 │" in table
    words = " ".join(table.split())
    assert "goals 50 and 20; Δb for M = 64, N = 256, L = 6: 4.0 MiB, as matrices 16.0 GiB; goals met" in words
    assert "…" not in table
    missed = {**row, "smaller": {**row["smaller"], "met": False}}
    assert "goals not met" in " ".join(shown(kernel_table({**results, "kernel": missed})).split())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("kernel --examples 0", "topograd: --examples is 0; it must be at least 1"),
        ("kernel --rank 4", "Unrecognized options: --rank"),
        ("scan --segments 7", "S is 7 and the context 256; S must divide the context"),
        ("scan --rank 0", "rank r is 0; it must be at least 3"),
        ("scan --regions 2", "regions is 2; it must be at least 3"),
        ("scan --repeats 0", "repeats is 0; it must be at least 1"),
        ("scan --width 30", "width 30 does not split into 4 heads"),
        ("scan --tokens 4", "Unrecognized options: --tokens"),
        ("scan somewhere", "Unrecognized options: somewhere"),
        ("decode --rank 4", "Unrecognized options: --rank"),
        ("encode", "'encode' was given to bench; choose one of decode, prompts, scan, pipeline, kernel"),
        ("", "nothing was given to bench; choose one of decode, prompts, scan, pipeline, kernel"),
    ],
)
def test_one_kind_does_not_take_the_flags_of_the_other(words: str, why: str, call: Any) -> None:
    assert why in call("bench", *words.split()).refusal
