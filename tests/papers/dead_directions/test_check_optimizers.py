from typing import Any

import pytest

from calls import shown
from papers.dead_directions import ablations, equivariance, peer_cell
from papers.dead_directions.check_optimizers import cell_tables, equivariance_table, peers_table
from papers.dead_directions.equivariance import cases


def remember(asked: list[Any], given: Any) -> dict[str, Any]:
    """An answer without work."""
    asked.append(given)
    return {}


def test_equivariance_as_json(call: Any) -> None:
    answer = call("check", "equivariance", "--steps", 10, "--seed", 1, "--json").json
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
    assert call("check", "equivariance", "--json").json == {}
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
    words = ("check", "cells", "--steps", 300, "--seeds", 1)
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
    answer = call("check", "cells", "--json")
    assert asked == [(20_000, 3)]
    assert "a minute or two" in answer.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("sweep", "'sweep' was given to check; choose one of catalogue, ladder, families, equivariance"),
        ("equivariance --steps 0", "topograd: --steps is 0; it must be at least 1"),
        ("equivariance --lr -1", "topograd: --lr is -1.0; it must be at least 1e-12"),
        ("equivariance --lr fast", "--lr is 'fast'; it must be a number"),
        ("equivariance --lr inf", "--lr is 'inf'; it must be a finite number"),
        ("cells --steps 100", "--steps is 100; it must be at least 300"),
        ("cells --steps 300 --seeds 0", "--seeds is 0; it must be at least 1"),
    ],
)
def test_bad_input_is_one_line(words: str, why: str, call: Any) -> None:
    assert why in call("check", *words.split()).refusal


def test_each_question_explains_itself(call: Any) -> None:
    for question in ("equivariance", "cells"):
        answer = call("check", question, "--help")
        assert (answer.code, answer.err) == (0, "")
        assert answer.out.startswith(f"usage: python -m papers check {question}")
