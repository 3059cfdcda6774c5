"""Cards say where a model comes from and what was measured; licences are never guessed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from topograd.cli.main import main
from topograd.convert.card import card, origin_of_folder, origin_of_gguf
from topograd.convert.importing import import_model
from topograd.runs.folder import Run

Source = Callable[[str], tuple[Path, Any]]


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# x", "apache-2.0"),
        ('---\nlicense: "mit"\n---\n', "mit"),
        ("# x\nlicense: mit\n", None),
        ("---\nlanguage: en\n---\nlicense: mit\n", None),
        ("---\nlicense: [a\n---\n", None),
        ("", None),
    ],
)
def test_the_licence_is_what_a_folder_says(tmp_path: Path, text: str, licence: str | None) -> None:
    (tmp_path / "README.md").write_text(text)
    assert origin_of_folder(tmp_path)["licence"] == licence


def test_the_licence_is_what_a_file_says() -> None:
    said = origin_of_gguf(Path("m.gguf"), {"general.name": "M", "general.license": "apache-2.0"})
    assert said == {"name": "M", "licence": "apache-2.0"}
    assert origin_of_gguf(Path("m.gguf"), {}, {"Q6_K", "Q4_K"})["kinds"] == "Q4_K Q6_K"
    hostile = origin_of_gguf(Path("m.gguf"), {"general.name": "a\nb", "general.license": 7})
    assert hostile == {"name": "m", "licence": None}


def test_a_card_follows_the_run(
    source: Source, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = Path(shutil.copytree(source("llama")[0], tmp_path / "theirs"))
    (theirs / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    import_model(theirs, tmp_path / "run", partition="2,2", context=32)
    first = (tmp_path / "run" / "README.md").read_text()
    assert 'license: "apache-2.0"' in first
    assert "Nothing was measured of it yet" in first
    tune = ["train", "--init", str(tmp_path / "run"), "--out", str(tmp_path / "tuned"), "--json"]
    more = [
        "--data",
        str(corpus),
        "--partition",
        "2,2",
        "--lora-rank",
        "2",
        "--steps",
        "2",
        "--seq-len",
        "16",
    ]
    assert main([*tune, *more, "--eval-bytes", "400"]) == 0
    text = (tmp_path / "tuned" / "README.md").read_text()
    assert "apache-2.0" in text
    assert "rank 2" in text
    assert "corpus.txt" in text
    assert "| first 1 of 2 stages |" in text
    shutil.rmtree(tmp_path / "run")  # the card of what stood on it only knows less
    assert "look it up" in card(Run.open(tmp_path / "tuned"), "tuned")
    capsys.readouterr()
