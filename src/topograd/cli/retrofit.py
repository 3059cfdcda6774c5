"""`topograd retrofit`: give a frozen model a draft stage and a table of its own text, in an adapter."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from topograd.cli.console import Folder, Json, ReadPath, out, parse, show
from topograd.cli.progress import counted_by_name


@dataclass(frozen=True, kw_only=True)
class Retrofit:
    """Let a model write, and teach a draft stage on that; the model itself is not changed."""

    folder: Folder
    """The run's folder."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="SIDECAR")] = None
    """Where the draft stage goes; by default RUN/draft, where generate finds it."""
    tokens: int = 500_000
    """Tokens of text that it learns from; about 2 hours of one core for SmolLM2."""
    data: Annotated[ReadPath, tyro.conf.arg(metavar="PATH")] = None
    """Text to begin from: a file or a folder; by default the Python standard library."""
    text: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Keep the model's own text here and go on from it; by default it is deleted when the stage is there."""
    init: Annotated[ReadPath, tyro.conf.arg(metavar="SIDECAR")] = None
    """Go on from the draft stage in this folder, with its vocabulary, on more text."""
    epochs: float = 2.0
    """How often the stage sees each row."""
    vocabulary: int = 8192
    """Tokens that the stage can say."""
    depths: int = 1
    """States that the stage reads: 1 of the last stage of the model, 3 of an early, a middle and the last."""
    slots: int = 1
    """Tokens that one pass of it guesses: 1 is one after the other, 4 a block at once."""
    weights: Literal["float32", "bfloat16", "int8", "int4"] = "float32"
    """The precision that writes the text: the one to decode in, or the fastest, int8."""
    exits: tyro.conf.FlagCreatePairsOff[bool] = False
    """Teach the stages before the last to predict too, for prefix:J, wand and calibrate: minutes more."""
    seed: int = 0
    """Of beginnings, draws and the order of rows."""
    json: Json = False


def run(argv: list[str]) -> int:
    args = parse(Retrofit, argv, "retrofit")
    from topograd.convert.draft_training import DraftTraining
    from topograd.convert.own_text import OwnTextConfig
    from topograd.convert.retrofit import RetrofitConfig, retrofit
    from topograd.runs.session import open_session

    training = DraftTraining(epochs=args.epochs, seed=args.seed)
    text = OwnTextConfig(seed=args.seed, weights=args.weights)
    config = RetrofitConfig(args.tokens, args.vocabulary, args.depths, args.slots, text, training)
    session = open_session(args.folder)
    rows = min(config.text.rows, max(1, -(-args.tokens // config.text.length)))
    config = replace(config, text=replace(config.text, rows=rows))
    found = retrofit(
        session,
        args.out,
        config,
        data=args.data,
        text=args.text,
        init=args.init,
        exits=args.exits,
        on_work=counted_by_name(),
    )
    show(args.json, found, _show)
    return 0


def _show(found: dict[str, Any]) -> None:
    console = out()
    rates = ", ".join(f"{rate:.2f}" for rate in found["agreement"])
    console.print(
        f"{found['adapter']}: a draft stage of {found['parameters'] / 1e6:.1f} M parameters on "
        f"{found['vocabulary']} tokens (they cover {found['coverage']:.2f}), taught on {found['tokens']} "
        f"tokens, and a table of {found['table']} entries",
        soft_wrap=True,
    )
    console.print(
        f"it reads {found['depths']} states and guesses {found['slots']} tokens in a pass; it says what the "
        f"model says, by step: {rates}",
        soft_wrap=True,
    )
    for row in found.get("exits", []):
        console.print(
            f"an exit after stage {row['stage']} says it: {row['agreement']:.2f} ({row['lens']:.2f} as it is)"
        )
    console.print(f"try: topograd generate {found['run']} --depth speculate:draft+lookup", soft_wrap=True)
