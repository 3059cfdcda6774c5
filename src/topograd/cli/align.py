"""`topograd align`: carry a specialist to another version of its base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from topograd.cli.console import Json, out, parse, print_json
from topograd.errors import ConfigError
from topograd.limits import check_numbers


@dataclass(frozen=True, kw_only=True)
class Align:
    """Make a specialist of one base one of another version of it, by aligning their heads."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SPEC")]
    """The specialist's folder."""
    to: Annotated[Path, tyro.conf.arg(metavar="BASE")]
    """The run that it shall belong to: the same tokenizer, layers of the same shape."""
    out: Path
    """The new specialist's folder."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """What it was trained on: measured before and after, and trained on for --steps."""
    steps: int = 0
    """Steps of training behind the alignment, on --data, and as many of a specialist that begins anew."""
    context: int | None = None
    """Tokens in a row of --data."""
    base: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where the specialist's own base is now, if it was moved."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, steps=(0, 10**9))


def run(argv: list[str]) -> int:
    """Carry over, measure if there is text, return the exit code."""
    asked = parse(Align, argv, "align")
    if asked.steps and asked.data is None:
        raise ConfigError("--steps is given and --data is not", remedy="give the text to train on")
    from topograd.runs.session import open_session
    from topograd.specialists.align import carry, versions
    from topograd.specialists.attach import open_specialist

    adapter = open_specialist(asked.folder)
    old, new = adapter.open_base(asked.base), open_session(asked.to)
    carried = carry(adapter, old, new, asked.out)
    answer: dict[str, Any] = {"specialist": str(asked.out), "base": str(asked.to), **versions(old, new)}
    if asked.data is not None:
        from topograd.specialists.align import compared

        answer["nats"] = compared(asked.data, adapter, carried, old, new, asked.context)
    if asked.steps:
        from topograd.specialists.align import trained_on

        assert asked.data is not None
        answer["nats"] |= trained_on(asked.data, carried, new, asked.steps, asked.context)
    if asked.json:
        print_json(answer)
    else:
        out().print(
            f"{asked.out}: carried to {asked.to}, a {answer['kind']} version apart; the heads differ by "
            f"{answer['residual']:.3f} behind the alignment",
            soft_wrap=True,
        )
        for name, value in answer.get("nats", {}).items():
            out().print(f"  {name}: {value:.4f} nats a token")
    return 0
