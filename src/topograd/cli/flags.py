"""The flags of a command: their names, their values, their help, and their names in errors.

The flags are made from a dataclass. tyro reads the values; everything that a person can mistype is found
before, by `check`, so that the error names the flag and what it takes.

    a field `eval_bytes`                       --eval-bytes
    a field `rope_base` of a field `model`     --model.rope-base
    a field with `tyro.conf.arg(name=...)`     that name; an empty one leaves its level out
    a field marked Positional                  no name; help and errors show its metavar
"""

import ast
import difflib
import inspect
import math
import os
import re
import shutil
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from topograd.errors import ConfigError, TopogradError
from topograd.limits import MUST_EXIST

LONGEST = 40
"""Characters of a value that an error repeats."""
HELP = ("-h", "--help", "--help-all")
COMPLETE = "--complete"
"""Behind the arguments that are typed so far: print those that may come next (`completion.py`)."""
_BEYOND = 2**63
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True)
class Flag:
    """One flag, or an argument without one."""

    field: str
    """The dotted path of the field that it sets, as model.rope_base."""
    kinds: frozenset[Any]
    """int, float, str, Path, bool, None; a choice counts as str."""
    many: bool
    """Whether more than one value may follow."""
    positional: bool
    choices: tuple[str, ...]
    """The only values that it takes; empty if there are others."""
    default: Any
    """MISSING if it must be given."""
    metavar: str
    must_exist: bool
    """Whether its values are files or folders that are read."""
    paired: bool
    """Whether a switch can be turned off too, by --no-NAME."""
    hidden: bool
    """Whether help leaves it out: it can be read better from a file than from flags."""
    owner: type
    """The dataclass that has the field."""
    own_help: str | None
    """The help that its annotation brings; without it, `help` is the field's docstring."""

    @property
    def help(self) -> str:
        return self.own_help or field_docs(self.owner).get(self.field.rpartition(".")[2], "")

    @property
    def number(self) -> str | None:
        """What its values must be, if they must be numbers."""
        wanted = self.kinds - {None}
        if wanted == {int}:
            return "a whole number"
        return "a number" if wanted and wanted <= {int, float} else None


def flags_of(kind: type, default: Any = None) -> dict[str, Flag]:
    """Every flag of a dataclass, nested ones included, by the name that is typed; positionals by field.

    A field whose annotation is a base class has the flags of the value in `default`, as tyro has it.
    """
    return dict(_walk(kind, default, "", ""))


def _walk(
    kind: type, default: Any, typed: str, path: str, hidden: bool = False
) -> Iterator[tuple[str, Flag]]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, extras = _without_extras(hints[field.name])
        value = _default(field) if default is None else getattr(default, field.name)
        if is_dataclass(value) and isinstance(hint, type) and isinstance(value, hint):
            hint = type(value)
        markers = {str(extra) for extra in extras}
        args = [extra for extra in extras if hasattr(extra, "metavar")]  # of tyro.conf.arg
        names = [arg.name for arg in args if arg.name is not None]
        name = names[0] if names else field.name.replace("_", "-")
        whole = ".".join(filter(None, (typed, name)))
        inner = f"{path}.{field.name}" if path else field.name
        if is_dataclass(hint):
            yield from _walk(hint, value, whole, inner, hidden or "Suppress" in markers)  # type: ignore[arg-type]
            continue
        options = [option for option in _options(hint) if option is not type(None)]
        choices = tuple(str(c) for o in options for c in (get_args(o) if get_origin(o) is Literal else ()))
        metavar = next((arg.metavar for arg in args if arg.metavar), None) or _metavar(options, choices)
        positional = "Positional" in markers
        yield (
            inner if positional else f"--{whole}",
            Flag(
                inner,
                frozenset(_leaves(hint)),
                any(get_origin(option) is tuple for option in options) and "UseAppendAction" not in markers,
                positional,
                choices if len(options) == len([o for o in options if get_origin(o) is Literal]) else (),
                value,
                metavar,
                MUST_EXIST in markers,
                "FlagCreatePairsOff" not in markers,
                hidden or "Suppress" in markers,
                kind,
                next((arg.help for arg in args if arg.help), None),
            ),
        )


def _metavar(options: Sequence[Any], choices: tuple[str, ...]) -> str:
    if choices:
        return "{" + ",".join(choices) + "}"
    option = options[0]
    if get_origin(option) is tuple:
        items = get_args(option)
        each = _METAVARS.get(items[0], "TEXT")
        return f"{each} [{each} ...]" if ... in items else " ".join([each] * len(items))
    return _METAVARS.get(option, "TEXT")


