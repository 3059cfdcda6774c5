"""`topograd generate`: continue a text, as deep as each token needs or as deep as is asked for."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from topograd.cli.console import Json, note, out, parse, print_json
from topograd.depth.engine import Composed, Mode, Prefix, generate_tokens
from topograd.depth.modes import default_depth, engine_of, mode_of
from topograd.depth.sampling import Sampling
from topograd.depth.speculation import Speculate
from topograd.depth.text import TextStream
from topograd.errors import ConfigError
from topograd.files import write_atomic
from topograd.pretrained import REFERENCE
from topograd.runs.session import Session, open_session

MOST_TOKENS = 100_000
MOST_PROMPT = 1_000_000

Show = Callable[[str, int | None], None]
"""Writes a part of the text and the stage that it is of; None is the prompt."""


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
    prefix:J: the first J stages
    path:1,3: some stages, skipping others
    branches:1-4*3+1-2: several paths, pooled with weights
    wand, wand:RULE:NUMBER: leave early, approximate
    - flip-rate, NUMBER: share of tokens that may differ
    - rival-gain or sum-of-bounds, NUMBER: safety factor
    speculate: draft and verify; what full depth writes
    speculate:N:MARGIN: N tokens, while sure by MARGIN"""
    stages: Annotated[int | None, tyro.conf.arg(metavar="J")] = None
    """The same as --depth prefix:J."""
    temperature: float = 0.0
    """0 takes the likeliest token each time; 1 draws from the model's own distribution."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K")] = None
    """Draw among this many likeliest tokens only."""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P")] = None
    """Draw among the fewest likeliest tokens that have this probability together."""
    seed: int = 0
    stop: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = ()
    """End before this text."""
    colour: tyro.conf.FlagCreatePairsOff[bool] = False
    """Colour each token by the stage that it left after, and count them."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the text as a page in which each token shows the stage that it left after."""
    json: Json = False


def run(argv: list[str]) -> int:
    """Write a continuation and return the exit code."""
    asked = parse(Generate, argv, "generate")
    _check(asked)
    sampling = Sampling(temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, seed=asked.seed)
    session = open_session(asked.folder or REFERENCE)
    depth, stages = _depth(asked, session), len(session.plan.stages)
    mode = mode_of(depth, session, engine_of(session), sampling)
    if depth == "speculate" and not isinstance(mode, Speculate):
        note("by the run's calibration drafts do not pay on this machine; this is full depth")
    prompt = _prompt(asked, session)
    stream = TextStream(session.tokenizer, asked.stop)
    console = out()
    colours = _colours(console, stages) if asked.colour else []
    show = silent if asked.json else _coloured(console, colours) if colours else _plain
    show(asked.prompt, None)
    began = time.perf_counter()
    pieces = continue_text(mode, prompt, asked.tokens, stream, show)
    seconds = time.perf_counter() - began
    counts = [sum(left == stage for _, left in pieces) for stage in range(stages)]
    if asked.json:
        answer = {"run": str(session.run.folder), "prompt": asked.prompt, "text": stream.text}
        print_json(answer | _numbers(mode, depth, counts, seconds))
    else:
        print(flush=True)
        if asked.colour:
            console.print(_legend(counts, colours), soft_wrap=True)
    if asked.html is not None:
        _write_page(asked.html, session, asked.prompt, pieces)
    return 0


def _check(asked: Generate) -> None:
    if asked.tokens < 0:
        raise ConfigError(f"--tokens is {asked.tokens}; it must be at least 0")
    if asked.tokens > MOST_TOKENS:
        raise ConfigError(f"--tokens is {asked.tokens}; at most {MOST_TOKENS} are written at once")
    if len(asked.prompt) > MOST_PROMPT:
        raise ConfigError(
            f"the prompt has {len(asked.prompt)} characters; give at most {MOST_PROMPT}, the end of the text"
        )
    if asked.depth is not None and asked.stages is not None:
        raise ConfigError("--depth and --stages are both given; --stages J is --depth prefix:J, so give one")
    if asked.html is not None:
        folder = asked.html.parent
        if asked.html.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(f"--html {asked.html} cannot be written; give a file in a folder you can write")


