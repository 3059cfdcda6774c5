"""`topograd generate`: continue a text, at a fixed depth or as deep as each token needs."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.text import Text

from topograd.cli.console import (
    Json,
    OptionalModel,
    ReadPath,
    RuntimeFlag,
    WeightsFlag,
    check_new_file,
    note,
    note_runtime,
    out,
    parse,
    print_json,
)
from topograd.errors import ConfigError
from topograd.files import write_atomic
from topograd.limits import DEPTH, check_numbers
from topograd.pretrained import REFERENCE

if TYPE_CHECKING:
    from topograd.decode.grammar import Grammar
    from topograd.decode.model import Generated, Model, Piece

DRAFTERS = ("#2e8b57", "#d0479e", "#008b8b")
"""Colours of drafters that are no stage, in the order in which they come; see `report/depth_text.py`."""


SAMPLED = (
    "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
"""Flags of how a token is drawn, beside the temperature."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a model writes: the flags that `generate` and `chat` share."""

    model: OptionalModel = None
    prompt: str = ""
    """The text to continue; nothing starts a new document."""
    tokens: int = 200
    """How many tokens to write, at most."""
    depth: Annotated[str | None, tyro.conf.arg(metavar="DEPTH")] = None
    """How deep each token goes; by default speculate where the calibration says that it pays, else full.
    - full: every stage
    - prefix:J: the first J of the stages that predict
    - path:1,3: some stages, skipping others
    - branches:1-4*3+1-2: several paths, pooled with weights
    - pool, router: all exits, pooled with weights that topograd calibrate fitted, the same for all tokens or
    by a map of their states; shrinkage: by how sure each is
    - wand, wand:RULE:NUMBER: leave early, approximate. RULE is flip-rate (NUMBER: share of tokens that may
    differ), rival-gain or sum-of-bounds (NUMBER: safety factor)
    - speculate: draft and verify; what full depth writes. The drafter is the one that topograd calibrate
    measured, else lookup
    - speculate:WHO+WHO: these drafters, at each token the one of the highest expected gain. WHO is N or
    N:MARGIN (N tokens by the first stage, while sure), lookup (what followed in the text), table or draft
    (made by topograd retrofit), or the folder of a smaller run with the same tokenizer"""
    draft: Annotated[ReadPath, tyro.conf.arg(metavar="FOLDER")] = None
    """A smaller run that drafts, or the folder that topograd retrofit made; by default RUN/draft."""
    specialists: Annotated[str | None, tyro.conf.arg(metavar="A,B")] = None
    """Folders of specialists that are active, as A,B or A*0.7,B*0.3; what each changes is added up."""
    router: Annotated[ReadPath, tyro.conf.arg(metavar="FOLDER")] = None
    """A folder of topograd specialist route: it chooses one of --specialists, or none, for each prompt."""
    stages: Annotated[int | None, tyro.conf.arg(metavar="J")] = None
    """The same as --depth prefix:J."""
    temperature: float | None = None
    """0 takes the likeliest token each time; 1 samples from the model's own distribution. By default 0, and
    0.8 for a new document, where 0 would write the same text each time and soon repeat it."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K")] = None
    """Sample among this many likeliest tokens only."""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P")] = None
    """Sample among the fewest likeliest tokens that have this probability together."""
    min_p: Annotated[float | None, tyro.conf.arg(metavar="P")] = None
    """Sample among the tokens that have at least this share of the likeliest one's probability only."""
    presence_penalty: Annotated[float, tyro.conf.arg(metavar="X")] = 0.0
    """Taken off the logit of every token that was written already."""
    frequency_penalty: Annotated[float, tyro.conf.arg(metavar="X")] = 0.0
    """Taken off a token's logit for each time that it was written already."""
    repetition_penalty: Annotated[float, tyro.conf.arg(metavar="X")] = 1.0
    """Divides the positive logits of tokens that prompt or text have, and multiplies their negative ones."""
    seed: int = 0
    """Of the samples, with a temperature."""
    stop: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = ()
    """End before this text; may be given again."""
    colour: tyro.conf.FlagCreatePairsOff[bool] = False
    """Colour each token by the stage that it left after, or by its drafter, and count them."""
    runtime: RuntimeFlag = None
    weights: WeightsFlag = "float32"
    json: Json = False

    def __post_init__(self) -> None:
        if self.depth is not None and self.stages is not None:
            raise ConfigError(
                "--depth and --stages are both given",
                setting="stages",
                remedy="--stages J is --depth prefix:J, so give one",
            )
        if self.router is not None and self.specialists is None:
            raise ConfigError(
                "--router chooses among specialists, and --specialists is not given",
                setting="router",
                remedy="give A,B",
            )
        from topograd.decode.depths import check_depth
        from topograd.decode.model import check_request
        from topograd.decode.sampling import Sampling

        check_request(self.prompt, self.tokens)
        given = {name: getattr(self, name) for name in SAMPLED}
        Sampling(**given, temperature=self.temperature or 0.0)
        check_numbers(self, stages=DEPTH)
        if self.depth is not None:
            check_depth(self.depth)

    def settings(self, exits: int, fallback: float = 0.0) -> dict[str, Any]:
        """The arguments of `Model.generate`; `fallback` is the temperature where none is given."""
        depth = self.depth
        if self.stages is not None:
            if not 1 <= self.stages <= exits:
                raise ConfigError(setting="stages", given=self.stages, allowed=f"1 to {exits}, the exits")
            depth = f"prefix:{self.stages}"
        temperature = fallback if self.temperature is None else self.temperature
        given = {name: getattr(self, name) for name in ("tokens", "stop", "draft", *SAMPLED)}
        return given | {"depth": depth, "temperature": temperature}


