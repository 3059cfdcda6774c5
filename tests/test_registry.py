"""Registries of lower packages have the entries of upper ones, however the package is entered."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raising import refused
from topograd.errors import ConfigError
from topograd.exec.gradient import BACKWARDS
from topograd.registry import Registry, declare
from topograd.runs.config import OptimizerConfig
from topograd.search.soft import SoftTask
from topograd.training.optimizers import OPTIMIZERS, Make
from topograd.training.runs import TASKS


def test_registries_of_a_kind_share_a_table_and_declared_entries_may_come_first_or_later() -> None:
    declare("made-up shape", {"round": "math:floor"})
    shapes: Registry[object] = Registry("made-up shape", {"flat": 0})
    declare("made-up shape", {"tall": "math:ceil"})
    assert list(shapes) == ["round", "flat", "tall"]
    assert shapes["tall"](1.5) == 2  # type: ignore[operator]
    with refused(ConfigError, setting="name", given="round"):
        shapes.register("round", 3)
    Registry[object]("made-up shape").register("wide", wide := object())
    assert shapes["wide"] is wide


def test_upper_packages_are_found_by_name() -> None:
    assert set(BACKWARDS) == {"autograd", "scan", "hybrid"}
    assert set(TASKS) == {"none", "soft", "surgery"}
    assert [BACKWARDS[name]().crosses_ranks for name in BACKWARDS] == [False] * 3
    assert TASKS["soft"] is SoftTask
    assert TASKS["surgery"].__name__ == "SurgeryTask"
    assert all(callable(OPTIMIZERS[name]) for name in OPTIMIZERS)


def test_settings_check_the_names_of_optimizers_and_those_registered_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with refused(ConfigError, setting="optimizer", given="mine"):
        OptimizerConfig(name="mine")
    make: Make = OPTIMIZERS["adamw"]
    monkeypatch.setitem(OPTIMIZERS._entries, "mine", make)
    assert OptimizerConfig(name="mine").name == "mine"


@pytest.mark.parametrize("module", ["topograd", "topograd.cli.main", "topograd.runs.config"])
def test_names_are_checked_without_torch(module: str) -> None:
    script = f"""
import sys, {module}
from topograd.errors import ConfigError
from topograd.runs.config import OptimizerConfig
OptimizerConfig(name="ddc-muon")
try:
    OptimizerConfig(name="nope")
except ConfigError as error:
    assert "choose one of muon+adamw" in str(error)
else:
    raise AssertionError
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("module", ["topograd.training.trainer", "topograd.training.step_runner"])
def test_a_process_that_imports_one_module_has_every_entry(module: str) -> None:
    """As a rank of torchrun or a script that resumes a run does."""
    script = f"""
import sys, {module}
from topograd.exec.gradient import BACKWARDS
from topograd.training.runs import TASKS
assert not [name for name in sys.modules if name.startswith(("topograd.search", "topograd.interfaces"))]
TASKS["surgery"], BACKWARDS["hybrid"]
"""
    subprocess.run([sys.executable, "-c", script], check=True)
