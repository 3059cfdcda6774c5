"""The map of CONTRIBUTING.md holds: no package names one above it, in an import or in a string.

Imports are seen at the top of a module, in functions and for types alone; strings are seen wherever they are
no docstring, so that registry entries (`"topograd.x.y:z"`), `importlib.import_module("topograd.x")`, commands
(`-m topograd.x`) and error messages count. Tables called `_HOME` hold the homes of names that are imported
when they are first used.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "topograd"
OUTSIDE = ("papers", "benchmarks", "tests", "examples")
"""Folders beside the package, which it must not need."""
ADDRESS = re.compile(r"topograd(\.\w+)+(:[\w.]+)?")


@dataclass(frozen=True)
class Map:
    """The packages by line, the lowest first; `alone` are the starred ones."""

    layers: tuple[tuple[str, ...], ...]
    alone: frozenset[str]

    @classmethod
    def parse(cls, page: str) -> Map:
        block = re.search(r"^```layers\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        assert block is not None, "CONTRIBUTING.md has no block of layers"
        lines = [line.partition("#")[0].split() for line in block[1].splitlines()]
        layers = tuple(tuple(word.rstrip("*") for word in words) for words in lines if words)
        return cls(layers, frozenset(w.rstrip("*") for words in lines for w in words if w.endswith("*")))

    @property
    def order(self) -> list[str]:
        return [name for layer in self.layers for name in layer]

    def problem(self, here: str, other: str) -> str | None:
        """Why `here` may not name `other`; None if it may."""
        order = self.order
        for name in (here, other):
            if name not in order:
                return f"{name} is not on the map of CONTRIBUTING.md"
        if order.index(other) > order.index(here):
            return f"{here} names {other}, which is above it"
        layer = next(layer for layer in self.layers if here in layer)
        if (
            here in self.alone
            and other not in self.layers[0]
            and not (other in self.alone and other in layer)
        ):
            return f"{here} stands alone, but names {other}"
        return None


def package_of(path: str) -> str:
    """The package, or the module beside the packages, that a file belongs to."""
    return path.split("/")[0].removesuffix(".py")


def imported(node: ast.Import | ast.ImportFrom, path: str, known: Mapping[str, object]) -> Iterator[str]:
    """The packages that a statement imports; `__init__` for what only `topograd` itself has."""
    modules = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = ["topograd", *path.split("/")[:-1]]
        above = parents[: len(parents) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        own = [f"{base}.{name}" if name in known else base for name in modules]
        modules = own if base == "topograd" else [base]
    for module in modules:
        top, _, rest = module.partition(".")
        if top in OUTSIDE:
            yield top
        elif top == "topograd":
            yield rest.split(".")[0] or "__init__"


def named(source: str, path: str, known: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """Line and package, for every package that a module names."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for package in imported(node, path, known):
                yield node.lineno, package
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            for package in re.findall(r"\btopograd\.(\w+)", node.value):
                yield node.lineno, package
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME":
            for home in addresses(node):
                if home.split(".")[0] in known:
                    yield node.lineno, home.split(".")[0]


def addresses(node: ast.Assign) -> list[str]:
    """The values of a table of homes; one that is a single string is an address like any other."""
    values = node.value.values if isinstance(node.value, ast.Dict) else []
    return [value.value for value in values if isinstance(value, ast.Constant)]  # type: ignore[misc]


def problems(sources: Mapping[str, str], house: Map) -> list[str]:
    """What is against the map, one line for each place."""
    known = dict.fromkeys([*house.order, *map(package_of, sources)])
    result = []
    for path, source in sources.items():
        here = package_of(path)
        for line, other in named(source, path, known):
            why = house.problem(here, other) if other != here else None
            result += [f"{path}:{line}: {why}"] if why else []
    return result


