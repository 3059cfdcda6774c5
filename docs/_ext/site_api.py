"""Reference of the Python API: a page for each public package, its names grouped by where they live."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

AREAS = ("topograd", "geometry", "optim", "interfaces", "specialists", "errors")
TITLES = {
    "topology": "Topologies",
    "exec": "Training step",
    "training": "Training",
    "runs": "Settings",
    "nn": "Models",
    "decode": "Decoding",
    "evaluation": "Scores",
    "data": "Data",
    "search": "Search",
    "errors": "Errors",
    "": "Package",
}
"""Headings of the page of `topograd`, in their order, by subpackage."""


INDEX = """.. _api:

Python API
==========

Generated from signatures, types and docstrings. ``import topograd as tg``: the names of the first page are
``tg.NAME``, those of the others ``tg.geometry.NAME`` and so on. What is not listed is private and may change.

.. toctree::
   :maxdepth: 1
"""


def pages() -> dict[str, str]:
    """The pages in reStructuredText, by file name."""
    made = {f"{area}.rst": page(area) for area in AREAS}
    rows = "\n".join(f"   {area}" for area in AREAS)
    made["index.rst"] = f"{INDEX}\n{rows}\n"
    return made


def page(area: str) -> str:
    """The page of one public package."""
    name = area if area == "topograd" else f"topograd.{area}"
    module = importlib.import_module(name)
    lines = [f".. _api-{area}:", "", f"``{name}``", "=" * (len(name) + 4), ""]
    lines += [f".. automodule:: {name}", "   :no-members:", ""]
    groups: dict[str, list[str]] = {}
    public = getattr(module, "__all__", None) or [
        n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == name
    ]
    for one in sorted(public, key=str.lower):
        value = getattr(module, one)
        if not inspect.ismodule(value) and one != "__version__":
            groups.setdefault(_home(area, value), []).append(one)
    order = {home: place for place, home in enumerate(TITLES)}
    for home in sorted(groups, key=lambda home: (order.get(home, len(order)), home)):
        if len(groups) > 1:
            title = TITLES.get(home, home.replace("_", " ").capitalize())
            lines += [title, "-" * len(title), ""]
        for one in groups[home]:
            lines += _object(name, one, getattr(module, one))
    return "\n".join(lines)


def _home(area: str, value: Any) -> str:
    """The subpackage that a name of `topograd` lives in; one group elsewhere."""
    if area != "topograd":
        return ""
    module = getattr(value, "__module__", "") or ""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        module = {"Registry": "topograd.runs"}.get(type(value).__name__, "")
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _object(module: str, name: str, value: Any) -> Iterator[str]:
    whole = f"{module}.{name}"
    if inspect.isclass(value) and issubclass(value, BaseException):
        yield from (f".. autoexception:: {whole}", "   :show-inheritance:", "")
    elif inspect.isclass(value):
        yield from (f".. autoclass:: {whole}", "   :members:", "")
    elif inspect.isroutine(value):
        yield from (f".. autofunction:: {whole}", "")
    else:
        yield from (f".. autodata:: {whole}", "   :no-value:", "")


def plain(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText: prose without marks, `code` as code, indented lines as they are."""
    out: list[str] = []
    block: list[str] = []
    listed = False
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
            continue
        if block:
            out += _block(list(block), listed)
            listed = bool(re.match(r"\s*(-|\d+\.) ", block[0])) or (listed and block[0].startswith(" "))
            block = []
    text = "\n".join(out)
    between = re.compile(r"(?<=\n)(    [^\n]*\n\n)::\n\n(?=    )")  # two blocks of code are one
    return between.sub(r"\1", text).split("\n")


def _block(block: list[str], listed: bool) -> list[str]:
    if block[0].startswith(">>>"):
        return [*block, ""]
    if re.match(r"(-|\d+\.) ", block[0]) or (listed and block[0].startswith("  ") and not _formula(block)):
        return [*_prose(block), ""]
    prose = []
    while block and not block[0].startswith("  "):
        prose.append(block.pop(0))
    made = [*_prose(prose), ""] if prose else []
    literal = []
    while block and block[0].startswith("  "):
        literal.append(block.pop(0))
    if literal:
        made += ["::", "", *(f"    {line}" for line in literal), ""]
    return made + (_block(block, False) if block else [])


def _formula(block: list[str]) -> bool:
    return block[0].startswith("    ")


def _prose(lines: list[str]) -> list[str]:
    parts = "\n".join(lines).split("`")
    if len(parts) % 2 == 0:  # a lone mark
        return [re.sub(r"([*|\\`_])", r"\\\1", line) for line in lines]
    for place in range(0, len(parts), 2):
        parts[place] = re.sub(r"([*|\\]|_(?!\w)|(?<!\w)_)", r"\\\1", parts[place])
    text = parts[0]
    for place in range(1, len(parts), 2):
        code, after = parts[place].replace("\n", " "), parts[place + 1]
        glue = "\\ " if after[:1] and (after[0].isalnum() or after[0] in "\\(") else ""
        before = "\\ " if text[-1:] and (text[-1].isalnum() or text[-1] in ")") else ""
        text += f"{before}``{code}``{glue}{after}" if code.strip() else after
    return text.split("\n")