@cache
def field_docs(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass and of its bases, by the field's name."""
    docs: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(kind.__mro__)):
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except OSError:  # made at run time: there is no source
            continue
        assert isinstance(body, ast.ClassDef)
        for line, after in pairwise(body.body):
            match line, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = inspect.cleandoc(text)
    return docs


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


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


def check(flags: Mapping[str, Flag], argv: Sequence[str], command: str) -> None:
    """Raise ConfigError for a flag that does not exist, a value that it does not take, and one too few or
    too many."""
    see = f"see {command} --help"
    _check_known(flags, argv, see)
    extra: list[str] = []
    places = [name for name, flag in flags.items() if flag.positional]
    for name, value in _given(flags, argv):
        if value is None:
            raise ConfigError(f"{name} has no value", setting=name, remedy=see)
        if not name:
            if not places:
                extra.append(value)
                continue
            name = places[0] if flags[places[0]].many else places.pop(0)
        flag = flags.get(name)
        if flag is not None:  # one of the pair --no-X has no entry
            _check_value(name, value, flag)
    if extra:
        raise ConfigError(f"Unrecognized options: {', '.join(extra)}", remedy=see)
    typed = {word.partition("=")[0].replace("_", "-") for word in argv}
    for name, flag in flags.items():
        left = name in places if flag.positional else name not in typed
        if flag.default is MISSING and left and not (flag.positional and flag.many):
            raise ConfigError(f"{_shown(name, flag)} is missing", setting=name, remedy=see)


def _shown(name: str, flag: Flag) -> str:
    return flag.metavar.strip("[]").split()[0] if flag.positional else name


def _check_known(flags: Mapping[str, Flag], argv: Sequence[str], see: str) -> None:
    named = [name for name, flag in flags.items() if not flag.positional]
    known = {*named, *(negated(n) for n, flag in flags.items() if flag.kinds == {bool} and flag.paired)}
    for place, word in enumerate(argv):
        name = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and len(word) > 2 and name not in known:
            rest = takewhile(lambda other: not other.startswith("-"), argv[place + 1 :])
            last = name.removeprefix("--")
            ends = [flag for flag in known if flag.endswith(f".{last}")]
            ends = ends or [flag for flag in named if f".{last}-" in flag]  # --lr
            meant = ends or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f" (did you mean {meant[0]}?)" if meant else ""
            raise ConfigError(f"Unrecognized options: {', '.join([word, *rest])}{hint}", remedy=see)


def negated(name: str) -> str:
    """The flag that turns one off: --no-bf16, --model.no-smear."""
    level, dot, last = name.removeprefix("--").rpartition(".")
    return f"--{level}{dot}no-{last}"


def _check_value(name: str, value: str, flag: Flag) -> None:
    shown = value if len(value) <= LONGEST else f"{value[:LONGEST]}…"
    if not value.strip() and (flag.positional or flag.kinds & {None, Path}):
        remedy = "give a value" if flag.positional else "leave the flag out, or give a value"
        raise ConfigError(
            f"{_shown(name, flag)} was given nothing ({value!r})", setting=name, given=value, remedy=remedy
        )
    if value == "None" and None in flag.kinds:
        return
    name = _shown(name, flag)
    if flag.choices and value not in flag.choices:
        raise ConfigError(setting=name, given=shown, allowed=f"one of {', '.join(flag.choices)}")
    if flag.must_exist and not os.path.exists(value):
        remedy = "give a file or folder that is there"
        raise ConfigError(f"{name} {value!r} does not exist", setting=name, given=value, remedy=remedy)
    if flag.number is None:
        return
    try:
        number = int(value) if float not in flag.kinds else float(value)
    except ValueError:
        raise ConfigError(setting=name, given=shown, allowed=flag.number) from None
    if isinstance(number, int) and not -_BEYOND <= number < _BEYOND:
        raise ConfigError(setting=name, given=number, allowed="below 2^63")
    if not math.isfinite(number):
        raise ConfigError(setting=name, given=shown, allowed="a finite number")


