"""`topograd generate`: continue a text, as deep as each token needs or as deep as is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from topograd.cli.console import Json, RuntimeFlag, WeightsFlag, note, note_runtime, out, parse, print_json
from topograd.cli.flags import as_typed, flags_of
from topograd.errors import ConfigError
from topograd.files import write_atomic
from topograd.pretrained import REFERENCE

if TYPE_CHECKING:
    from topograd.decode.model import Generated, Model, Piece

Show = Callable[[str, str], None]
"""Writes a part of the text; who wrote it is "stage 2", a drafter's name, or "" for the prompt."""
DRAFTERS = ("#2e8b57", "#d0479e", "#008b8b")
"""Colours of drafters that are no stage, in the order in which they come; see `report/depth_text.py`."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a text with a run's model. Only the layers that a token needs are computed."""

    folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[DIR]")] = None
    """The run's folder; the model that comes with the package if not given."""
    prompt: str = ""
    """The text to continue; nothing starts a new document."""
    tokens: int = 200
    """How many tokens to write."""
    depth: Annotated[str | None, tyro.conf.arg(metavar="DEPTH")] = None
    """How deep each token goes; by default speculate where the calibration says that it pays, else full.
    full: every stage
    prefix:J: the first J of the stages that predict
    path:1,3: some stages, skipping others
    branches:1-4*3+1-2: several paths, pooled with weights
    wand, wand:RULE:NUMBER: leave early, approximate
    - flip-rate, NUMBER: share of tokens that may differ
    - rival-gain or sum-of-bounds, NUMBER: safety factor
    speculate: draft and verify; what full depth writes.
    Who drafts is measured by topograd calibrate, else lookup
    speculate:WHO+WHO: drafts by whose guess is worth most
    - N or N:MARGIN: N tokens by the first stage, while sure
    - lookup: what followed in the text
    - table, draft: what topograd retrofit made
    - FOLDER: a smaller run with the same tokenizer"""
    draft: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A smaller run that drafts, or the folder that topograd retrofit made; by default RUN/draft."""
    specialists: Annotated[str | None, tyro.conf.arg(metavar="A,B")] = None
    """Folders of specialists that are active, as A,B or A*0.7,B*0.3; what each changes is added up."""
    router: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """What topograd route made: it chooses one of --specialists, or none, for each prompt or message."""
    stages: Annotated[int | None, tyro.conf.arg(metavar="J")] = None
    """The same as --depth prefix:J."""
    temperature: float = 0.0
    """0 takes the likeliest token each time; 1 draws from the model's own distribution."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K")] = None
    """Draw among this many likeliest tokens only."""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P")] = None
    """Draw among the fewest likeliest tokens that have this probability together."""
    seed: int = 0
    """Of the draws, with a temperature."""
    chat: tyro.conf.FlagCreatePairsOff[bool] = False
    """Talk with an imported model, by its own template: --prompt is the first message, or each line typed."""
    stop: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = ()
    """End before this text."""
    colour: tyro.conf.FlagCreatePairsOff[bool] = False
    """Colour each token by the stage that it left after, or by who drafted it, and count them."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the text as a page in which each token shows the stage that it left after."""
    runtime: RuntimeFlag = None
    weights: WeightsFlag = "float32"
    json: Json = False


def run(argv: list[str]) -> int:
    """Write a continuation and return the exit code."""
    asked = parse(Generate, argv, "generate")
    _check(asked)
    model = _model(asked)
    exits = len(model.session.plan.predicting())
    console = out()
    colours = _colours(console, exits) if asked.colour else {}
    show = _coloured(console, colours) if colours else _plain
    show = silent if asked.json else _after_runtime(show, model)
    try:
        if asked.chat:
            return _chat(asked, model, show, colours)
        made = _continue(asked, model, _depth(asked, exits), show)
    except ConfigError as error:  # it speaks of Python's arguments
        raise ConfigError(as_typed(str(error), flags_of(Generate), argv)) from None
    if asked.json:
        answer = {"run": str(model.session.run.folder), "prompt": asked.prompt, "text": str(made)}
        print_json(answer | _active(model) | _numbers(made, exits) | _ran(model))
    else:
        print(flush=True)
        if asked.colour:
            console.print(_legend(made.pieces, exits, colours), soft_wrap=True)
    if made.depth == "speculate" and not made.drafted and asked.depth is not None:
        note("by the run's calibration drafts do not pay on this machine; this is full depth")
    if asked.html is not None:
        _write_page(asked.html, model, made)
    return 0


