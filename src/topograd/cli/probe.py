"""`topograd probe BASE --prompt ... --target ...`: where a model knows something; `probe ladder`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table

from topograd.cli.console import Json, ModelArgument, grid, number, parse, show
from topograd.errors import ConfigError

if TYPE_CHECKING:
    from topograd.specialists.model import SpecialistPool


@dataclass(frozen=True, kw_only=True)
class Question:
    """A target's rank, logit and probability behind a prompt, at every stage and along paths."""

    model: ModelArgument
    prompt: str
    """The text before the target."""
    target: str
    """What should follow, as " Paris"; its first space counts."""
    specialist: Annotated[Path | None, tyro.conf.arg(metavar="SPEC")] = None
    """A specialist's folder, or several with commas between: its stage and paths are read too."""
    passage: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """A text in front of the prompt: everything is read without and with it."""
    chat: tyro.conf.FlagCreatePairsOff[bool] = False
    """The prompt is a user's message, spelled by the base's chat template; the passage is in it."""
    json: Json = False


def run(argv: list[str]) -> int:
    if argv[:1] == ["ladder"]:
        from topograd.cli.probe_ladder import run as run_ladder

        return run_ladder(argv[1:])
    args = parse(Question, argv, "probe")
    if not args.target:
        raise ConfigError("--target is empty", remedy="give the text that should follow")
    from topograd.specialists.model import SpecialistPool
    from topograd.specialists.probe import probe

    folders = [] if args.specialist is None else str(args.specialist).split(",")
    pool = SpecialistPool.open(args.model, {Path(folder).resolve().name: folder for folder in folders})
    attached = pool.attached
    prompts, target = _tokens(args, pool)
    prompt, passage = prompts[0], prompts[1] if len(prompts) > 1 else None
    found = probe(attached, prompt, target)
    if passage is not None:
        found["with_passage"] = probe(attached, passage, target)
    answer = {
        "run": str(args.model),
        "prompt": args.prompt,
        "target": args.target,
        "tokens": target,
    } | found
    tables = [lambda _: stages_table(f"{args.target!r} behind {args.prompt!r}", found)]
    if passage is not None:
        tables.append(lambda _: stages_table("with the passage in front", found["with_passage"]))
    show(args.json, answer, *tables)
    return 0


def _tokens(args: Question, pool: SpecialistPool) -> tuple[list[list[int]], list[int]]:
    """The prompt's tokens, those of the prompt behind the passage, and the target's, split as in a text."""
    from topograd.evaluation.texts import encode_pair

    texts = [args.prompt]
    if args.passage is not None:
        texts.append(f"{args.passage}\n{args.prompt}")
    if not args.chat:
        pairs = [encode_pair(pool.model(), text, args.target) for text in texts]
        return [before for before, _ in pairs], pairs[0][1]
    from topograd.specialists.records import spelled

    texts, encode = spelled(pool.vocabulary, texts), pool.vocabulary.encode_chat
    prompts = [encode(text) for text in texts]
    return prompts, encode(texts[0] + args.target)[len(prompts[0]) :] or encode(args.target)


def stages_table(title: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """A row for each stage, then for each path."""
    columns = ("rank", "logit", "P(first token)", "P(all of it)", "top instead")
    table = grid(title, "stage or path", *columns)
    for row in (*found["stages"], *found["paths"]):
        if "path" in row:
            name = f"path: {row['path']}"
        else:
            own = f", {row['specialist']}" if row["specialist"] else ""
            name = f"stage {row['stage']}, {row['layers']} layers{own}"
        table.add_row(
            name,
            str(row["rank"]),
            number(row["logit"], 2),
            number(row["probability"]),
            f"{row['sequence']:.2e}",
            repr(row["top"]),
        )
    return table
