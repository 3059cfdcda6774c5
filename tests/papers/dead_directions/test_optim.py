import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from optimizer_step import OptimizerSettings
from papers.dead_directions import ablations, equivariance, peer_cell
from papers.dead_directions.equivariance import cases
from papers.dead_directions.optim import cell_tables, equivariance_table, peers_table
from topograd.cli.bench import optim_table

TINY = "--layers 1 --width 8 --vocab 16 --repeats 2"


def shown(table: Table) -> str:
    """A table on a terminal of 80 columns."""
    file = io.StringIO()
    Console(file=file, width=80).print(table)
    return file.getvalue()


def remember(asked: list[Any], given: Any) -> dict[str, Any]:
    """An answer without work."""
    asked.append(given)
    return {}


def test_equivariance_as_json(call: Any) -> None:
    answer = call("optim", "equivariance", "--steps", 10, "--seed", 1, "--json").json
    assert (answer["steps"], answer["lr"], answer["seed"]) == (10, 0.01, 1)
    assert [row["name"] for row in answer["gauges"]] == [case.name for case in cases()]
    for row in answer["gauges"]:
        assert row.keys() >= {"name", "frozen64", "frozen32", "sgd64", "adamw64", "drift"}
        assert max(row["frozen64"], row["sgd64"]) <= 1e-13
        assert row["frozen32"] <= 1e-5
        assert (row["adamw64"] > 1e-3) == row["multiplicative"]


