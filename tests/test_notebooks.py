"""Notebooks: executed whole, in small, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = {
    "every-prefix-predicts": "A model whose every prefix predicts",
    "faster-hugging-face-model": "A faster Hugging Face model on a CPU",
    "fine-tune-without-forgetting": "Fine-tune without forgetting",
    "what-is-flat": "What is flat in this checkpoint",
}


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    read = json.loads(notebook.read_text(encoding="utf-8"))
    assert read["nbformat"] == 4
    return [cell for cell in read["cells"] if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_the_four_are_there() -> None:
    titles = {path.stem: source(cells(path, "markdown")[0]).splitlines()[0] for path in NOTEBOOKS}
    assert titles == {name: f"# {title}" for name, title in NAMES.items()}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    code = [source(cell) for cell in cells(notebook, "code")]
    assert "TOPOGRAD_NOTEBOOK_SMALL" in code[0], "the first cell has the sizes"
    environment = {**os.environ, "TOPOGRAD_NOTEBOOK_SMALL": "1", "OMP_NUM_THREADS": "1"}
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join(code), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stripped_and_its_links_lead_somewhere(notebook: Path) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(notebook, "code"))
    words = "\n".join(source(cell) for cell in cells(notebook, "markdown"))
    links = re.findall(r"\]\(([^)#]+)\)", words)
    assert links, "every notebook names the page that bears its numbers"
    pages = [(FOLDER / link).resolve() for link in links]
    for number in re.findall(r"\d+\.\d+|\d+,\d\d\d", re.sub(r"\]\([^)]*\)", "", words)):
        assert any(number in page.read_text(encoding="utf-8") for page in pages), number


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_uses_the_surface_alone(notebook: Path) -> None:
    code = "\n".join(source(cell) for cell in cells(notebook, "code"))
    assert "import topograd as tg" in code
    assert not re.search(r"^(from|import) topograd\.|^from topograd import", code, re.MULTILINE)
