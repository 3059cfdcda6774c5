"""`topograd route`: learn which specialist a text wants, or ask."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from topograd.cli.console import Json, number, out, parse, print_json
from topograd.errors import ConfigError
from topograd.limits import SEED, SIZE, check_numbers


@dataclass(frozen=True, kw_only=True)
class Route:
    """Train a router on held-out texts and write it to --out; or ask one that is there about --prompt."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="BASE")]
    """The run's folder."""
    specialists: Annotated[str, tyro.conf.arg(metavar="A,B")]
    """Folders of the specialists to choose from."""
    out: Path
    """The router's folder: new to train one, there already to ask it."""
    data: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(metavar="FILE")] = ()
    """Chat records or text to train and judge it on; may be given again."""
    prompt: str | None = None
    """Ask the router which specialist this text wants."""
    context: int | None = None
    """Tokens in a row; by default 256, or as many as the base sees."""
    rows: int = 64
    """Rows of each text that are read."""
    seed: int = 0
    """Draws the router's first weights."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, context=SIZE, rows=SIZE, seed=SEED)


def run(argv: list[str]) -> int:
    """Train or ask, print, return the exit code."""
    asked = parse(Route, argv, "route")
    if (asked.prompt is None) == (not asked.data):
        raise ConfigError("give --data to train a router, or --prompt to ask one that is there, not both")
    from topograd.specialists.model import SpecialistPool, open_named
    from topograd.specialists.records import rows_of
    from topograd.specialists.router import open_router, save_router, train_router

    adapters, _ = open_named(asked.specialists)
    pool = SpecialistPool.open(asked.folder, adapters)
    answer: dict[str, Any] = {"run": str(asked.folder), "router": str(asked.out)}
    if asked.prompt is not None:
        router = open_router(asked.out, pool.attached, adapters)
        chosen = router.choose(pool.attached, pool.model().encode(asked.prompt))
        answer |= {"prompt": asked.prompt, "specialists": dict(chosen)}
    else:
        texts = [rows_of(path, pool.attached, asked.context) for path in asked.data]
        work = asked.out.with_name(f"{asked.out.name}.work")
        router, found = train_router(
            pool.attached, [(i[: asked.rows], t[: asked.rows]) for i, t in texts], asked.seed, work
        )
        save_router(asked.out, pool.attached, adapters, router, found)
        shutil.rmtree(work)
        answer |= {"specialists": list(adapters), **found}
    if asked.json:
        print_json(answer)
    elif asked.prompt is not None:
        print(", ".join(answer["specialists"]) or "base")
    else:
        out().print(regret_table(answer))
    return 0


def regret_table(answer: Mapping[str, Any]) -> Table:
    """The router beside the oracle and beside always the same choice."""
    title = f"nats a token on {answer['rows']} rows that were not trained on"
    table = Table(title=title, title_justify="left")
    for column in ("choice", "nats"):
        table.add_column(column, justify="right" if column == "nats" else "left")
    table.add_row("oracle", number(answer["oracle"]))
    table.add_row("router", number(answer["router"]))
    for name, value in answer["always"].items():
        table.add_row(f"always {name}", number(value))
    return table