def _model(asked: Generate) -> Model:
    """The run, with the specialists that are asked for."""
    if asked.specialists is not None:
        base, chosen = asked.folder or REFERENCE, asked.specialists
        if asked.router is not None:
            from topograd.specialists.router import open_routed

            return open_routed(base, chosen, asked.router, asked.runtime, asked.weights)
        from topograd.specialists.model import open_composed

        return open_composed(base, chosen, runtime=asked.runtime, weights=asked.weights)
    from topograd.decode.model import load

    return load(asked.folder or REFERENCE, runtime=asked.runtime, weights=asked.weights)


def _active(model: Model) -> dict[str, Any]:
    """Which specialists wrote the last text, where there are any."""
    weights = getattr(model, "weights", None)  # of a composition
    return {} if weights is None else {"specialists": weights}


def _ran(model: Model) -> dict[str, Any]:
    return {"runtime": model.engine.runtime.name, "weights": model.engine.runtime.precision}


def _chat(asked: Generate, model: Model, show: Show, colours: dict[str, str]) -> int:
    """A conversation: one answer to --prompt, or one to each line of the terminal, until it ends."""
    from topograd.convert.chat import render_chat

    template, special, encode = _spelling(model)
    messages: list[dict[str, str]] = []
    exits = len(model.session.plan.predicting())
    numbers: dict[str, Any] = {}
    for words in [asked.prompt] if asked.prompt else _typed(asked.json):
        messages.append({"role": "user", "content": words})
        tokens = encode(render_chat(template, messages, special_tokens=special))
        _note_long(len(tokens), model, "conversation")
        made = model.generate(
            tokens,
            asked.tokens,
            depth=_depth(asked, exits),
            on_piece=lambda piece: show(piece.text, writer(piece)),
            **_sampling(asked),
        )
        messages.append({"role": "assistant", "content": str(made)})
        numbers = _numbers(made, exits)
        if not asked.json:
            print(flush=True)
            if asked.colour:
                out().print(_legend(made.pieces, exits, colours), soft_wrap=True)
    if asked.json:
        answer = {"run": str(model.session.run.folder), "prompt": asked.prompt, "messages": messages}
        answer |= {"text": messages[-1]["content"] if messages else ""} | _active(model)
        print_json(answer | numbers | _ran(model))
    return 0


def _spelling(model: Model) -> tuple[str, dict[str, str], Callable[[str], list[int]]]:
    """The chat template, the special tokens that it names, and what encodes its text.

    Specialists on a base without a template were trained on the plain one.
    """
    tokenizer, pool = model.session.tokenizer, getattr(model, "pool", None)
    if pool is not None:
        from topograd.specialists.records import template_of

        vocabulary = pool.vocabulary
        return template_of(vocabulary), tokenizer.special_tokens, vocabulary.encode_chat
    template = tokenizer.get_chat_template()
    return template, tokenizer.special_tokens, partial(tokenizer.encode, kind="chat")


def _typed(json: bool) -> Iterator[str]:
    """Each line that is typed; a person is asked for it where that is no part of the result."""
    asking = sys.stdin.isatty() and not json
    while True:
        try:
            yield input("> " if asking else "")
        except EOFError:
            return


def _check(asked: Generate) -> None:
    if asked.depth is not None and asked.stages is not None:
        raise ConfigError(
            "--depth and --stages are both given", remedy="--stages J is --depth prefix:J, so give one"
        )
    if asked.router is not None and asked.specialists is None:
        raise ConfigError(
            "--router chooses among specialists, and --specialists is not given", remedy="give A,B"
        )
    if asked.html is not None and asked.chat:
        raise ConfigError(
            "--html shows one continuation and --chat is a conversation", remedy="leave one of them out"
        )
    if asked.html is not None:
        folder = asked.html.parent
        if asked.html.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(
                f"--html {asked.html} cannot be written", remedy="give a file in a folder you can write"
            )


def _depth(asked: Generate, exits: int) -> str | None:
    """The depth that is asked for, in the words of `depth.modes`."""
    if asked.stages is None:
        return asked.depth
    if not 1 <= asked.stages <= exits:
        raise ConfigError(
            f"--stages is {asked.stages}", remedy=f"the model has {exits} that predict: give 1 to {exits}"
        )
    return f"prefix:{asked.stages}"


