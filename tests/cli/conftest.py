"""Tiny runs, trained once for all the tests of the command line, and a way to call it."""

import json
from pathlib import Path

import pytest

from calls import Call, caller
from topograd.cli.main import main
from topograd.runs.folder import Run

SIZE = "--model.layers 2 --model.width 16 --model.heads 2 --model.context 16 --batch 2 --eval-bytes 300"


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Run `topograd` with these words."""
    return caller(main, capfd)


@pytest.fixture(scope="session")
def size(corpus: Path) -> list[str]:
    """The flags that make a training take a fraction of a second."""
    return ["--preset", "tiny", *SIZE.split(), "--data", str(corpus)]


@pytest.fixture(scope="session")
def staged(size: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two stages. Tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("runs") / "staged"
    words = ["--partition", "1,1", "--steps", "12", "--save-every", "5", "--eval-every", "6", "--seed", "1"]
    assert main(["train", *size, *words, "--out", str(folder), "--json"]) == 0
    return folder


@pytest.fixture(scope="session")
def backprop(size: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one stage."""
    folder = tmp_path_factory.mktemp("runs") / "backprop"
    words = ["--partition", "L", "--steps", "12", "--eval-every", "6", "--seed", "1"]
    assert main(["train", *size, *words, "--out", str(folder), "--json"]) == 0
    return folder


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six times the same chat."""
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    line = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}
    path.write_text((json.dumps(line) + "\n") * 6)
    return path


@pytest.fixture
def spec(straight: Run, call: Call, tmp_path: Path) -> Path:
    """A specialist of one layer, as `attach` makes it."""
    folder = tmp_path / "spec"
    found = call("specialist", "attach", straight.folder, "--layers", 1, "--out", folder, "--json").json
    assert found["identity"] == 0.0
    assert found["first_layer"] == 2
    return folder
