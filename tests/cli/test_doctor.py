"""`topograd doctor`: what it says of an install that is whole, and that nothing broken breaks it."""

import importlib
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import topograd
import topograd.pretrained
from topograd.cli import doctor as module
from topograd.cli.doctor import ADDS, examine, requirements


def test_as_json(call: Any) -> None:
    answer = call("doctor", "--json")
    found = answer.json
    assert answer.err == ""
    assert list(found) == [
        *("topograd", "python", "platform", "cpus", "torch", "runtime", "native", "packages", "extras"),
        *("cache", "reference", "disk", "problems"),
    ]
    assert found["topograd"] == topograd.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"].keys() >= {
        "torch",
        "numpy",
        "scipy",
        "safetensors",
        "tokenizers",
        "tyro",
        "rich",
    }
    assert found["packages"]["numpy"] == importlib.metadata.version("numpy")
    assert found["torch"]["threads"] >= 1
    assert found["torch"]["cuda"] >= 0
    assert found["cpus"] >= 1
    assert found["reference"]["opens"]
    assert found["reference"]["step"] > 0
    assert found["cache"]["folder"] == str(Path(os.environ["XDG_CACHE_HOME"]) / "topograd")
    assert found["cache"]["writable"]
    assert found["disk"]["free_bytes"] > 0
    assert found["problems"] == []


def test_every_extra_of_the_metadata_is_explained(call: Any) -> None:
    names = importlib.metadata.metadata("topograd").get_all("Provides-Extra")
    extras = {extra["name"]: extra for extra in call("doctor", "--json").json["extras"]}
    assert list(extras) == names
    assert ADDS.keys() <= extras.keys()
    for extra in extras.values():
        assert extra["adds"]
        assert extra["installed"] == (not extra["missing"])
    assert extras["search"]["missing"] == [] or extras["search"]["missing"][0].startswith("optuna")


def test_for_people_it_is_a_table(call: Any) -> None:
    answer = call("doctor")
    assert (answer.code, answer.err) == (0, "")
    for words in ("│ torch ", "│ threads ", "│ extra search ", "│ cache ", "│ reference model │ opens"):
        assert words in answer.out
    assert "adds: `search pareto`" in answer.out


def test_an_extra_that_is_missing_or_broken_is_no_problem(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = importlib.metadata.version

    def version(name: str) -> Any:
        if name == "optuna":
            raise importlib.metadata.PackageNotFoundError(name)
        if name == "transformers":
            raise OSError("its metadata is a folder")
        if name == "scikit-learn":
            return "not a version"
        return versions(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    extras = {extra["name"]: extra for extra in call("doctor", "--json").json["extras"]}
    assert extras["search"]["missing"] == ["optuna>=5"]
    assert extras["hf"]["missing"] == ["transformers>=5"]
    assert {"transformers>=5", "scikit-learn>=1.6"} <= set(extras["studies"]["missing"]), "it contains hf"
    out = " ".join(call("doctor").out.split())
    assert "not installed, lacks optuna>=5; adds: `search pareto`" in out


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("missing", "scipy is not installed; install it with: pip install 'scipy>="),
        ("old", "scipy is 0.1, and >="),
        ("broken", "cannot be imported (ImportError: a symbol is missing); install it with"),
    ],
)
def test_a_required_package_that_does_not_work_is_named(
    kind: str, said: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, modules = importlib.metadata.version, importlib.import_module

    def version(name: str) -> str:
        if name == "scipy" and kind == "missing":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.1" if name == "scipy" and kind == "old" else versions(name)

    def import_module(name: str, package: str | None = None) -> Any:
        if name == "scipy" and kind == "broken":
            raise ImportError("a symbol\nis missing")
        return modules(name, package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib, "import_module", import_module)
    answer = call("doctor", "--json")
    assert answer.code == 2
    assert answer.out.count("\n") == 1, "the object is printed all the same"
    assert answer.err.startswith("topograd: scipy ")
    assert said in answer.err
    assert answer.err.count("\n") == 1


def test_a_damaged_reference_is_a_problem(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(topograd.pretrained.REFERENCE, tmp_path / "reference")
    (weights,) = folder.glob("checkpoints/*/model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    monkeypatch.setattr(topograd.pretrained, "REFERENCE", folder)
    answer = call("doctor")
    assert answer.code == 2
    assert "the model that comes with the package does not open (CheckpointError: " in answer.err
    assert "DOES NOT OPEN" in answer.out


def test_without_metadata_it_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGE", "no-such-package")
    assert requirements() == []
    found = examine()
    assert (found["topograd"], found["extras"], found["problems"]) == (None, [], [])
    assert found["torch"] is not None