def _given(flags: Mapping[str, Flag], argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each value with the flag that it follows, or with "" where it follows none; a flag without its value
    with None."""
    name, wants, first = "", 0.0, False
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            if first:
                yield name, None
            typed, equals, value = word.partition("=")
            name = typed.replace("_", "-")
            flag = flags.get(name)
            wants = 0.0 if flag is None or flag.kinds == {bool} else math.inf if flag.many else 1.0
            first = wants > 0 and not equals
            if equals:
                yield name, value
                wants = 0.0
        elif word != "--":
            yield (name if wants else ""), word
            wants, first = max(0.0, wants - 1), False
    if first:
        yield name, None


def completions(flags: Mapping[str, Flag], argv: Sequence[str]) -> list[str]:
    """The words that may follow these: the choices of a flag, or flags; nothing where a value belongs."""
    last = flags.get(argv[-1]) if argv else None
    if last is not None and last.kinds != {bool}:
        return list(last.choices)
    switches = [negated(n) for n, flag in flags.items() if flag.kinds == {bool} and flag.paired]
    return [*(name for name, flag in flags.items() if not flag.positional), *switches, *HELP[1:2]]


def name_flag(error: TopogradError, flags: Mapping[str, Flag], argv: Sequence[str], typed: bool) -> None:
    """Put the flag in place of the setting that an error is about, where it is clear which is meant.

    With `typed`, only a flag that was typed: a run's own settings can be what an error is about.
    """
    if not error.setting:
        return
    given = {word.partition("=")[0].replace("_", "-") for word in argv}
    names = [n for n, f in flags.items() if error.setting in (f.field, f.field.rpartition(".")[2])]
    names = [name for name in names if name in given] or ([] if typed else names)
    if len(names) == 1 and not flags[names[0]].positional:
        # Where the problem begins with it, or "and" goes before it: elsewhere it may be a common word.
        word = rf"(?:^|(?<= and )){re.escape(error.setting)}(?![\w-])"
        error.problem = re.sub(word, names[0], error.problem, count=1)
        error.setting = names[0]


def resumes(argv: Sequence[str], *beside: str) -> bool:
    """Whether a run is resumed; ConfigError for a flag that is not one of those that go `beside` --resume."""
    flags = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    known = ("--resume", "--json", *HELP, COMPLETE, *beside)
    if "--resume" in flags and (foreign := [flag for flag in flags if flag not in known]):
        raise ConfigError(
            f"{foreign[0]} cannot be given with --resume: a run keeps the settings that it began with",
            remedy="leave it out, or start another run",
        )
    return "--resume" in flags


def help_text(kind: type, command: str, default: Any = None, everything: bool = True) -> str:
    """The help of a command: its usage, its docstring, every flag; by parts where settings are nested.

    A dataclass with `COMMON` (names of flags) shows those alone unless `everything` is asked for.
    """
    flags = flags_of(kind, default)
    common = getattr(kind, "COMMON", None)
    flags = {name: flag for name, flag in flags.items() if not flag.hidden}
    shown = {n: f for n, f in flags.items() if common is None or everything or f.positional or n in common}
    places = [
        flag.metavar if flag.default is MISSING or flag.metavar.startswith("[") else f"[{flag.metavar}]"
        for flag in flags.values()
        if flag.positional
    ]
    lines = [" ".join([f"usage: {command}", *places, "[OPTIONS]"]), "", inspect.cleandoc(kind.__doc__ or "")]
    parts: dict[str, list[str]] = {}
    for name, flag in shown.items():
        level = "arguments" if flag.positional else name[2:].rpartition(".")[0]
        parts.setdefault(level, []).append(_described(name, flag))
    for level, described in sorted(parts.items(), key=lambda item: (item[0] != "arguments", item[0])):
        lines += ["", f"{f'{level} options' if level and level != 'arguments' else level or 'options'}:"]
        lines += described
    if len(shown) < len(flags):
        lines += ["", f"{len(flags) - len(shown)} more options: {command} --help-all"]
    return "\n".join(lines)


def _described(name: str, flag: Flag) -> str:
    """A flag and its help, in two columns."""
    width, column = min(shutil.get_terminal_size((100, 24)).columns, 110), 26
    if flag.positional:
        head = f"  {flag.metavar}"
    elif flag.kinds == {bool}:
        head = f"  {name}, {negated(name)}" if flag.paired else f"  {name}"
    else:
        head = f"  {name} {flag.metavar}"
    text = flag.help
    if flag.default is MISSING:
        text += " (required)"
    elif flag.default is not None and flag.default is not False and flag.default not in ("", ()):
        many = isinstance(flag.default, tuple)
        text += f" (default: {' '.join(map(str, flag.default)) if many else flag.default})"
    # A paragraph is filled; a line that begins with a dash or a space begins a new one.
    paragraphs = re.sub(r"\n(?![-\s])", " ", text).splitlines()
    rows = [row for part in paragraphs for row in textwrap.wrap(part, max(20, width - column))]
    first = f"{head:{column}}" if len(head) < column else f"{head}\n{'':{column}}"
    return first + f"\n{'':{column}}".join(rows)