def test_equivariance_is_asked_at_the_size_of_the_goals(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(equivariance, "equivariance", lambda *given: remember(asked, given))
    assert call("optim", "equivariance", "--json").json == {}
    assert asked == [(200, 0.01, 0)]


def test_the_equivariance_table_fits_a_terminal() -> None:
    row: dict[str, Any] = dict.fromkeys(("frozen64", "frozen32", "sgd64", "adamw64", "drift"), 1.2e-16)
    rows = [row | {"name": case.name, "adamw_drift": 0.5} for case in cases()]
    table = shown(equivariance_table({"steps": 200, "gauges": rows}))
    assert "From θ and g·θ, 200 steps: how far apart" in table
    assert "│ HeadShift with rows │    1e-16 │    1e-16 │ 1e-16 │ 1e-16 │ 1e-16 │   5e-01 │" in table
    assert "…" not in table


def test_the_table_of_peers_fits_a_terminal() -> None:
    peers = {name: {"residual": 1.2e-16, "drift": 0.5} for name in equivariance.PEERS}
    table = shown(peers_table({"gauges": [{"name": case.name, "peers": peers} for case in cases()]}))
    assert "│ HeadShift with rows │   1e-16 │ 5e-01 │ 1e-16 │ 5e-01 │ 1e-16 │ 5e-01 │" in table
    assert "…" not in table


def test_cells_as_json_and_as_tables(call: Any) -> None:
    words = ("optim", "cells", "--steps", 300, "--seeds", 1)
    answer = call(*words, "--json")
    assert answer.err == ""
    found = answer.json
    assert list(found) == ["steps", "seeds", "A", "B", "C", "D", "E"]
    assert [row["value"] for row in found["C"]] == [1.0, 0.75, 0.5, 0.0]
    assert all(row["alignment"] == 1.0 for row in found["A"])
    told = call(*words).out
    assert "A, C, D, E: log G_dd by log t, 300 steps" in told
    assert "B: pairs of w = u² - v² that reach zero" in told


def test_the_cell_tables_fit_a_terminal_and_say_what_is_missing() -> None:
    knob = {"driver": "ParametricEpsFloor", "knob": "eps", "value": 1e-4}
    row = {**knob, "slope": 2.00049, "r2": 1.0, "alignment": 0.9994, "t_last": 2.9e-4, "asymptotic": True}
    turned = row | {"slope": None, "r2": None, "alignment": 0.5, "asymptotic": False}
    reach = {**knob, "below": 0.604, "exact_zeros": 0.0, "smallest": 5e-140, "loss": 2e-5}
    tables = cell_tables({"steps": 20_000, "A": [row], "B": [reach], "C": [turned], "D": [], "E": []})
    bridge, pairs = map(shown, tables)
    assert "│ A ParametricEpsFloor │ ε = 0.0001 │ 2.0005 │ 1.0000 │ 0.999 │  3e-04 │  yes │" in bridge
    assert "│ C ParametricEpsFloor │ ε = 0.0001 │      – │      – │ 0.500 │  3e-04 │   no │" in bridge
    assert "│        60 % │   0 % │   5e-140 │ 2e-05 │" in pairs
    assert "…" not in bridge + pairs


def test_a_long_run_says_so(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ablations, "cells", lambda *given: remember(asked, given))
    monkeypatch.setattr(peer_cell, "peers", lambda steps: [])
    answer = call("optim", "cells", "--json")
    assert asked == [(20_000, 3)]
    assert "a minute or two" in answer.err


def test_bench_as_json_and_as_a_table(call: Any) -> None:
    answer = call("bench", "optim", *TINY.split(), "--json")
    results = answer.json
    assert results.keys() >= {"step_ratio_vs_adamw", "memory_ratio_vs_adamw", "goals", "met"}
    assert results["settings"]["width"] == 8
    assert results["step_ratio_vs_adamw"] > 0
    assert "measuring optimizer steps" in answer.err
    assert "DDCAdam over AdamW" in call("bench", "optim", *TINY.split()).out


def test_the_bench_table() -> None:
    results: dict[str, Any] = {
        "parameters": 10_316_800,
        "covered": 5_900_000,
        "threads": 2,
        "memory_ratio_vs_adamw": 1.000004,
    }
    results |= {"step_ratio_vs_fused": 4.44, "step_ratio_vs_adamw": 1.62}
    results |= {"step_spread": {"low": 1.5, "median": 1.62, "high": 1.7}}
    results |= {
        "step_seconds": {"ddc_adam": {"median": 0.0324}, "adamw": {"median": 0.02}},
        "goals": {"step": 1.5, "memory": 1.1},
    }
    table = shown(optim_table(results))
    assert "DDCAdam over AdamW, 2 threads" in table
    assert "│ step  │  1.62 │ 1.50–1.70 │ ≤ 1.5 │  no │" in table
    assert "│ state │  1.00 │ 1.00–1.00 │ ≤ 1.1 │ yes │" in table
    assert "32.4 ms and 20.0 ms; gauges cover 5.9M of 10.3M parameters" in " ".join(table.split())
    assert "both fused, by processor time: 4.44" in " ".join(table.split())


def test_the_bench_is_of_ten_million_parameters() -> None:
    settings = OptimizerSettings()
    shapes = 3 * settings.vocab * settings.width + settings.layers * 12 * settings.width**2
    assert 9.5e6 < shapes < 10.5e6


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("optim", "nothing was given to optim; choose one of equivariance, cells"),
        ("optim sweep", "'sweep' was given to optim; choose one of equivariance, cells"),
        ("optim equivariance --steps 0", "topograd: --steps is 0; it must be at least 1"),
        ("optim equivariance --lr -1", "topograd: --lr is -1.0; it must be at least 1e-12"),
        ("optim equivariance --lr fast", "--lr was given 'fast'; it must be a number"),
        ("optim equivariance --lr inf", "--lr was given 'inf'; it must be a finite number"),
        ("optim cells --steps 100", "--steps is 100; it must be at least 300"),
        ("optim cells --steps 300 --seeds 0", "--seeds is 0; it must be at least 1"),
        ("bench optim --layers 0", "--layers is 0; it must be at least 1"),
        ("bench optim --rank 3", "Unrecognized options: --rank"),
    ],
)
def test_bad_input_is_one_line(words: str, why: str, call: Any) -> None:
    assert why in call(*words.split()).refusal


def test_each_question_explains_itself(call: Any) -> None:
    assert "usage: topograd optim {equivariance,cells} ..." in call("optim", "--help").out
    for question in ("equivariance", "cells"):
        answer = call("optim", question, "--help")
        assert (answer.code, answer.err) == (0, "")
        assert answer.out.startswith(f"usage: topograd optim {question}")
