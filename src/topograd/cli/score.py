"""`topograd score`: how likely a model finds a text behind another, at every depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.table import Table

from topograd.cli.console import (
    Json,
    ModelArgument,
    WeightsFlag,
    grid,
    note,
    note_runtime,
    out,
    parse,
    print_json,
)
from topograd.cli.generate import open_model
from topograd.errors import ConfigError

if TYPE_CHECKING:
    from topograd.decode.model import Model
    from topograd.evaluation.texts import ScoredText


@dataclass(frozen=True, kw_only=True)
class Score:
    """The log-probability of a text behind another: rank and logit of every token, at every exit."""

    model: ModelArgument
    context: str
    """The text before; nothing starts a new document."""
    continuation: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = ()
    """What is scored, with the space before its first word; given again for another. The context is run
    once for all."""
    depth: Annotated[str | None, tyro.conf.arg(metavar="DEPTH")] = None
    """One depth instead of every exit: full, prefix:J, path:1,3, branches:1-4*3+1-2; pool, router (fitted by
    topograd calibrate) or shrinkage."""
    specialists: Annotated[str | None, tyro.conf.arg(metavar="A,B")] = None
    """Folders of specialists that are active, as A,B or A*0.7,B*0.3: the last exit predicts with them."""
    runtime: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """What runs the model: torch, native, onnx or onnx:PROVIDER. By default torch, which is made for long
    prompts, and for other weights than float32 the faster that can."""
    weights: WeightsFlag = "float32"
    json: Json = False


def run(argv: list[str]) -> int:
    args = parse(Score, argv, "score")
    if not args.continuation:
        raise ConfigError(
            "--continuation is missing", remedy='give the text to score, as in --continuation " Paris"'
        )
    from topograd.decode.depths import check_depth
    from topograd.evaluation.texts import score

    if args.depth is not None:
        check_depth(args.depth)

    model = scored_model(args.model, args.specialists, args.runtime, args.weights)
    scored = score(model, args.context, args.continuation, args.depth)
    if cut := max(each.cut for each in scored):
        note(f"the context is longer than the model reads; its first {cut} tokens were left out")
    names = depth_names(model, args.specialists) if args.depth is None else [args.depth]
    if args.json:
        ran = {"runtime": model.engine.runtime.name, "weights": model.engine.runtime.precision}
        all_ = [{"continuation": one.text, "stages": one.stages(), "cut": one.cut} for one in scored]
        found = all_[0] if len(all_) == 1 else {"continuations": all_}
        print_json(found | {"depths": names} | ran)
    else:
        note_runtime(model)
        console = out()
        for each in scored:
            console.print(_table(each, names))
    return 0


def scored_model(
    model: Path, specialists: str | None, runtime: str | None = None, weights: str = "float32"
) -> Model:
    """A run to be scored, with specialists as users write them; by torch, which is made for long prompts."""
    runtime = "torch" if runtime is None and weights == "float32" else runtime
    return open_model(model, specialists, runtime, weights)


def depth_names(model: Model, specialists: str | None) -> list[str]:
    """What each exit is called: the base's stages, specialists alone, and last all that are active."""
    names = [f"stage {k + 1}" for k in range(len(model.engine.exits))]
    if specialists is not None:
        from topograd.specialists.composition import parse_specialists

        added = [Path(folder).resolve().name for folder in parse_specialists(specialists)]
        names[len(names) - len(added) :] = [*added[:-1], specialists]
    return names


def _table(scored: ScoredText, names: Sequence[str]) -> Table:
    """A row for each token: its log-probability and rank at each depth."""
    stages = scored.stages()
    table = grid(repr(scored.text), "token", *names)
    for i, piece in enumerate(scored.pieces):
        cells = [stage["tokens"][i] for stage in stages]
        table.add_row(repr(piece), *(f"{cell['logprob']:.4f} ({cell['rank']})" for cell in cells))
    table.add_section()
    table.add_row("all", *(f"{stage['logprob']:.4f}" for stage in stages))
    return table
