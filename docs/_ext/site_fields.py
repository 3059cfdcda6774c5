"""Fields of a dataclass with type, default and docstring, as the reference pages print them."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Described:
    """One field of a dataclass."""

    owner: type
    field: Field[Any]
    hint: Any
    """Its type without `Annotated`."""
    extras: tuple[Any, ...]
    """What `Annotated` says beside the type."""
    default: Any
    """`MISSING` where the field must be given."""

    @property
    def nested(self) -> bool:
        """Whether the field is a dataclass with fields of its own."""
        return is_dataclass(self.hint)

    def marked(self, word: str) -> bool:
        """Whether tyro's mark of this name is on the field."""
        return any(str(extra) == word or getattr(extra, "name", None) == word for extra in self.extras)

    @property
    def text(self) -> str:
        """The help of the flag, or the docstring below the field."""
        given = [extra.help for extra in self.extras if isinstance(getattr(extra, "help", None), str)]
        own = next((d for kind in self.owner.__mro__ if (d := docstrings(kind).get(self.field.name))), "")
        return given[0] if given else own

    @property
    def metavar(self) -> str:
        """The word that stands for a value on the command line."""
        given = [e.metavar for e in self.extras if isinstance(getattr(e, "metavar", None), str)]
        return given[0] if given else written(self.hint, upper=True)

    @property
    def typed(self) -> str:
        """The type as a reader of TOML writes it."""
        return written(self.hint, upper=False)


def described(kind: type, value: Any = None) -> Iterator[Described]:
    """The fields of a dataclass; `value` is an instance whose fields are the defaults."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, extras = _plain(hints[field.name])
        default = _default(field) if value is None else getattr(value, field.name)
        if is_dataclass(default) and isinstance(hint, type) and isinstance(default, hint):
            hint = type(default)  # a field whose annotation is a base class
        yield Described(kind, field, hint, extras, default)


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _plain(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(hint) is Annotated:
        inner, *extras = get_args(hint)
        inner, more = _plain(inner)
        return inner, (*extras, *more)
    return hint, ()


@cache
def docstrings(kind: type) -> dict[str, str]:
    """The strings below the fields of a class, by field."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):
        return {}
    texts = {name: text for base in reversed(kind.__mro__[1:]) for name, text in docstrings(base).items()}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    for before, node in pairwise(body):
        match before, node:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = inspect.cleandoc(text)
    return texts


def written(hint: Any, *, upper: bool) -> str:
    """A type in words: INT on a command line, integer in a file."""
    hint, _ = _plain(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "|".join(str(value) for value in args) if upper else " or ".join(f'"{v}"' for v in args)
    if origin in (Union, types.UnionType):
        some = [written(option, upper=upper) for option in args if option is not type(None)]
        return ("|" if upper else " or ").join(some)
    if origin in (tuple, list):
        inner = [written(item, upper=upper) for item in args if item is not ...]
        return " ".join([*inner, "..."]) if upper else f"list of {' and '.join(dict.fromkeys(inner))}"
    words = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path"}
    flags = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: ""}
    if hint in words:
        return flags[hint] if upper else words[hint]
    return getattr(hint, "__name__", str(hint))


def shown(value: Any) -> str:
    """A default as TOML or a shell would have it; empty where there is none to show."""
    if value is MISSING or value is None or value in ((), "", []):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Path):  # of the packaged model: its place on this machine says nothing
        return "" if value.is_absolute() else str(value)
    if isinstance(value, tuple):
        return ", ".join(map(shown, value))
    return str(value)


def markdown(text: str) -> str:
    """Help as Markdown: a paragraph, or a block where its lines are a list."""
    lines = text.splitlines()
    if sum(": " in line or line.startswith("- ") for line in lines) > 2:
        return f"```text\n{text}\n```"
    return escaped(" ".join(line.strip() for line in lines))


def escaped(text: str) -> str:
    """Plain text whose marks Markdown must not read; `code` stays code."""
    parts = text.split("`")
    for place in range(0, len(parts), 2):
        parts[place] = "".join("\\" + c if c in "*_[]<>|$\\{}~" else c for c in parts[place])
    return "`".join(parts) if len(parts) % 2 else text.replace("`", "\\`")