def _continue(asked: Generate, model: Model, depth: str | None, show: Show) -> Generated:
    """Write the prompt and what follows it; nothing before it is known that all of it can be done."""
    begun = False

    def begin() -> None:
        nonlocal begun
        begun = True
        _note_long(len(model.encode(asked.prompt)), model, "prompt")
        show(asked.prompt, "")

    def on_piece(piece: Piece) -> None:
        if not begun:
            begin()
        show(piece.text, writer(piece))

    made = model.generate(asked.prompt, asked.tokens, depth=depth, on_piece=on_piece, **_sampling(asked))
    if not begun:
        begin()
    return made


def _sampling(asked: Generate) -> dict[str, Any]:
    """How tokens are drawn and drafted, and where the text ends."""
    names = ("temperature", "top_k", "top_p", "seed", "stop", "draft")
    return {name: getattr(asked, name) for name in names}


def _note_long(tokens: int, model: Model, what: str) -> None:
    context = model.session.config.model.context
    if tokens > context:
        note(f"the {what} has {tokens} tokens and the model reads {context}; it sees the last of them")


def _numbers(made: Generated, exits: int) -> dict[str, Any]:
    """What there is to say of a text beside the text; stages are counted from 1."""
    counts = made.exits(exits)
    tokens = sum(counts)
    numbers: dict[str, Any] = {"stages": made.deepest, "tokens": tokens, "depth": made.depth, "exits": counts}
    numbers |= {"seconds": made.seconds, "tokens_per_second": tokens / made.seconds}
    if made.drafted is not None and made.accepted is not None:
        share = made.accepted / made.drafted if made.drafted else None
        numbers |= {"acceptance": share, "drafts": made.drafted, "accepted": made.accepted}
        by = {name: {"drafts": n, "accepted": kept} for name, (n, kept) in made.by_drafter.items()}
        numbers |= {"by_drafter": by}
    return numbers


def writer(piece: Piece) -> str:
    """Who wrote a token: the stage that it left after, or a drafter that is no stage of the model."""
    drafted = piece.drafter and not piece.drafter.startswith("stage ")
    return piece.drafter if drafted else f"stage {piece.exit + 1}"


def silent(text: str, who: str) -> None:
    """With --json, nothing but the one object is written."""


def _after_runtime(show: Show, model: Model) -> Show:
    """The same, with a line before the first text that says what runs the model."""
    begun = False

    def first(text: str, who: str) -> None:
        nonlocal begun
        if not begun:
            note_runtime(model.engine)
        begun = True
        show(text, who)

    return first


def _plain(text: str, who: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _colours(console: Console, stages: int) -> dict[str, str]:
    """A colour for each stage, or none where there is no terminal, or one without colours."""
    if console.color_system is None or console.no_color:
        return {}
    from topograd.report.depth_text import stage_colour  # brings matplotlib, which takes a while

    return {f"stage {stage + 1}": stage_colour(stage, stages) for stage in range(stages)}


def _coloured(console: Console, colours: dict[str, str]) -> Show:
    """Shows each part in its writer's colour; a drafter that comes first is given the next of its own."""
    stages = len(colours)

    def show(text: str, who: str) -> None:
        if who and who not in colours:
            colours[who] = DRAFTERS[(len(colours) - stages) % len(DRAFTERS)]
        console.print(Text(text, colours.get(who, "")), end="", soft_wrap=True)

    return show


def _legend(pieces: list[Piece], exits: int, colours: dict[str, str]) -> Text:
    """How many tokens left after each stage, and how many drafters that are no stages wrote."""
    counts = dict.fromkeys((f"stage {k + 1}" for k in range(exits)), 0)
    for piece in pieces:
        counts[writer(piece)] = counts.get(writer(piece), 0) + 1
    each = [Text(f"{who}: {count}", colours.get(who, "")) for who, count in counts.items()]
    legend = Text("tokens that left after ").append_text(Text(", ").join(each[:exits]))
    return (
        legend.append_text(Text("; drafted by ") + Text(", ").join(each[exits:])) if each[exits:] else legend
    )


def _write_page(file: Path, model: Model, made: Generated) -> None:
    from topograd.report.depth_text import depth_fragment, depth_page  # brings matplotlib

    pieces = [(piece.text, piece.exit) for piece in made.pieces]
    fragment = depth_fragment(made.prompt, pieces, len(model.session.plan.predicting()))
    name = model.session.run.folder.resolve().name
    write_atomic(file, depth_page(f"{name}: how deep each token went", fragment))
    note(f"the page is {file}")
