"""`topograd generate`: continue a text with the first stages of a run, or with all of them."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from topograd.cli.console import Folder, Json, parse, print_json
from topograd.data import Tokenizer
from topograd.errors import ConfigError
from topograd.nn.generate import generate
from topograd.training.session import Session, open_session

MOST_TOKENS = 100_000
MOST_PROMPT = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a text with the first stages of a run. Only the layers of those stages are computed."""

    folder: Folder
    """The run's folder."""
    prompt: str = ""
    """The text to continue; nothing starts a new document."""
    tokens: int = 200
    """How many tokens to write."""
    stages: int | None = None
    """How many stages, from the first, make the model; all of them if not given."""
    temperature: float = 0.0
    """0 takes the likeliest token each time; 1 draws from the model's own distribution."""
    top_k: int | None = None
    """Draw among this many likeliest tokens only."""
    seed: int = 0
    json: Json = False


def run(argv: list[str]) -> int:
    """Write a continuation and return the exit code."""
    asked = parse(Generate, argv, "generate")
    if asked.tokens > MOST_TOKENS:
        raise ConfigError(f"--tokens is {asked.tokens}; at most {MOST_TOKENS} are written at once")
    if len(asked.prompt) > MOST_PROMPT:
        raise ConfigError(
            f"the prompt has {len(asked.prompt)} characters; give at most {MOST_PROMPT}, the end of the text"
        )
    session = open_session(asked.folder)
    stages = len(session.plan.stages) if asked.stages is None else asked.stages
    ids = continuation(asked, session, stages)
    if asked.json:
        written = list(ids)
        text = session.tokenizer.decode(written)
        answer = {"run": str(session.run.folder), "prompt": asked.prompt, "text": text}
        print_json({**answer, "stages": stages, "tokens": len(written)})
    else:
        _stream(asked.prompt, session.tokenizer, ids)
    return 0


def continuation(asked: Generate, session: Session, stages: int) -> Iterator[int]:
    """The tokens that follow the prompt, one at a time."""
    if not 1 <= stages <= len(session.plan.stages):
        raise ConfigError(
            f"--stages is {stages}; the run {session.run.folder} has {len(session.plan.stages)}: "
            f"give 1 to {len(session.plan.stages)}"
        )
    return generate(
        session.stack,
        session.plan,
        session.tokenizer.encode(asked.prompt) or [session.tokenizer.separator],
        asked.tokens,
        stage=stages - 1,
        temperature=asked.temperature,
        top_k=asked.top_k,
        seed=asked.seed,
        context=session.config.model.context,
    )


def _stream(prompt: str, tokenizer: Tokenizer, ids: Iterator[int]) -> None:
    """Show the text as it is written. A character of several bytes waits for the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    sys.stdout.write(prompt)
    for token in ids:
        sys.stdout.write(decoder.decode(tokenizer.pieces[token]))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")
    sys.stdout.flush()
