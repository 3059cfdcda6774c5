"""`topograd compose`: specialists alone and together, on texts of their own and of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from topograd.cli.console import Json, number, out, parse, print_json
from topograd.errors import ConfigError
from topograd.limits import SIZE, check_numbers


@dataclass(frozen=True, kw_only=True)
class Compose:
    """How well a base predicts some texts, with each specialist and with all of them. Less is better."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="BASE")]
    """The run's folder."""
    specialists: Annotated[str, tyro.conf.arg(metavar="A,B")]
    """Folders of specialists, as A,B or A*0.7,B*0.3."""
    data: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(metavar="FILE")] = ()
    """Chat records or text to measure on; may be given again."""
    pool: Literal["deltas", "sum"] = "deltas"
    """What is added up: what each specialist changes, or all their logits (a product of experts)."""
    context: int | None = None
    """Tokens in a row; by default 256, or as many as the base sees."""
    rows: int = 64
    """Rows of each text that are read."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, context=SIZE, rows=SIZE)


def run(argv: list[str]) -> int:
    """Measure, print, return the exit code."""
    asked = parse(Compose, argv, "compose")
    if not asked.data:
        raise ConfigError("--data is not given", remedy="give chat records (.jsonl) or a text to measure on")
    from topograd.specialists.interference import default_compositions, interference
    from topograd.specialists.model import open_composed
    from topograd.specialists.records import rows_of

    model = open_composed(asked.folder, asked.specialists, asked.pool)
    attached = model.pool.attached
    texts = {}
    for path in asked.data:
        inputs, targets = rows_of(path, attached, asked.context)
        texts[str(path)] = inputs[: asked.rows], targets[: asked.rows]
    found = interference(attached, texts, default_compositions(attached, model.weights), asked.pool)
    answer = {"run": str(asked.folder), "specialists": model.weights, "pool": asked.pool, "texts": found}
    if asked.json:
        print_json(answer)
    else:
        out().print(compositions_table(answer))
    return 0


def compositions_table(answer: Mapping[str, Any]) -> Table:
    """A row for each text, a column for each composition."""
    table = Table(title="nats a token", title_justify="left")
    table.add_column("text", overflow="fold")
    for name in answer["texts"][0]["nats"]:
        table.add_column(name, justify="right", overflow="fold")
    for row in answer["texts"]:
        table.add_row(row["text"], *(number(value) for value in row["nats"].values()))
    return table
