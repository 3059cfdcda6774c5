"""Reading flags, and writing for programs and for people: what all commands share.

Results go to stdout, everything else to stderr. With --json, stdout is exactly one JSON object; a number
that is not finite is null there, because JSON has no NaN.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

from topograd.cli.flags import COMPLETE, HELP, Flag, check, completions, flags_of, help_text, name_flag
from topograd.errors import ConfigError, RunError, TopogradError
from topograd.files import naming
from topograd.limits import MUST_EXIST

if TYPE_CHECKING:
    from topograd.decode.model import Model
    from topograd.report.tables import Table as ReportTable

T = TypeVar("T")
Json = Annotated[
    tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help="Print one JSON object instead of a table.")
]
Folder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
_MODEL = "A run's folder, a Hugging Face folder, a GGUF file, or hf:ORG/NAME, which is downloaded"
ModelArgument = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL", help=f"{_MODEL}.")]
OptionalModel = Annotated[
    tyro.conf.Positional[Path | None],
    tyro.conf.arg(metavar="[MODEL]", help=f"{_MODEL}; by default the model that comes with the package."),
]
ReadPath = Annotated[Path | None, MUST_EXIST]
RuntimeFlag = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="NAME",
        help="What runs the model: torch, native, onnx or onnx:PROVIDER; by default the faster that can.",
    ),
]
WeightsFlag = Annotated[
    Literal["float32", "bfloat16", "int8", "int4"],
    tyro.conf.arg(
        help="Precision of the weights; int8 and int4 are another model, as is bfloat16 if it rounds. "
        "Torch has float32 alone, onnx all but bfloat16."
    ),
]
NARROWEST = 60
"""Columns: a table that is squeezed further loses its numbers."""
DASH = "–"

_last: tuple[Mapping[str, Flag], list[str]] = ({}, [])
"""The flags of the command that was read last, and its arguments."""


def parse(
    kind: type[T], argv: list[str], verb: str, default: T | None = None, *, program: str = "topograd"
) -> T:
    """The dataclass that the flags describe. What cannot be read is a ConfigError that names the flag."""
    flags, command = flags_of(kind, default), f"{program} {verb}"
    if argv[-1:] == [COMPLETE]:
        print("\n".join(completions(flags, argv[:-1])))
        raise SystemExit(0)
    if wanted := next((word for word in argv if word in HELP), None):
        print(help_text(kind, command, default, everything=wanted == "--help-all"))
        raise SystemExit(0)
    check_flags(flags, argv, command)
    try:
        start = tyro.MISSING_NONPROP if default is None else default
        with redirect_stderr(io.StringIO()):  # tyro prints a box before it ends the program
            return tyro.cli(kind, prog=command, args=argv, default=start)
    except TopogradError as error:
        name_flag(error, flags, argv, typed=False)
        raise
    except (ValueError, OverflowError) as error:  # of a setting that its dataclass could not take
        raise ConfigError(str(error), remedy=f"see {command} --help") from None
    except SystemExit as end:
        cause: BaseException | None = end
        while cause is not None and not isinstance(cause, TopogradError):
            cause = cause.__context__
        if cause is None:
            raise ConfigError(f"{' '.join(argv)!r} cannot be read", remedy=f"see {command} --help") from None
        name_flag(cause, flags, argv, typed=False)
        raise cause from None


def check_flags(flags: Mapping[str, Flag], argv: list[str], command: str) -> None:
    """Check names and values; later errors name these flags."""
    global _last
    _last = flags, argv
    check(flags, argv, command)


def line_of(error: TopogradError) -> str:
    """An error of the command's work as one line, with the flag in place of the setting, if it was typed."""
    name_flag(error, *_last, typed=True)
    return str(error)


def parse_one_of(
    kinds: Mapping[str, type[T]],
    argv: list[str],
    verb: str,
    *,
    program: str = "topograd",
    others: Iterable[str] = (),
) -> T:
    """The dataclass that the first word names, with the flags that follow it; errors name `others` too."""
    if argv and argv[0] in kinds:
        return parse(kinds[argv[0]], argv[1:], f"{verb} {argv[0]}", program=program)
    if argv == [COMPLETE]:
        print("\n".join(kinds))
        raise SystemExit(0)
    if argv and argv[0] in HELP:
        print(f"usage: {program} {verb} {{{','.join(kinds)}}} ...\n")
        width = max(map(len, kinds)) + 2
        for name, kind in kinds.items():
            print(f"  {name:{width}}{(kind.__doc__ or '').splitlines()[0]}")
        raise SystemExit(0)
    given = repr(argv[0]) if argv else "nothing"
    raise ConfigError(f"{given} was given to {verb}", remedy=f"choose one of {', '.join((*kinds, *others))}")


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


def check_new_file(setting: str, file: Path | None) -> None:
    """Raise ConfigError, before long work, where a file that will be written cannot be."""
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        remedy = "give a file in a folder you can write"
        raise ConfigError(f"--{setting} {file} cannot be written", setting=setting, given=file, remedy=remedy)


def note(text: str) -> None:
    """A line for a person, beside the result."""
    print(f"topograd: {text}", file=sys.stderr, flush=True)


def note_runtime(model: Model) -> None:
    """Which runtime computes: what is installed decides it, and it decides how numbers are rounded."""
    from topograd.convert.card import read_origin
    from topograd.runtime.quantize import again

    runtime, session = model.engine.runtime, model.session
    note(f"runtime {runtime.name}, weights {runtime.precision}")
    kinds = read_origin(session.run, session.config).get("kinds")
    if said := again(kinds, runtime.precision, runtime.name):
        note(said)


def out() -> Console:
    """Where tables for people go; a name with brackets is a name, not a style."""
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, NARROWEST)
    return console


def show(as_json: bool, answer: Mapping[str, Any], *parts: Callable[[Any], Table | str | None]) -> None:
    """An answer as one JSON object, or its parts for a person: tables, lines, or what prints by itself."""
    if as_json:
        print_json(answer)
        return
    for part in parts:
        if (shown := part(answer)) is not None:
            out().print(shown, soft_wrap=isinstance(shown, str))


def grid(title: str, *columns: str, left: Collection[str] = (), **options: Any) -> Table:
    """An empty table with numbers in its columns, but for the first and those of `left`."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        words = column == columns[0] or column in left
        table.add_column(column, justify="left" if words else "right", **options)
    return table


def printed(table: ReportTable) -> Table:
    """A table of a report page for a terminal."""
    shown = grid(table.caption, *table.header, overflow="fold")
    shown.columns[0].no_wrap = True
    for row in table.rows:
        shown.add_row(*row)
    return shown


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values, without a header."""
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def number(value: object, digits: int = 4) -> str:
    """A number with that many digits, or a dash."""
    if isinstance(value, int | float) and math.isfinite(value):
        return f"{value:.{digits}f}"
    return DASH


def figure(value: object) -> str:
    """A reading of any kind in words: numbers with four digits, lists with commas, tables by their names."""
    if isinstance(value, Mapping):
        return " ".join(f"{key} {figure(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(figure, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else DASH if value is None else str(value)


def written(parts: Iterable[int]) -> str:
    """A partition or its boundaries, as a flag takes them: 2,2,2."""
    return ",".join(map(str, parts)) or "none"


def percent(value: object) -> str:
    """A signed percentage, or a dash."""
    return f"{value:+.2f} %" if isinstance(value, int | float) and math.isfinite(value) else DASH
