"""docs/reference/matrix.md is what its script makes of the tests and of the errors in the code."""

from __future__ import annotations

from pathlib import Path

import pytest

import site_matrix


def test_the_page_is_what_the_script_makes() -> None:
    made = site_matrix.page()
    assert site_matrix.PAGE.read_text(encoding="utf-8") == made, "run python docs/_ext/site_matrix.py"


def test_every_cell_of_models_and_uses_is_decided() -> None:
    marks = [c for c in site_matrix.covers(site_matrix.ROOT / "tests") if c.feature is None]
    proven = {(cover.model, use) for cover in marks for use in cover.uses}
    cells = {(model, use) for model in site_matrix.MODELS for use in site_matrix.USES}
    assert cells == proven | site_matrix.ERRORS.keys()
    assert not proven & site_matrix.ERRORS.keys()


def test_markers_that_name_no_cell_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    for words, why in {
        '"gpt", "fly"': "is no cell",
        '"cnn", "train"': "is no cell",
        '"gpt"': "is no cell",
        '"gpt", "train", feature="magic"': "feature 'magic'",
    }.items():
        (folder / "test_x.py").write_text(f"@pytest.mark.covers({words})\ndef test_x(): ...\n")
        with pytest.raises(ValueError, match=why):
            list(site_matrix.covers(folder))


def test_an_error_that_is_gone_is_noticed() -> None:
    with pytest.raises(ValueError, match="does not have the error"):
        site_matrix.Notes().link(("src/topograd/errors.py", "no line says this"))
