"""Registries of named values: mixers, objectives, optimizers, properties.

A name is an entry of the registry, or `package.module:attribute` of any installed package. Entries may be
such addresses too, so that listing them imports nothing: an address is imported at its first use. So a name
in a run's settings can import only modules that are installed here.

There is one table for each kind in a process, and a `Registry` is a typed view of it. So a package can check
a name whose value lives in a package above it, and never names that package: `topograd/plugins.py` declares
the entries of upper packages, from above them all.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from topograd.errors import ConfigError

T = TypeVar("T")
_TABLES: dict[str, dict[str, Any]] = {
    kind: dict(entries) for kind, entries in sys.modules[__package__ or ""].registry_entries.items()
}
"""Values or their addresses by kind and name."""


def declare(kind: str, entries: Mapping[str, object]) -> None:
    """Add entries to the table of a kind: values, or addresses, which are not imported yet."""
    _TABLES.setdefault(kind, {}).update(entries)


class Registry(Generic[T]):
    """Values of one kind by name; `kind` is the word that errors use. Registries of one kind share a table.

    >>> roots = Registry[object]("root", {"square": "math:sqrt"})
    >>> roots["square"](9.0), roots["math:isqrt"](9)  # type: ignore[operator]
    (3.0, 3)
    """

    def __init__(self, kind: str, entries: Mapping[str, T | str] | None = None) -> None:
        self.kind = kind
        declare(kind, entries or {})
        self._entries: dict[str, T | str] = _TABLES[kind]

    def register(self, name: str, value: T) -> T:
        """Give `value` a name for this process; a name that is taken raises ConfigError."""
        if name in self._entries:
            problem, remedy = f"{self.kind} {name!r} exists already", "choose another name"
            raise ConfigError(problem, setting="name", given=name, remedy=remedy)
        if ":" in name or not name.strip():
            problem, remedy = f"{self.kind} {name!r} cannot be a name", "use one without a colon"
            raise ConfigError(problem, setting="name", given=name, remedy=remedy)
        self._entries[name] = value
        return value

    def check(self, name: str) -> None:
        """Raise ConfigError for an unknown name; of an address only the form is checked."""
        if name in self._entries:
            return
        module, colon, attribute = name.partition(":")
        dotted = all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))
        if not colon or not dotted:
            problem = f"{self.kind} {name!r} is unknown"
            remedy = f"choose one of {', '.join(self)}, or package.module:attribute of your own"
            raise ConfigError(problem, setting=self.kind, given=name, remedy=remedy)

    def __getitem__(self, name: str) -> T:
        """The value of `name`."""
        self.check(name)
        entry = self._entries.get(name, name)
        return self._imported(entry, name) if isinstance(entry, str) else entry

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def _imported(self, address: str, name: str) -> T:
        module, _, attribute = address.partition(":")
        try:
            value = importlib.import_module(module)
            for part in attribute.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError) as problem:
            message = f"{self.kind} {name!r} cannot be imported ({problem})"
            remedy = "install its package, correct the name, or start in the folder that has the module"
            raise ConfigError(message, setting=self.kind, given=name, remedy=remedy) from None
        return value  # type: ignore[return-value]
