"""The page of an inspection, from a record as JSON holds it."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from raising import refused
from topograd.errors import RunError
from topograd.report.drawing import style
from topograd.report.geometry import (
    direction_panel,
    kernel_panel,
    spectra_panel,
    stream_panel,
    write_geometry,
)


def spectrum(size: int, rank: int) -> dict[str, Any]:
    values = [10.0**-i if i < rank else 0.0 for i in range(size)]
    return {
        "size": size,
        "rank": rank,
        "effective_rank": 1.5,
        "trace": sum(values),
        "places": list(range(size)),
        "values": values,
    }


def norm(exact: bool) -> dict[str, Any]:
    cosine, share = (1.0, 0.0) if exact else (0.19, 1.1e-2)
    return {
        "dimensions": 1,
        "cosine": cosine,
        "share": share,
        "samples": 9,
        "exact": exact,
        "found": cosine > 0.999,
        "without_massive": None,
    }


def direction(layer: str, kind: str, order: int | None, fisher: float | None) -> dict[str, Any]:
    known = order is not None
    return {
        "layer": layer,
        "kind": kind,
        "order": order,
        "interval": [order - 0.01, order + 0.01] if order is not None else None,
        "fisher": fisher,
        "share": {"n_beta": 500.0, "value": 0.5, "interval": [0.4, 0.6]} if order is not None else None,
        "dimensions": 1 if known else 16,
        "group": None if known else "GL(4) for each block",
    }


@pytest.fixture
def record() -> dict[str, Any]:
    return {
        "model": "runs/<b>odd</b>",
        "kind": "run",
        "step": 1200,
        "text": "the run's held-out text",
        "parameters": 12345,
        "loss": "cross-entropy",
        "fisher": "monte-carlo",
        "resolution": 1e-14,
        "stream": {
            "names": ["layers.0", "layers.1"],
            "rank": 8,
            "width": 8,
            "ratios": [0.9, 0.0],
            "effective_ranks": [7.0, 6.0, 5.0],
            "verdict": "below resolution after layers.1",
        },
        "stream_without_massive": None,
        "norms": {"norm.a": norm(True), "norm.b": norm(False)},
        "layers": {f"layers.{i}": {"A": spectrum(6, 6), "G": spectrum(5, 4)} for i in range(4)},
        "uncovered": {"embedding.weight": "used by embedding"},
        "directions": [
            direction("layers.0.attention.value", "symmetry", None, None),
            direction("joint: layers.0, layers.1", "dead", 2, 1e-9),
            direction("layers.1.mlp.up", "live", 1, 3e-4),
        ],
        "refused": ["something <i>never</i> ran"],
        "sentences": ["Read it on <i>your</i> text."],
    }


class Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_and_says_everything(record: dict[str, Any], tmp_path: Path) -> None:
    page = write_geometry(tmp_path / "geometry.html", json.loads(json.dumps(record))).read_text()
    seen = Seen()
    seen.feed(page)
    assert seen.tags.count("svg") == 2 * 4, "each figure in two layouts"
    assert not {"script", "img", "image", "link", "b", "i"} & set(seen.tags), "nothing loaded, all escaped"
    for words in ("below resolution after layers.1", "1 of 1", "embedding.weight", "used by embedding"):
        assert words in seen.text
    assert "something <i>never</i> ran" in seen.text
    assert page.index("Read it on ") < page.index("healthy</th>") < page.index("<figure"), "it comes first"
    assert "Read it on <i>your</i> text." in seen.text
    assert "runs/<b>odd</b>" in seen.text
    assert "mathdefault" not in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["geometry.html"]
    again = write_geometry(tmp_path / "again.html", record).read_text()
    assert again == page, "the same record gives the same bytes"


def test_tables_carry_the_numbers(record: dict[str, Any]) -> None:
    with style():
        stream, kernels, spectra = (panel(record) for panel in (stream_panel, kernel_panel, spectra_panel))
    assert stream.table is not None
    assert stream.table.rows[1] == ("layers.0", "0.9", "6.0")
    assert kernels.table is not None
    assert [row[1] for row in kernels.table.rows] == ["1", "none"]
    assert spectra.table is not None
    assert spectra.table.rows[0] == ("layers.0", "6", "6", "1.5", "5", "4", "1.5")


def test_directions_and_rows_without_massive_ones(record: dict[str, Any]) -> None:
    without = {**record["stream"], "ratios": [0.95, 0.9], "effective_ranks": [7.0, 7.0, 6.5]}
    record["stream_without_massive"] = without | {"verdict": "preserved"}
    with style():
        stream, directions = stream_panel(record), direction_panel(record)
    assert stream.table is not None
    assert stream.table.rows[2] == ("layers.1", "0", "5.0", "0.9", "6.5")
    assert "verdict: preserved" in stream.caption
    assert directions.table is not None
    assert directions.table.rows[0][1:3] == ("symmetry", "–")
    assert directions.table.rows[1][1:4] == ("dead", "2", "1.99 to 2.01")


def test_without_a_stream_norms_or_a_loss(record: dict[str, Any], tmp_path: Path) -> None:
    record |= {"stream": None, "norms": {}, "fisher": None, "loss": None, "uncovered": {}, "refused": []}
    record |= {"kind": "bert", "step": None}
    for layer in record["layers"].values():
        layer["G"] = None
    page = write_geometry(tmp_path / "geometry.html", record).read_text()
    assert not {'id="stream"', 'id="kernels"'} & set(page.split()), "no section without a figure"
    assert {'id="directions"', 'id="spectra"'} <= set(page.split())
    assert "A model of type bert" in page
    assert "no gradients" in page
    assert "Nothing was left out." in page


def test_a_model_without_layers_and_a_place_that_cannot_be_written(
    record: dict[str, Any], tmp_path: Path
) -> None:
    record |= {"stream": None, "norms": {}, "layers": {}}
    assert "no layer of the model has factors" in write_geometry(tmp_path / "page.html", record).read_text()
    with refused(RunError, setting="out", given=str(tmp_path / "no" / "geometry.html")):
        write_geometry(tmp_path / "no" / "geometry.html", record)