def cycle(edges: Mapping[str, set[str]]) -> list[str]:
    """A cycle of these edges; empty if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def at_import(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """For each module those that it imports as soon as it is imported itself."""
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}
    edges: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in ast.parse(sources[path]).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("topograd."):
                module = (node.module or "").removeprefix("topograd.")
                parts = {f"{module}.{alias.name}" for alias in node.names} & names.keys()
                edges[name] |= (parts or {module}) & names.keys() - {name}
    return edges


def read() -> dict[str, str]:
    return {
        path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(SOURCE.rglob("*.py"))
    }


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return read()


@pytest.fixture(scope="module")
def house() -> Map:
    return Map.parse((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def test_the_map_has_every_package_once_and_no_other(house: Map, sources: dict[str, str]) -> None:
    assert sorted(house.order) == sorted({package_of(path) for path in sources})
    assert house.layers[-1] == ("plugins", "__init__", "__main__"), "the top, which may name everything"


def test_no_package_names_one_above_it(house: Map, sources: dict[str, str]) -> None:
    assert problems(sources, house) == []


def test_no_import_goes_in_a_circle(house: Map, sources: dict[str, str]) -> None:
    """Between packages by any name, and between modules while they are imported."""
    known = dict.fromkeys(house.order)
    packages: dict[str, set[str]] = {}
    for path, source in sources.items():
        here = package_of(path)
        packages.setdefault(here, set()).update(p for _, p in named(source, path, known) if p != here)
    assert cycle(packages) == []
    assert cycle(at_import(sources)) == []


def test_every_address_leads_to_a_module(sources: dict[str, str]) -> None:
    """In registries and in tables of names that are imported when they are first used."""
    result = []
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            homes: list[str] = []
            if isinstance(node, ast.Constant) and re.fullmatch(
                r"topograd(\.\w+)+(:[\w.]+)?", str(node.value)
            ):
                homes = [str(node.value).partition(":")[0].removeprefix("topograd.")]
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME":
                homes = addresses(node)
            for home in homes:
                places = [home.replace(".", "/"), f"{Path(path).parent}/{home}"]
                there = [
                    f for place in places for f in (f"{place}.py", f"{place}/__init__.py") if f in sources
                ]
                result += [] if there else [f"{path}:{getattr(node, 'lineno', 0)}: {home}"]
    assert result == []


# The checker itself, on modules that nobody wrote


@pytest.mark.parametrize(
    ("path", "source", "why"),
    [
        ("runs/x.py", "from topograd.training.step_runner import Step", "runs names training"),
        ("runs/x.py", "def f():\n    import topograd.cli.main", "runs names cli"),
        ("runs/x.py", "if TYPE_CHECKING:\n    from topograd.decode import model", "runs names decode"),
        ("runs/x.py", "from topograd import search", "runs names search"),
        ("runs/x.py", "from ..search import soft", "runs names search"),
        ("runs/x.py", "ADDRESS = 'topograd.training.optimizers:adamw'", "runs names training"),
        ("runs/x.py", "T = {'a': Registry('a', {'b': 'topograd.search.soft:SoftTask'})}", "names search"),
        ("runs/x.py", "m = importlib.import_module('topograd.serve.app')", "runs names serve"),
        ("runs/x.py", "m = importlib.import_module(f'topograd.serve.{name}')", "runs names serve"),
        ("runs/x.py", "command = ['-m', 'topograd.cli.main']", "runs names cli"),
        ("runs/x.py", "_HOME = {'f': 'search.front'}", "runs names search"),
        ("runs/x.py", "raise E(f'{a}; call topograd.decode.model.load')", "runs names decode"),
        ("runs/x.py", "from topograd import __version__", "runs names __init__"),
        ("runs/x.py", "import topograd as tg", "runs names __init__"),
        ("runs/x.py", "from topograd import plugins", "runs names plugins"),
        ("runs/x.py", "from topograd.attic import old", "attic is not on the map"),
        ("runs/x.py", "import papers.fit", "papers is not on the map"),
        ("attic/x.py", "from topograd import errors", "attic is not on the map"),
        ("convert/x.py", "from topograd.evaluation.core import evaluate", "convert names evaluation"),
        ("geometry/x.py", "from topograd.optim.gauges import Gauge", "geometry names optim"),
        ("geometry/x.py", "from topograd.topology.plan import Plan", "geometry stands alone"),
        ("report/x.py", "from topograd.search.front import pareto_front", "report stands alone"),
        ("nn/x.py", "from topograd.geometry.rates import fit_rate", "nn names geometry"),
        ("registry.py", "from topograd.topology.plan import Plan", "registry names topology"),
    ],
)
def test_what_points_up_is_caught(house: Map, path: str, source: str, why: str) -> None:
    result = problems({path: source}, house)
    assert len(result) == 1, result
    assert why in result[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("runs/x.py", '"""See `topograd.training.trainer`."""\nA = 1\n"""`topograd.cli.main` shows it."""'),
        ("runs/x.py", "A = 'topograd.runs.config:TrainConfig'\nB = 'run topograd train'"),
        ("runs/x.py", "from topograd.nn.stack import Stack\nfrom . import config\nimport math"),
        ("runs/x.py", "_HOME = {'Run': 'folder'}"),
        ("evaluation/x.py", "from topograd.convert.chat import render"),
        (
            "optim/x.py",
            "from topograd.geometry.factors import reduce_batches\nfrom topograd.errors import OptimError",
        ),
        ("training/x.py", "from topograd.geometry.factors import reduce_batches"),
        ("plugins.py", "A = 'topograd.cli.main:main'"),
    ],
)
def test_what_points_down_is_not(house: Map, path: str, source: str) -> None:
    assert problems({path: source}, house) == []


def test_circles_are_caught() -> None:
    lazy = "def f():\n    from topograd.nn.a import A"
    ring = {"nn/a.py": "from topograd.nn.b import B", "nn/b.py": "from topograd.nn import a"}
    assert cycle(at_import(ring)) in (["nn.a", "nn.b", "nn.a"], ["nn.b", "nn.a", "nn.b"])
    assert cycle(at_import({**ring, "nn/b.py": lazy})) == []


def test_a_page_without_a_map_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no block of layers"):
        Map.parse("# Contributing\n")


def test_nothing_is_left_half_done() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    result = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert not result


def test_files_are_read_by_one_person_at_a_sitting() -> None:
    long = {
        p.name: n
        for p in SOURCE.rglob("*.py")
        if (n := len(p.read_text(encoding="utf-8").splitlines())) > 500
    }
    assert not long
