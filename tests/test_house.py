"""The house: imports point one way, rooms that stand alone do, and nothing is left half done."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "topograd"
FLOORS = (
    ("errors",),
    ("registry", "limits", "files", "memory", "timing", "effective_rank"),
    ("topology", "reference"),
    ("nn", "data", "geometry", "optim", "fields"),
    ("runs",),
    ("training", "runtime"),
    ("depth",),
    ("models", "evaluation", "pretrained"),
    ("specialists", "search", "interfaces", "parallel"),
    ("benchmarks", "studies"),
    ("report", "serve"),
    ("cli",),
)
"""Rooms by floor; a room imports its own floor and those below."""
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
ALONE = ("geometry", "optim", "fields")
"""Rooms for people who want nothing else: they need torch, the references and small helpers."""
PLAIN_RECORDS = ("report",)
"""Rooms that read dictionaries as JSON holds them, and no model."""
HELPERS = {*FLOORS[0], *FLOORS[1], "reference"}


def imports(path: Path) -> Iterator[str]:
    """The rooms that a module imports, at its top or inside a function, but not for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in node.body
        for inner in ast.walk(child)
    }
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("topograd"):
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("topograd."))


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem in LEVEL)


@pytest.mark.parametrize("room", sorted({path.relative_to(SOURCE).parts[0] for path in modules()}))
def test_imports_point_down(room: str) -> None:
    here = room.removesuffix(".py")
    assert here in LEVEL, f"{here} has no floor; give it one here and in CONTRIBUTING.md"
    for path in modules():
        if path.relative_to(SOURCE).parts[0] != room:
            continue
        for other in imports(path):
            if other in LEVEL and other != here:
                assert LEVEL[other] <= LEVEL[here], f"{path.relative_to(SOURCE)} imports {other}, from above"
                assert here not in ALONE or other in HELPERS, f"{here} stands alone, but uses {other}"
                plain = {*HELPERS, "search"}  # of the search only the front, which is numpy
                assert here not in PLAIN_RECORDS or other in plain, f"{here} reads records, not {other}"


def test_nothing_is_left_half_done() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    found = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert not found


def test_files_are_read_by_one_person_at_a_sitting() -> None:
    long = {
        p.name: n
        for p in SOURCE.rglob("*.py")
        if (n := len(p.read_text(encoding="utf-8").splitlines())) > 500
    }
    assert not long
