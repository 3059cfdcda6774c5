"""Benchmarks as scripts: they start from any folder, though `papers` and the oracles are not installed."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_is_not_installed_is_put_on_the_path_first(script: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    needed = [name for name in found if name.split(".")[0] in ("papers", "tests")]
    assert not needed or found.index("clone") < found.index(needed[0])


@pytest.mark.parametrize("name", ["fitted_pools", "kernel", "prompts"])
def test_help_from_another_folder(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
