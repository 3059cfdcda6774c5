"""`topograd consolidate`: checkpoints that several processes wrote, as those of one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from topograd.cli.console import Json, note, parse, show
from topograd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Consolidate:
    """Write the newest set of a run as one process would; or make one run of stages that trained alone."""

    folders: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="DIR...")]
    """A run; or the folder of each stage, in order, with --out."""
    out: Path | None = None
    """The new run, of stages that trained alone."""
    json: Json = False


def run(argv: list[str]) -> int:
    args = parse(Consolidate, argv, "consolidate")
    if args.out is None and len(args.folders) != 1:
        raise ConfigError(
            f"{len(args.folders)} folders were given", remedy="give one run, or all stages and --out DIR"
        )
    from topograd.parallel.consolidate import consolidate_run, consolidate_stages

    found = (
        consolidate_run(args.folders[0]) if args.out is None else consolidate_stages(args.folders, args.out)
    )
    show(args.json, found, lambda f: note(f"{f['run']} has step {f['step']} as one checkpoint"))
    return 0
