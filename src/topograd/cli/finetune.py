"""`topograd finetune`: train a specialist, and prove that its base did not move."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from topograd.cli.console import Json, number, out, parse, print_json
from topograd.cli.flags import as_typed, flags_of
from topograd.cli.progress import counted, say_how_to_resume, training_progress
from topograd.errors import ConfigError
from topograd.specialists.settings import FineTune


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """Train a specialist's own stage and head. Its base is frozen; after every checkpoint that is checked."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SPEC")]
    """The specialist's folder, made by `topograd attach`."""
    settings: Annotated[FineTune, tyro.conf.arg(name="")] = field(default_factory=FineTune)
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Continue a training that was stopped, with the settings that it began with."""
    stop_after: Annotated[int | None, tyro.conf.arg(metavar="STEP")] = None
    """Stop at this step, as if it were interrupted."""
    base: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where the base is now, if it was moved."""
    json: Json = False

    def __post_init__(self) -> None:
        if self.stop_after is not None and self.stop_after < 1:
            raise ConfigError(setting="stop_after", given=self.stop_after, allowed="at least 1")


def run(argv: list[str]) -> int:
    """Train, print what was found, return the exit code: 1 if the base moved."""
    asked = parse(Finetune, argv, "finetune")
    _check(asked)
    from topograd.specialists.finetune import FineTuning

    try:
        if asked.resume:
            trainer = FineTuning.resume(asked.folder, asked.base)
        else:
            trainer = FineTuning.start(asked.folder, asked.settings, asked.base)
    except ConfigError as error:  # it speaks of settings
        raise ConfigError(as_typed(str(error), flags_of(Finetune), argv)) from None
    began = trainer.step
    with training_progress(asked.folder.name) as on_step:
        result = trainer.train(asked.stop_after, on_step, counted("rows of the base's hidden states"))
    if asked.json:
        print_json(result)
    else:
        out().print(preservation_table(result))
    if not result["base_bit_identical"]:
        return 1
    again = f"topograd finetune {shlex.quote(str(asked.folder))} --resume"
    return say_how_to_resume(result, trainer.task.schedule.steps, again, asked.stop_after, began)


def _check(asked: Finetune) -> None:
    changed = [
        f.name for f in fields(FineTune) if getattr(asked.settings, f.name) != getattr(FineTune(), f.name)
    ]
    if asked.resume and changed:
        raise ConfigError(
            "--resume continues with the settings that the training began with",
            remedy=f"leave out --{changed[0].replace('_', '-')}",
        )
    if not asked.resume and not asked.settings.data:
        raise ConfigError("--data is not given", remedy="give chat records (.jsonl) or a text, or --resume")


def preservation_table(result: Mapping[str, Any]) -> Table:
    """The base and the specialist at every checkpoint."""
    title = f"{result['specialist']}: step {result['steps']}, loss {number(result['loss'], 3)}"
    table = Table(title=title, title_justify="left")
    table.add_column("step", justify="right")
    for name in ("base Δ logit", "base BPB", "base questions", "BPB with it", "questions with it"):
        table.add_column(name, justify="right")
    tasks = list(result["base_tasks"])
    for name in tasks:
        table.add_column(f"base {name}", justify="right")
        table.add_column(f"{name} with it", justify="right")
    for row in result["preservation"]:
        table.add_row(
            str(row["step"]),
            number(row["base_max_abs_logit_delta"]),
            number(row["base_bpb"]),
            number(row["base_choices"], 2),
            number(row["bpb"]),
            number(row["choices"], 2),
            *(number(row[which][name], 2) for name in tasks for which in ("base_tasks", "tasks")),
        )
    return table
