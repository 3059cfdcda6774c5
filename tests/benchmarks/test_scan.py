"""The benchmark runs every row, compares like with like and judges by its goals. No time is asserted."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import scan as bench
from calls import shown
from papers.latent_bounded_interfaces.measure import build_model
from scan import Settings, bench_scan, main, row, scan_tables
from topograd.errors import ConfigError
from topograd.exec.gradient import GradientEngine
from topograd.interfaces.engines import Scan
from topograd.timing import Spread

SMALL = Settings(
    regions=3,
    region_layers=1,
    width=16,
    heads=2,
    vocab=11,
    context=12,
    segments=3,
    scan_segments=3,
    causal_rank=4,
    rank=4,
    scan_maps=(2, 5),
    repeats=1,
)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return bench_scan(SMALL)


def test_other_architectures_have_no_jacobian_by_hand() -> None:
    found = bench_scan(replace(SMALL, architecture="mamba2"))
    assert not any("pullback" in name for table in ("steps", "jacobians") for name in names(found[table]))
    assert found["agreement"]["worst"] < 1e-3


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows]


def test_the_steps(results: dict[str, Any]) -> None:
    assert names(results["steps"]) == [
        "S=3 r=4 tail, autograd",
        "r=4 whole mean, autograd",
        *(f"r=4 whole mean, scan by {way}" for way in ("loop", "batched", "pullback")),
        *(f"S=3 r=4 tail, scan by {way}" for way in ("loop", "pullback")),
    ]
    assert all(row["ratio"] > 0 for row in results["steps"])
    assert [row["goal"] for row in results["steps"]] == [0.75, None, None, None, 4.4, None, None]


def test_the_jacobians_and_what_trimming_leaves(results: dict[str, Any]) -> None:
    causal = [f"S=3 r=4 {pool}, {how}" for pool in ("tail", "cumulative") for how in HOWS]
    assert names(results["jacobians"]) == [f"r=4 whole mean, {way}" for way in bench.WAYS] + causal
    assert names(results["trimming"]) == [
        f"S=3 r=4 {pool}, {pair}" for pool in ("tail", "cumulative") for pair in PAIRS
    ]
    assert {line["goal"] for line in results["trimming"]} == {0.5}
    assert {line["goal"] for line in results["jacobians"]} == {None}


HOWS = ["every row", "loop", "loop, untrimmed", "batched", "batched, untrimmed", "pullback"]
PAIRS = [
    "loop / every row",
    "loop / untrimmed",
    "batched / every row",
    "batched / untrimmed",
    "pullback / every row",
]


def test_the_scans(results: dict[str, Any]) -> None:
    assert [(scan["maps"], scan["width"]) for scan in results["scans"]] == [(2, 4), (5, 4)]
    for scan in results["scans"]:
        assert list(scan["microseconds"]) == ["matvec", "chunked", "tree"]
        assert all(time["median"] > 0 for time in scan["microseconds"].values())


def test_what_was_timed_is_the_same_gradient(results: dict[str, Any]) -> None:
    agreement = results["agreement"]
    assert list(agreement["relative"]) == names(results["steps"])[2:]
    assert agreement["worst"] == max(agreement["relative"].values()) < 1e-6
    assert agreement["dtype"] == "float32"


def test_multiply_adds_are_counted(results: dict[str, Any]) -> None:
    """An interface whose region runs everywhere saves nothing, and has maps of its own besides."""
    counted = results["multiply_adds"]
    lean, published, scan, _ = counted.values()
    assert lean < 1 < published < scan, "a scan has Jacobians besides"


def test_memory_of_every_step(results: dict[str, Any]) -> None:
    assert results["memory"].keys() == {step["name"] for step in results["steps"]}
    assert all(held > 0 for held in results["memory"].values())
    lean, published, *_ = results["memory"].values()
    assert lean < published, "positions that nobody reads are left out"


def test_a_wrong_engine_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.train_step

    def wrong(*args: Any, gradient: GradientEngine) -> Any:
        return real(*args, scale=1.01 if isinstance(gradient, Scan) else 1.0, gradient=gradient)

    monkeypatch.setattr(bench, "train_step", wrong)
    steps = bench._steps(SMALL)
    models = {step.interface: build_model(SMALL, step.interface) for step in steps}
    assert bench._agreement(SMALL, steps, models)["worst"] == pytest.approx(0.01, rel=1e-3)


def test_it_is_plain_json(results: dict[str, Any]) -> None:
    assert json.loads(json.dumps(results, allow_nan=False))["settings"]["scan_maps"] == [2, 5]
    assert results["threads"] == torch.get_num_threads()


def test_a_goal_is_the_largest_ratio_that_meets_it() -> None:
    spread = Spread(0.75, 0.7, 0.8)
    assert row("lean", spread, 0.75) == {
        "name": "lean",
        "ratio": 0.75,
        "spread": {"median": 0.75, "low": 0.7, "high": 0.8},
        "goal": 0.75,
        "met": True,
    }
    assert row("lean", spread, 0.74)["met"] is False
    assert row("lean", spread)["met"] is None


def test_ratios_are_of_the_right_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With clocks that show what they were built for, the ratios are known."""

    def shown(clocks: Mapping[str, Callable[[], float]], rounds: int, warmup: int) -> dict[str, list[float]]:
        return {name: [seconds(name)] * rounds for name in clocks}

    def seconds(name: str) -> float:
        untrimmed, rows = "untrimmed" in name, "every row" in name
        return 2.0 if name == "forward" else 40.0 if rows else 16.0 if untrimmed else 8.0

    monkeypatch.setattr(bench, "read_in_turns", shown)
    cumulative = bench.replace(SMALL.causal, pool="cumulative")
    interfaces = (SMALL.published, SMALL.causal, cumulative)
    models = {interface: build_model(SMALL, interface) for interface in interfaces}
    in_forwards, trimming = bench._jacobians(SMALL, models, interfaces)
    for line in in_forwards:
        assert line["ratio"] == seconds(line["name"]) / 2
    assert {line["name"].rpartition(" / ")[2]: line["ratio"] for line in trimming} == {
        "every row": 0.2,
        "untrimmed": 0.5,
    }


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"segments": 7}, "S is 7 and the context 256; S must divide the context"),
        ({"scan_segments": 512}, "S is 512 and the context 256"),
        ({"segments": 1}, "segments is 1; it must be at least 2"),
        ({"rank": 0}, "rank is 0; it must be at least 3"),
        ({"causal_rank": 2}, "rank is 2; it must be at least 3"),
        ({"repeats": 0}, "repeats is 0; it must be at least 1"),
        ({"scan_maps": (4, 0)}, "scan_maps is 0; it must lie in 1"),
        ({"regions": 2}, "regions is 2; it must be at least 3"),
    ],
)
def test_bad_settings(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Settings(**settings)


def test_as_json_and_as_tables(
    results: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "bench_scan", lambda settings: results)
    main(SMALL, json=True)
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["settings"]["regions"], found["settings"]["scan_maps"]) == (3, [2, 5])
    assert said.err.startswith("topograd: measuring bounded interfaces")
    main(SMALL)
    told = capsys.readouterr().out
    for words in (
        "Training steps over the dense one",
        "A Jacobian, in forwards of its region",
        "A trimmed Jacobian over a larger one",
        "Suffix scans, microseconds",
        "gradients differ from autograd's by at most",
    ):
        assert words in told


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


def test_large_models_that_fit_are_allowed() -> None:
    Settings(width=1024, context=1024, batch=8)
