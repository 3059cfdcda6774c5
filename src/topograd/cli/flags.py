"""The flags of a verb, as a person types them: what their words may be, and their names in errors.

tyro makes the flags from a dataclass; its own words for a bad number name Python types, and a dataclass that
refuses a setting names its field. Here both become the flag: `--stop-after was given 'nan'; it must be a
whole number` and `--model.rope-base is 0; ...`.

    a field `eval_bytes`                       --eval-bytes
    a field `rope_base` of a field `model`     --model.rope-base
    a field with `tyro.conf.arg(name=...)`     that name; an empty one leaves its level out
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from topograd.errors import ConfigError

LONGEST = 40
"""Characters of a word that an error repeats."""
_BEYOND = 2**63
_SETTING = re.compile(r"(?:^|(?<= and ))[a-z][a-z0-9_.]*(?= is | are | [-+\d'])")
"""The name of a setting in an error: before "is" or "are", or before its value."""


@dataclass(frozen=True)
class Flag:
    """One flag: the field that it sets and the types that its words may have."""

    field: str
    """The dotted path of the field, as model.rope_base."""
    kinds: frozenset[Any]
    """int, float, str, Path, bool, None; a choice between words counts as str."""
    many: bool
    """Whether more than one word may follow."""

    @property
    def number(self) -> str | None:
        """What its words must be, if they must be numbers."""
        wanted = self.kinds - {None}
        if wanted == {int}:
            return "a whole number"
        return "a number" if wanted and wanted <= {int, float} else None


def flags_of(kind: type, default: Any = None) -> dict[str, Flag]:
    """Every flag of a dataclass, nested ones included, by the name that is typed.

    A field whose annotation is a base class has the flags of what stands in `default`, as tyro has it.
    """
    return dict(_walk(kind, default, "", ""))


def _walk(kind: type, default: Any, typed: str, path: str) -> Iterator[tuple[str, Flag]]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, extras = _without_extras(hints[field.name])
        value = _default(field) if default is None else getattr(default, field.name)
        if is_dataclass(value) and isinstance(hint, type) and isinstance(value, hint):
            hint = type(value)
        renamed = [extra.name for extra in extras if isinstance(getattr(extra, "name", None), str)]
        name = renamed[0] if renamed else field.name.replace("_", "-")
        whole = ".".join(filter(None, (typed, name)))
        inner = f"{path}.{field.name}" if path else field.name
        if is_dataclass(hint):
            yield from _walk(hint, value, whole, inner)  # type: ignore[arg-type]
        elif not any(str(extra) == "Positional" for extra in extras):
            kinds = frozenset(_leaves(hint))
            yield f"--{whole}", Flag(inner, kinds, any(get_origin(o) is tuple for o in _options(hint)))


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def _without_extras(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(hint) is Annotated:
        inner, *extras = get_args(hint)
        inner, more = _without_extras(inner)
        return inner, (*extras, *more)
    return hint, ()


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _leaves(hint: Any) -> Iterator[Any]:
    for option in _options(hint):
        option, _ = _without_extras(option)
        if option is type(None):
            yield None
        elif get_origin(option) is Literal:
            yield str
        elif get_origin(option) is tuple:
            yield from (leaf for item in get_args(option) if item is not ... for leaf in _leaves(item))
        else:
            yield option


def check_words(flags: Mapping[str, Flag], argv: Sequence[str]) -> None:
    """Refuse, by flag, a word that is no number where one belongs, and nothing where something belongs."""
    for name, word in _given(flags, argv):
        flag = flags.get(name)
        if not word.strip() and (flag is None or flag.kinds & {None, Path}):
            rest = "leave the flag out, or give a value" if flag else "give one"
            raise ConfigError(f"{name} was given nothing ({word!r})", remedy=rest)
        if flag is not None and flag.number and not (word == "None" and None in flag.kinds):
            _check_number(name, word, flag)


def check_known(flags: Mapping[str, Flag], argv: Sequence[str]) -> None:
    """Refuse a flag that there is not, before tyro takes its time, and name the one that it may mean."""
    known = {*flags, "--help", *(_negated(name) for name, flag in flags.items() if flag.kinds == {bool})}
    for place, word in enumerate(argv):
        name = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and len(word) > 2 and name not in known:
            rest = itertools.takewhile(lambda other: not other.startswith("-"), argv[place + 1 :])
            meant = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f" (did you mean {meant[0]}?)" if meant else ""
            raise ConfigError(f"Unrecognized options: {', '.join([word, *rest])}{hint}")


def _negated(name: str) -> str:
    """The flag that turns one off: --no-bf16, --model.no-smear."""
    level, dot, last = name.removeprefix("--").rpartition(".")
    return f"--{level}{dot}no-{last}"


def _check_number(name: str, word: str, flag: Flag) -> None:
    shown = word if len(word) <= LONGEST else f"{word[:LONGEST]}…"
    try:
        value = int(word) if float not in flag.kinds else float(word)
    except ValueError:
        raise ConfigError(f"{name} was given {shown!r}", remedy=f"it must be {flag.number}") from None
    if isinstance(value, int) and not -_BEYOND <= value < _BEYOND:
        raise ConfigError(setting=name, given=value, allowed="below 2^63")
    if not math.isfinite(value):
        raise ConfigError(f"{name} was given {shown!r}", remedy="it must be a finite number")


def _given(flags: Mapping[str, Flag], argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each word with the flag that it follows, or "an argument" where it follows none."""
    name, wants = "an argument", 0.0
    for word in argv:
        if word.startswith("--"):
            typed, equals, value = word.partition("=")
            name = typed.replace("_", "-")
            flag = flags.get(name)
            wants = 0.0 if flag is None or flag.kinds == {bool} else math.inf if flag.many else 1.0
            if equals:
                yield name, value
                wants = 0.0
        else:
            yield (name if wants else "an argument"), word
            wants = max(0.0, wants - 1)


def as_typed(message: str, flags: Mapping[str, Flag], argv: Sequence[str], given: bool = False) -> str:
    """An error with the names of settings replaced by their flags, where it is clear which is meant.

    With `given`, only by flags that were typed: a run's own settings can be what an error is about.
    """
    typed = {name for name, _ in _given(flags, argv)}

    def flag_of(found: re.Match[str]) -> str:
        word = found[0]
        named = [n for n, flag in flags.items() if word in (flag.field, flag.field.rpartition(".")[2])]
        named = [name for name in named if name in typed] or ([] if given else named)
        return named[0] if len(named) == 1 else word

    return _SETTING.sub(flag_of, message)
