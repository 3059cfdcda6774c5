"""The page of a run on pictures stands alone, escapes what it is told, and shows its pictures."""

import base64
import re
from pathlib import Path

from topograd.report.data import RunData
from topograd.report.images import png, write_image_report

PICTURE = {"pixels": [[[0, 255], [128, 3]]], "label": 1, "guess": 2, "confidence": 0.75}
STAGE = {
    "right": [PICTURE],
    "wrong": [PICTURE],
    "leaving": [],
    "corrected": False,
    "accuracy": 0.5,
    "share": 0.5,
    "accuracy_of_leaving": None,
}
SHOWN = {"threshold": 0.9, "looked_through": 7, "stages": [STAGE, STAGE]}
READING = {"prediction": 0.9, "prefix": [0.8, 0.9], "sum": 0.91, "mean": 0.91, "shrinkage": 0.9}
EXITS = [{"threshold": 0.9, "accuracy": 0.88, "depth": 0.6, "leaving": [0.8, 0.2]}]


def test_the_page(tmp_path: Path) -> None:
    evaluation = {"accuracy": READING, "exits": EXITS, "steps": 5, "images": 7}
    run = RunData("<run>", {"model": {"kind": "mlp"}}, [], evaluation)
    page = write_image_report(tmp_path / "report.html", run, run, SHOWN).read_text()
    assert "img-src data:" in page
    assert "<script" not in page
    assert "This network on images (mlp) is" in page
    assert "&lt;run&gt;" in page
    assert page.count("data:image/png;base64,") == 4
    assert "90.00" in page
    assert (tmp_path / "figures" / "accuracy.svg").exists()
    assert (tmp_path / "figures" / "exit-curve.png").exists()


def test_a_run_that_was_never_read_gets_its_page(tmp_path: Path) -> None:
    run = RunData("run", {}, [], {})
    page = write_image_report(tmp_path / "report.html", run, None, SHOWN | {"stages": [STAGE]}).read_text()
    assert "the run was not evaluated" in page
    assert "one exit" in page


def test_pictures_are_png() -> None:
    for pixels in ([[[0, 255]]], [[[1]], [[2]], [[3]]]):
        assert png(pixels).startswith(b"\x89PNG")
    found = re.search(r"base64,([^\"]+)", f'base64,{base64.b64encode(png([[[1]]])).decode()}"')
    assert found
