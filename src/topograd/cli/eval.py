"""`topograd eval`: measure a run on its held-out text, or on any other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from topograd.cli.console import Folder, Json, out, parse, print_json
from topograd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Measure a run: bits per byte, calibration, effective rank and usefulness of each stage."""

    folder: Folder
    """The run's folder."""
    data: Path | None = None
    """Other text to read: a file, a JSONL file or a folder of them, all of it."""
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """The checkpoint to measure, instead of the newest."""
    bytes: int | None = None
    """Read at most this much of the text, spaced evenly over it."""
    json: Json = False


def run(argv: list[str]) -> int:
    """Measure, print, return the exit code."""
    asked = parse(Eval, argv, "eval")
    if asked.bytes is not None and asked.bytes < 1:
        raise ConfigError(f"--bytes is {asked.bytes}; it must be at least 1")
    from topograd.cli.progress import counted
    from topograd.cli.results import measured, readings_table
    from topograd.runs.session import heldout_text, open_session

    session = open_session(asked.folder, asked.from_)
    text = heldout_text(session, asked.data, asked.bytes)
    results = measured(session, text, counted("windows read"))
    if asked.json:
        print_json(results)
    else:
        out().print(readings_table(session.config, results))
    return 0
