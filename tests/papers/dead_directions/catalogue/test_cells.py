"""The table: what makes a cell ok, and what it covers."""

from dataclasses import replace

import pytest

from papers.dead_directions.catalogue import Cell, catalogue, cells, compare
from papers.dead_directions.catalogue.cells import _cell, architectures, tolerance
from papers.dead_directions.catalogue.probing import probe
from topograd.geometry.rules import Attention, Chain, GatedStack, predict


def test_the_table_is_large_and_covers_every_rule() -> None:
    networks = architectures()
    said = [p for network in networks for p in predict(network)]
    assert len(networks) >= 25
    assert len(said) >= 60
    assert len({str(network) for network in networks}) == len(networks), "names tell networks apart"
    assert {p.expected for p in said} == {"rate", "zero", "refusal"}
    sources = " ".join(p.source for p in said)
    for place in ("21", "36", "43", "103", "106", "112"):
        assert f"Theorem {place}" in sources


def test_cells_arrive_one_by_one_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "architectures", lambda: (Chain(2), GatedStack(1)))
    monkeypatch.setattr(cells, "SHARES", ((3, 20_000),))
    monkeypatch.setattr(cells, "LEAKS", (8,))
    seen: list[tuple[Cell, int]] = []
    found = catalogue(on_cell=lambda cell, total: seen.append((cell, total)))
    assert [cell for cell, _ in seen] == found
    assert {total for _, total in seen} == {len(found)}
    assert all(cell.ok for cell in found)
    assert found == catalogue(), "a seed fixes everything"


def test_a_wrong_prediction_is_not_ok() -> None:
    chain = Chain(3)
    right, found = predict(chain)[0], probe(chain, samples=100)[0]
    assert _cell(chain, right, found, 0.01).ok
    assert not _cell(chain, replace(right, slope=6.0), found, 0.01).ok
    assert not _cell(chain, replace(right, slope=None, expected="zero"), found, 0.01).ok
    assert not _cell(chain, replace(right, slope=None, expected="refusal"), found, 0.01).ok


def test_a_refusal_for_another_reason_is_not_the_one_predicted() -> None:
    chain = Chain(4, norm="layernorm", norm_at=(1, 2, 3), live="identity")
    found = probe(chain, samples=100, window=(1e-2, 0.1))[0]
    assert found.rate.refused is not None
    cell = _cell(chain, predict(chain)[0], found, 0.05)
    assert not cell.ok
    assert "not asymptotic" in cell.note
    said = replace(predict(chain)[0], slope=None, expected="refusal")
    assert not _cell(chain, said, found, 0.05).ok


def test_explained_cells_say_what_happened() -> None:
    rotated = compare(Chain(3, activation="gelu", rotation=0.1))
    assert all(
        cell.ok and cell.measured is None and "theorem-reach exceeded" in cell.note for cell in rotated
    )
    square = compare(Chain(3, loss="cross-entropy", head="square"))
    gauge = [cell for cell in square if "lambda_min" in cell.name]
    assert len(gauge) == 3
    assert all(cell.ok and "gauge zero" in cell.note for cell in gauge)


def test_tolerances_follow_the_smoothness() -> None:
    assert tolerance(Chain(3, activation="relu")) == 0.01
    assert tolerance(Chain(3, activation="gelu")) == 0.05
    assert tolerance(Chain(3, norm="rmsnorm", norm_at=(1,))) == 0.05
    assert tolerance(Attention(2)) == 0.05