@dataclass(frozen=True, kw_only=True)
class Generate(Decoding):
    """Continue a text. Only the layers that a token needs are computed."""

    json_schema: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write JSON that fits the schema in this file, and nothing else."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the text as a page in which each token shows the stage that it left after."""


def run(argv: list[str]) -> int:
    args = parse(Generate, argv, "generate")
    check_new_file("html", args.html)
    grammar = None if args.json_schema is None else _schema(args.json_schema)
    model = open_model(args.model, args.specialists, args.runtime, args.weights, args.router)
    exits = len(model.session.plan.predicting())
    writer = Writer(args, model)
    settings = args.settings(exits, 0.0 if args.prompt else 0.8) | {"grammar": grammar}
    made = _continue(args, model, settings, writer)
    if args.json:
        answer = {"run": str(model.session.run.folder), "prompt": args.prompt, "text": str(made)}
        print_json(answer | numbers(made, model))
    else:
        writer.end(made)
    if made.depth == "speculate" and not made.drafted and args.depth is not None:
        note("by the run's calibration drafts do not pay on this machine; this is full depth")
    if not args.json and args.temperature is None and re.search(r"(.{4,120}?)\1\1$", made, re.DOTALL):
        note("the likeliest tokens repeat themselves; --temperature 0.8 samples instead")
    if grammar is not None and not _is_json(made):
        note(f"--tokens {args.tokens} ended the text before its JSON was whole; give more")
    if args.html is not None:
        _write_page(args.html, model, made)
    return 0


def _is_json(text: str) -> bool:
    from json import loads

    try:
        loads(text)
    except ValueError:
        return False
    return True


def _schema(file: Path) -> Grammar:
    from topograd.decode.grammar import MAX_CHARACTERS, Grammar

    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(MAX_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--json-schema {file} cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})",
            setting="json_schema",
            given=file,
            remedy="give a file with a JSON schema",
        ) from None
    return Grammar.json_schema(text)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the search for cycles, which takes a sixth of the time of imports and finds nothing there."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@uncollected()
def open_model(
    model: Path | None, specialists: str | None, runtime: str | None, weights: str, router: Path | None = None
) -> Model:
    """The model, with the specialists that are active."""
    if specialists is None:
        from topograd.decode.model import load

        return load(model or REFERENCE, runtime=runtime, weights=weights)
    base = model or REFERENCE
    if router is not None:
        from topograd.specialists.router import open_routed

        return open_routed(base, specialists, router, runtime, weights)
    from topograd.specialists.model import open_composed

    return open_composed(base, specialists, runtime=runtime, weights=weights)


