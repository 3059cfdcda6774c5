"""`topograd probe BASE --prompt ... --target ...`: where a model knows something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table

from topograd.cli.console import Json, number, out, parse, print_json
from topograd.errors import ConfigError

if TYPE_CHECKING:
    from topograd.specialists.attach import Attached


@dataclass(frozen=True, kw_only=True)
class Question:
    """A target's rank, logit and probability behind a prompt, at every stage and along paths."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="BASE")]
    """The run's folder."""
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
    """Probe, print, return the exit code."""
    asked = parse(Question, argv, "probe")
    if not asked.target:
        raise ConfigError("--target is empty; give the text that should follow")
    from topograd.specialists.model import SpecialistPool
    from topograd.specialists.probe import probe

    folders = [] if asked.specialist is None else str(asked.specialist).split(",")
    pool = SpecialistPool.open(asked.folder, {Path(folder).resolve().name: folder for folder in folders})
    attached = pool.attached
    prompt, passage = _prompts(asked, attached)
    target = attached.vocabulary.encode_chat(asked.target)
    found = probe(attached, prompt, target)
    if passage is not None:
        found["with_passage"] = probe(attached, passage, target)
    answer = {
        "run": str(asked.folder),
        "prompt": asked.prompt,
        "target": asked.target,
        "tokens": target,
    } | found
    if asked.json:
        print_json(answer)
        return 0
    out().print(stages_table(f"{asked.target!r} behind {asked.prompt!r}", found))
    if passage is not None:
        out().print(stages_table("with the passage in front", found["with_passage"]))
    return 0


def _prompts(asked: Question, attached: Attached) -> tuple[list[int], list[int] | None]:
    """The tokens of the prompt, and of the prompt behind the passage if there is one."""
    texts = [asked.prompt]
    if asked.passage is not None:
        texts.append(f"{asked.passage}\n{asked.prompt}")
    if asked.chat:
        from topograd.specialists.records import spelled

        texts = spelled(attached.vocabulary, texts)
        ids = [attached.vocabulary.encode_chat(text) for text in texts]
    else:
        from topograd.data.foreign_tokenizer import ForeignTokenizer

        tokenizer = attached.base.tokenizer
        special = isinstance(tokenizer, ForeignTokenizer)
        ids = [tokenizer.encode(t, special=True) if special else tokenizer.encode(t) for t in texts]  # type: ignore[call-arg]
    return ids[0], ids[1] if len(ids) > 1 else None


def stages_table(title: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """A row for each stage, then for each path."""
    table = Table(title=title, title_justify="left")
    table.add_column("stage or path")
    for name in ("rank", "logit", "P(first token)", "P(all of it)", "top instead"):
        table.add_column(name, justify="right")
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
