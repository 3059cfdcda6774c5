"""Reference of the commands: every flag, read from the dataclass that the command itself parses.

Each command is called with `--help`, and the first thing that it does with its dataclass is caught. A command
without one lists its subcommands, which are asked in turn.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from site_fields import Described, described, escaped, markdown, shown

MORE: dict[str, Sequence[tuple[str, ...]]] = {
    "eval": [("core",)],
    "probe": [("ladder",)],
    "train": [("--task", "images")],
}
"""What a command takes beside its own flags, and does not list as subcommands."""


@dataclass(frozen=True)
class Command:
    """One command: its words, its dataclass, or the help that it printed where it has none."""

    words: tuple[str, ...]
    kind: type | None
    default: Any
    printed: str


INDEX = """(commands)=
# Commands

Generated from the flags of each command. Every command that measures takes `--json`: stdout is then one JSON
object. Exit codes: 0 done, 1 a bug, 2 bad input (one line on stderr), 130 interrupted.

| command | purpose |
|---|---|
"""


def ask(words: Sequence[str], main: Callable[[list[str]], int]) -> Command:
    """The command of a program behind these words."""
    from topograd.cli import console

    caught: list[tuple[type, Any]] = []

    def flags_of(kind: type, default: Any = None) -> None:
        caught.append((kind, default))
        raise SystemExit(0)

    out = io.StringIO()
    with mock.patch.object(console, "flags_of", flags_of), contextlib.redirect_stdout(out):
        code = main([*words, "--help"])
    if code != 0:
        raise RuntimeError(f"{' '.join(words)} --help ended with {code}")
    kind, default = caught[0] if caught else (None, None)
    return Command(tuple(words), kind, default, out.getvalue())


def commands_of(verb: str) -> list[Command]:
    """A command of `topograd` and its subcommands."""
    from topograd.cli.main import main

    first = ask([verb], main)
    listed = re.search(r"\{([\w,-]+)\}", first.printed) if first.kind is None else None
    below = [(name,) for name in listed[1].split(",")] if listed else MORE.get(verb, ())
    return [first, *(ask([verb, *words], main) for words in below)]


def flags(kind: type, default: Any, prefix: str = "") -> Iterator[tuple[str, Described]]:
    """Every flag of a dataclass by the name that is typed; a positional argument has no dashes."""
    for one in described(kind, default):
        renamed = [e.name for e in one.extras if isinstance(getattr(e, "name", None), str)]
        name = renamed[0] if renamed else one.field.name.replace("_", "-")
        whole = ".".join(filter(None, (prefix, name)))
        if one.marked("Suppress"):
            continue
        if one.nested:
            yield from flags(one.hint, one.default, whole)
        elif one.marked("Positional"):
            yield one.metavar, one
        else:
            yield f"--{whole}", one


def section(command: Command, level: str) -> str:
    """A command in Markdown."""
    words = " ".join(command.words)
    title = f"{level} `topograd {words}`\n"
    if command.kind is None:
        return f"{title}\n```text\n{command.printed.strip()}\n```\n"
    rows = list(flags(command.kind, command.default))
    places = " ".join(name for name, _ in rows if not name.startswith("--"))
    usage = f"topograd {words} {places} [flags]".replace("  ", " ")
    about = escaped(" ".join((command.kind.__doc__ or "").split()))
    lines = [title, about, "", f"```text\n{usage}\n```", ""]
    for name, one in rows:
        value = one.metavar if name.startswith("--") else ""
        default = shown(one.default)
        text = markdown(one.text)
        tail = f"Default: `{default}`." if default and default != "false" else ""
        body = "\n\n".join(filter(None, (text, tail))) if text.startswith("```") else f"{text} {tail}".strip()
        body = (body or "No further description.").replace("\n", "\n  ")
        lines += [f"`{f'{name} {value}'.strip()}`", f": {body}", ""]
    return "\n".join(lines)


def pages(groups: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The page of each command, by name, and the index; commands stand in groups, by heading."""
    made = {}
    verbs = [verb for names in groups.values() for verb in names]
    for verb in verbs:
        first, *rest = commands_of(verb)
        parts = [section(first, "#"), *(section(command, "##") for command in rest)]
        made[verb] = f"(command-{verb})=\n" + "\n".join(parts)
    rows = []
    for group, names in groups.items():
        rows += [f"| **{escaped(group)}** | |"] if group else []
        rows += [f"| [`{verb}`](#command-{verb}) | {escaped(text)} |" for verb, text in names.items()]
    table = "\n".join(rows)
    tree = "\n".join(["```{toctree}", ":hidden:", "", *verbs, "```"])
    made["index"] = f"{INDEX}{table}\n\n{tree}\n"
    return made


def write(folder: Path) -> None:
    """Write the pages into `folder`."""
    from topograd.cli import main

    groups = getattr(main, "GROUPS", {"": main.VERBS})
    write_pages(folder, {f"{name}.md": text for name, text in pages(groups).items()})


def write_pages(folder: Path, made: Mapping[str, str]) -> None:
    """Write a folder of pages, and remove what is not made any more."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        write_page(folder / name, text)


def write_page(path: Path, text: str) -> None:
    """Write a file if its text changed, so that Sphinx rebuilds no others."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