class Writer:
    """Writes a text as it comes: in colours where they are wanted and can be shown, and not with --json."""

    def __init__(self, args: Decoding, model: Model) -> None:
        self.args, self.model, self.begun = args, model, False
        self.console, self.exits = out(), len(model.session.plan.predicting())
        self.colours: dict[str, str] = {}
        if args.colour and not args.json:
            if self.console.color_system is None or self.console.no_color:
                note("--colour has no effect: the output is no terminal with colours (--html writes a page)")
            else:
                from topograd.report.depth_text import stage_colour  # brings matplotlib, which takes a while

                self.colours = {f"stage {k + 1}": stage_colour(k, self.exits) for k in range(self.exits)}

    def show(self, text: str, who: str) -> None:
        """Write a part of the text; `who` is "stage 2", a drafter's name, or "" for the prompt."""
        if self.args.json:
            return
        if not self.begun:
            note_runtime(self.model)
        self.begun = True
        if not self.colours:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        if who and who not in self.colours:
            self.colours[who] = DRAFTERS[(len(self.colours) - self.exits) % len(DRAFTERS)]
        self.console.print(Text(text, self.colours.get(who, "")), end="", soft_wrap=True)

    def end(self, made: Generated) -> None:
        """End the line; with --colour, count the tokens by stage and by drafter."""
        if self.args.json:
            return
        print(flush=True)
        if self.args.colour:
            self.console.print(_legend(made.pieces, self.exits, self.colours), soft_wrap=True)


def _continue(args: Generate, model: Model, settings: dict[str, Any], writer: Writer) -> Generated:
    """Write the prompt and what follows it; nothing before it is known that all of it can be done."""
    begun = False

    def begin() -> None:
        nonlocal begun
        begun = True
        note_long(len(model.encode(args.prompt)), model, "prompt")
        writer.show(args.prompt, "")

    def on_piece(piece: Piece) -> None:
        if not begun:
            begin()
        writer.show(piece.text, writer_of(piece))

    warm_up(args, model, settings)
    made = model.generate(args.prompt, on_piece=on_piece, **settings)
    if not begun:
        begin()
    warn_untrained(made, model)
    return made


def warm_up(args: Decoding, model: Model, settings: dict[str, Any]) -> None:
    """With --json, write a few tokens first: a runtime makes its sessions at first use, which takes seconds,
    and --json has the speed."""
    if args.json and args.tokens > 0:
        model.generate("", **settings | {"tokens": 3, "stop": ()})


def note_long(tokens: int, model: Model, what: str) -> None:
    """Say that a prompt or conversation is longer than the model's context."""
    context = model.session.config.model.context
    if tokens > context:
        note(f"the {what} has {tokens} tokens and the model reads {context}; it sees the last of them")


def warn_untrained(made: Generated, model: Model) -> None:
    """Say that tokens came from exits that were never trained: those of a model that was only imported."""
    last = len(model.session.plan.predicting()) - 1
    early = any(piece.exit < last and not piece.drafter for piece in made.pieces)  # drafts are verified
    if early and model.session.step == 0 and not model.engine.translators():
        note(
            "tokens left after exits that were never trained: this model was imported, and only its last "
            "stage learned to predict; topograd retrofit --exits trains the others"
        )


def numbers(made: Generated, model: Model) -> dict[str, Any]:
    """The figures of a text, as --json prints them; stages are counted from 1."""
    counts = made.exits(len(model.session.plan.predicting()))
    tokens = sum(counts)
    values: dict[str, Any] = {"stages": made.deepest, "tokens": tokens, "depth": made.depth, "exits": counts}
    values |= {"seconds": made.seconds, "tokens_per_second": tokens / made.seconds}
    if made.drafted is not None and made.accepted is not None:
        share = made.accepted / made.drafted if made.drafted else None
        values |= {"acceptance": share, "drafts": made.drafted, "accepted": made.accepted}
        by = {name: {"drafts": n, "accepted": accepted} for name, (n, accepted) in made.by_drafter.items()}
        values |= {"by_drafter": by}
    weights = getattr(model, "weights", None)  # of a composition of specialists
    values |= {} if weights is None else {"specialists": weights}
    return values | {"runtime": model.engine.runtime.name, "weights": model.engine.runtime.precision}


def writer_of(piece: Piece) -> str:
    """Who wrote a token: the stage that it left after, or a drafter that is no stage of the model."""
    drafted = piece.drafter and not piece.drafter.startswith("stage ")
    return piece.drafter if drafted else f"stage {piece.exit + 1}"


def _legend(pieces: list[Piece], exits: int, colours: dict[str, str]) -> Text:
    """How many tokens left after each stage, and how many drafters that are no stages wrote."""
    counts = dict.fromkeys((f"stage {k + 1}" for k in range(exits)), 0)
    for piece in pieces:
        counts[writer_of(piece)] = counts.get(writer_of(piece), 0) + 1
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
