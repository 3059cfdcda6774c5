"""Dataclasses of settings from the nested tables of a TOML or JSON file, every value checked."""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from topograd.errors import ConfigError

_PHRASES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "left out",
}


def build_dataclass(
    kind: type, values: Mapping[str, Any], where: str = "", given: Mapping[str, Any] | None = None
) -> Any:
    """An instance of `kind`; lists become tuples, absent keys take the default, unknown ones raise.

    `given` are fields whose values are taken as they are.
    """
    given = given or {}
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind) if f.name not in given}
    unknown = sorted(set(values) - known.keys())
    if unknown:
        problem = f"unknown setting {where}{unknown[0]}"
        remedy = f"known are {', '.join(sorted(known))}"
        raise ConfigError(problem, setting=f"{where}{unknown[0]}", given=values[unknown[0]], remedy=remedy)
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(
                f"setting {where}{name} is missing", setting=f"{where}{name}", remedy="it has no default"
            )
    read = {name: _checked(hints[name], value, f"{where}{name}") for name, value in values.items()}
    return kind(**read, **given)


def _checked(hint: Any, value: Any, name: str) -> Any:
    """`value` if it fits the annotation, with lists as tuples and whole numbers as floats where asked."""
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"setting {name} is {value!r}", setting=name, given=value, allowed="a table")
        return build_dataclass(hint, value, f"{name}.")  # type: ignore[arg-type]
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        if is_dataclass(option) and isinstance(value, Mapping):
            return build_dataclass(option, value, f"{name}.")  # type: ignore[arg-type]
        origin = get_origin(option)
        if origin is Literal and type(value) is str and value in get_args(option):
            return value
        if origin is tuple and isinstance(value, list | tuple):
            return _checked_items(get_args(option), value, name)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return _float(value, name)
        if origin is None and isinstance(option, type) and type(value) is option:
            return value
    raise ConfigError(f"setting {name} is {value!r}", setting=name, given=value, allowed=_phrase(hint))


def _checked_items(kinds: tuple[Any, ...], values: list[Any] | tuple[Any, ...], name: str) -> tuple[Any, ...]:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_checked(kinds[0], item, f"{name}[{i}]") for i, item in enumerate(values))
    if len(values) != len(kinds):
        problem = f"setting {name} is {list(values)!r}"
        remedy = f"it must have {len(kinds)} entries"
        raise ConfigError(problem, setting=name, given=values, remedy=remedy)
    return tuple(
        _checked(kind, item, f"{name}[{i}]") for i, (kind, item) in enumerate(zip(kinds, values, strict=True))
    )


def _float(value: float, name: str) -> float:
    try:
        return float(value)
    except OverflowError:
        problem = f"setting {name} has {len(str(value))} digits"
        raise ConfigError(problem, setting=name, given=value, allowed="a number below 1e308") from None


def _phrase(hint: Any) -> str:
    """The values that an annotation allows, in words."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_phrase(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        inner = {_phrase(kind) for kind in get_args(hint) if kind is not Ellipsis}
        return "a list, each " + " or ".join(sorted(inner))
    return "a table" if is_dataclass(hint) else _PHRASES.get(hint, str(hint))


def flat_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one table with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        inside = isinstance(value, Mapping)
        flat |= flat_settings(value, f"{prefix}{name}.") if inside else {f"{prefix}{name}": value}
    return flat
