"""`python -m papers check`: the catalogue whole, ladders, families, and what cannot be probed."""

from typing import Any

import pytest

from papers.dead_directions import catalogue as catalogue_module
from papers.dead_directions.catalogue import Cell


def test_every_cell_of_the_catalogue_is_as_predicted(call: Any) -> None:
    """All of it, as a user runs it: some ten seconds."""
    answer = call("check", "catalogue", "--json").json
    assert answer.keys() == {"cells", "seconds"}
    cells = answer["cells"]
    assert len(cells) >= 60
    assert {frozenset(cell) for cell in cells} == {frozenset(("name", "predicted", "measured", "ok", "note"))}
    assert [cell["name"] for cell in cells if not cell["ok"]] == []
    assert all(cell["note"] for cell in cells)
    read = [cell for cell in cells if cell["predicted"] is not None]
    assert all(abs(cell["predicted"] - cell["measured"]) <= 0.1 for cell in read)


@pytest.mark.parametrize("activation", ["linear", "relu", "gelu", "tanh"])
def test_a_ladder(activation: str, call: Any) -> None:
    words = ("--depth", 6, "--width", 8, "--activation", activation, "--json")
    answer = call("check", "ladder", *words).json
    assert answer.keys() == {"G", "A", "product"}
    assert answer["G"] == pytest.approx([10, 8, 6, 4, 2, 0], abs=0.01)
    assert answer["A"] == pytest.approx([0, 2, 4, 6, 8, 10], abs=0.01)
    assert answer["product"] == pytest.approx([10] * 6, abs=0.01)


def test_tables_for_people(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = call("check", "ladder", "--depth", 2).out
    assert "2.000" in ladder
    families = " ".join(call("check", "families").out.split())
    assert "superposition 5-2" in families
    cells = [
        Cell("chain: G_1", 2.0, 1.999, True, "a theorem"),
        Cell("chain: G_2", 0.0, 0.001, True, "a theorem"),
        Cell("chain: A_1[2]", 2.0, 3.0, False, "another"),
    ]

    def catalogue(*, seed: int, on_cell: Any) -> list[Cell]:
        for cell in cells:
            on_cell(cell, len(cells))
        return cells

    monkeypatch.setattr(catalogue_module, "catalogue", catalogue)
    answer = call("check", "catalogue")
    assert answer.code == 1, "a cell that is not as predicted is a failure"
    assert "not as predicted: chain: A_1[2]: 2.0 predicted, 3.0 measured" in answer.err
    assert "2 of 3 cells" in answer.out
    (row,) = [line for line in answer.out.splitlines() if "chain: G" in line]
    assert "2.00 0.00" in row, "the nodes of one kind share a row"


def test_families_in_json(call: Any) -> None:
    rows = call("check", "families", "--json").json["families"]
    assert {"family", "direction", "order", "fisher_slope", "kl_slope", "leading_ratio", "limit"} == rows[
        0
    ].keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ladder", "--depth", 0), "--depth is 0; it must be at least 1"),
        (("ladder", "--width", 1), "--width is 1; it must be at least 2"),
        (("ladder", "--activation", "sine"), "sine"),
        (("ladder", "--depth", 400), "leaves float64"),
        ((), "nothing was given to check; choose one of catalogue, ladder, families"),
    ],
)
def test_what_cannot_be_probed(words: tuple[object, ...], said: str, call: Any) -> None:
    assert said in call("check", *words).refusal
