"""What the verbs share: reading flags, and writing for programs and for people.

Results go to stdout, everything else to stderr. With --json, stdout is exactly one JSON object; a number
that is not finite is null there, because JSON has no NaN.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro
from rich.console import Console

from topograd.cli.flags import Flag, as_typed, check_known, check_words, flags_of
from topograd.errors import ConfigError, RunError, TopogradError
from topograd.files import naming

if TYPE_CHECKING:
    from topograd.decode.engine import Engine

T = TypeVar("T")
Json = Annotated[
    tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help="Print one JSON object instead of a table.")
]
Folder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
RuntimeFlag = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="NAME",
        help="What runs the model: torch, onnx or onnx:PROVIDER; by default the faster that can.",
    ),
]
WeightsFlag = Annotated[
    Literal["float32", "int8", "int4"],
    tyro.conf.arg(help="Precision of the weights; int8 and int4 are another model, and run in onnx."),
]
DASH = "–"

_read: tuple[Mapping[str, Flag], list[str]] = ({}, [])
"""The flags of the verb that was read last, and the words that were given."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NO_NUMBER = re.compile(r"Error parsing (\S+): (?:invalid literal for (int)|could not convert).*?: ('.*')")


def parse(
    kind: type[T], argv: list[str], verb: str, default: T | None = None, *, program: str = "topograd"
) -> T:
    """The dataclass that the flags describe. What cannot be read is a ConfigError that names the flag."""
    global _read
    flags, command = flags_of(kind, default), f"{program} {verb}"
    _read = flags, argv
    try:
        check_known(flags, argv)
    except ConfigError as error:
        raise ConfigError(str(error), remedy=f"see {command} --help") from None
    check_words(flags, argv)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            if default is None:
                return tyro.cli(kind, prog=command, args=argv)
            return tyro.cli(kind, prog=command, args=argv, default=default)
    except TopogradError as error:
        raise type(error)(as_typed(str(error), flags, argv)) from None
    except (ValueError, OverflowError) as error:  # of a setting that its dataclass could not take
        raise ConfigError(as_typed(str(error), flags, argv), remedy=f"see {command} --help") from None
    except SystemExit as end:
        if not end.code:
            raise
        if refused := _refusal(end):
            raise type(refused)(as_typed(str(refused), flags, argv)) from None
        raise ConfigError(_first_paragraph(said.getvalue()), remedy=f"see {command} --help") from None


def in_flags(message: str) -> str:
    """An error of the verb's work, which speaks of settings, with the flags that were typed for them."""
    return as_typed(message, *_read, given=True)


def _refusal(end: BaseException) -> TopogradError | None:
    """What a dataclass said to its settings, where that is why tyro ended: its box would cut long words."""
    cause = end.__context__
    while cause is not None and not isinstance(cause, TopogradError):
        cause = cause.__context__
    return cause


def parse_one_of(kinds: Mapping[str, type[T]], argv: list[str], verb: str, *, program: str = "topograd") -> T:
    """The dataclass that the first word names, with the flags that follow it."""
    if argv and argv[0] in kinds:
        return parse(kinds[argv[0]], argv[1:], f"{verb} {argv[0]}", program=program)
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: {program} {verb} {{{','.join(kinds)}}} ...\n")
        width = max(map(len, kinds)) + 2
        for name, kind in kinds.items():
            print(f"  {name:{width}}{(kind.__doc__ or '').splitlines()[0]}")
        raise SystemExit(0)
    given = repr(argv[0]) if argv else "nothing"
    raise ConfigError(f"{given} was given to {verb}", remedy=f"choose one of {', '.join(kinds)}")


def _first_paragraph(box: str) -> str:
    """What tyro's box says before its first rule, on one line, and the flag that it takes for meant.

    Where the output is not UTF-8 the box has no frame: a title, a rule, then the same.
    """
    rows = [line.strip("│ ") for line in _COLOUR.sub("", box).splitlines()]
    rows = rows[1:] if box.lstrip().startswith("╭") else rows[2:]
    end = next((i for i, row in enumerate(rows) if row and not row.strip("─-╰╯")), len(rows))
    said = " ".join(rows[:end]).rstrip(" .:")
    if bad := _NO_NUMBER.fullmatch(said):  # of a word without a flag; `check_words` has read the others
        return f"{bad[1]} was given {bad[3]}; it must be a {'whole ' if bad[2] else ''}number"
    meant = re.search(r"Perhaps you meant:\s+(--\S+)", "\n".join(rows))
    return said + (f" (did you mean {meant[1]}?)" if meant else "")


def print_json(value: Mapping[str, Any]) -> None:
    """The one JSON object of a verb."""
    with naming("standard output"):
        print(json.dumps(_finite(value), allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_folder(folder: Path) -> None:
    """Make sure, before long work, that there is a folder for what it gives."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(
            f"{folder} cannot be a folder ({problem.strerror})", remedy="pass --out with one to write to"
        ) from None


def note(text: str) -> None:
    """A line for a person, beside the result."""
    print(f"topograd: {text}", file=sys.stderr, flush=True)


def note_runtime(engine: Engine) -> None:
    """Which runtime computes: what is installed decides it, and it decides how numbers are rounded."""
    note(f"runtime {engine.runtime.name}, weights {engine.runtime.precision}")


def out() -> Console:
    """Where tables for people go; a name with brackets is a name, not a style."""
    return Console(highlight=False, markup=False)


def number(value: object, digits: int = 4) -> str:
    """A number with that many digits, or a dash."""
    if isinstance(value, int | float) and math.isfinite(value):
        return f"{value:.{digits}f}"
    return DASH


def percent(value: object) -> str:
    """A signed percentage, or a dash."""
    return f"{value:+.2f} %" if isinstance(value, int | float) and math.isfinite(value) else DASH