def _depth(asked: Generate, session: Session) -> str:
    """The depth that is asked for, in the words of `depth.modes`."""
    if asked.stages is None:
        return default_depth(session) if asked.depth is None else asked.depth
    stages = len(session.plan.stages)
    if not 1 <= asked.stages <= stages:
        raise ConfigError(
            f"--stages is {asked.stages}; the run {session.run.folder} has {stages}: give 1 to {stages}"
        )
    return f"prefix:{asked.stages}"


def _prompt(asked: Generate, session: Session) -> list[int]:
    """The prompt's tokens. The engine reads the end of those that the context cannot hold."""
    tokens, context = session.tokenizer.encode(asked.prompt), session.config.model.context
    if len(tokens) > context:
        note(f"the prompt has {len(tokens)} tokens and the model reads {context}; it sees the last of them")
    return tokens or [session.tokenizer.separator]


def continue_text(
    mode: Mode, prompt: list[int], tokens: int, stream: TextStream, show: Show
) -> list[tuple[str, int]]:
    """For each token the text that can be shown since it came, and the stage that it left after.

    What was held back, the beginning of a character or of a stop string, comes with the token that releases
    it; what is held back at the end, with the last one.
    """
    pieces = []
    for _, emitted in generate_tokens(mode, [prompt], tokens):
        pieces.append((stream.feed(emitted.token), emitted.stage))
        show(*pieces[-1])
        if stream.stopped:
            break
    if rest := stream.finish():
        text, stage = pieces[-1]
        pieces[-1] = text + rest, stage
        show(rest, stage)
    return pieces


def _numbers(mode: Mode, depth: str, counts: list[int], seconds: float) -> dict[str, Any]:
    """What there is to say of a text beside the text; stages are counted from 1."""
    tokens, deepest = sum(counts), len(counts)
    if isinstance(mode, Prefix):
        deepest = mode.stage + 1
    elif isinstance(mode, Composed):
        deepest = mode.deepest + 1
    numbers = {"stages": deepest, "tokens": tokens, "depth": depth, "exits": counts}
    numbers |= {"seconds": seconds, "tokens_per_second": tokens / seconds}
    if isinstance(mode, Speculate):
        numbers |= {"acceptance": mode.tally.acceptance, "drafted": mode.tally.drafted}
    elif depth == "speculate":  # the calibration found that drafts do not pay here
        numbers |= {"acceptance": None, "drafted": 0}
    return numbers


def silent(text: str, stage: int | None) -> None:
    """With --json, nothing but the one object is written."""


def _plain(text: str, stage: int | None) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _colours(console: Console, stages: int) -> list[str]:
    """A colour for each stage, or none where there is no terminal, or one without colours."""
    if console.color_system is None or console.no_color:
        return []
    from topograd.report.depth_text import stage_colour  # brings matplotlib, which takes a while

    return [stage_colour(stage, stages) for stage in range(stages)]


def _coloured(console: Console, colours: list[str]) -> Show:
    def show(text: str, stage: int | None) -> None:
        console.print(Text(text, "" if stage is None else colours[stage]), end="", soft_wrap=True)

    return show


def _legend(counts: list[int], colours: list[str]) -> Text:
    """How many tokens left after each stage."""
    styles = colours or [""] * len(counts)
    each = [
        Text(f"stage {k}: {count}", style)
        for k, (count, style) in enumerate(zip(counts, styles, strict=True), 1)
    ]
    return Text("tokens that left after ").append_text(Text(", ").join(each))


def _write_page(file: Path, session: Session, prompt: str, pieces: list[tuple[str, int]]) -> None:
    from topograd.report.depth_text import depth_fragment, depth_page  # brings matplotlib

    fragment = depth_fragment(prompt, pieces, len(session.plan.stages))
    write_atomic(file, depth_page(f"{session.run.folder.resolve().name}: how deep each token went", fragment))
    note(f"the page is {file}")
