"""How often draft stages say what their model says, on greedy and on sampled text of its own.

    python benchmarks/draft_agreement.py RUN --text OWN_TEXT --draft SIDECAR [SIDECAR ...] [--from-row 0]

OWN_TEXT is a folder that `topograd retrofit --text` wrote. Of its rows from `--from-row` on, those that no
training learns from (`heldout_rows`) are read: `greedy` ones, where a draft must be the likeliest token, and
`sampled` ones at temperature 0.8, where even the model's own likeliest token is often not what was drawn
(`model`: how often it is). `agreement` is that of each step by itself, `chain` that of all steps up to it.

A adapter that was taught on the first part of the text, with other rows held out, needs a `--from-row` behind
that part: else rows that it has learned are among those that measure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from topograd.convert.draft_training import draft_agreement
from topograd.convert.own_text import OwnText, greedy_rows, heldout_rows
from topograd.decode.retrofitted import open_retrofit
from topograd.runs.session import LoadedTextRun, open_session


@dataclass(frozen=True)
class Settings:
    """Which run, which text, whose drafts."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    text: Path
    draft: tuple[Path, ...]
    from_row: int = 0
    steps: int = 4
    threads: int = 1
    json: bool = False


@torch.no_grad()
def of_the_model(session: LoadedTextRun, text: OwnText, rows: list[int]) -> float:
    """How often the model's own likeliest token is the one that stands there."""
    hits = count = 0
    for row in rows:
        block = text.take([row])
        own = block.own[0, 1:]
        logits = session.stack.readout(block.states[0, :-1, -1][own], session.plan.stages[-1].head)
        hits += int((logits.argmax(-1) == block.tokens[0, 1:][own]).sum())
        count += int(own.sum())
    return hits / max(count, 1)


def main(settings: Settings) -> None:
    torch.set_num_threads(settings.threads)
    session = open_session(settings.run)
    text = OwnText.open(settings.text, session.weights)
    held = [row for row in heldout_rows(len(text)) if row >= settings.from_row]
    greedy = greedy_rows(text, held)
    kinds = {"greedy": greedy, "sampled": [row for row in held if row not in greedy]}
    rows: list[dict[str, Any]] = []
    for name, some in kinds.items():
        model = of_the_model(session, text, some)
        for folder in settings.draft:
            stage = open_retrofit(session, folder).stage
            found = draft_agreement(stage, text, settings.steps, some)
            rows.append({"text": name, "rows": len(some), "draft": str(folder), "model": model, **found})
            if not settings.json:
                print(rows[-1], flush=True)
    if settings.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main(tyro.cli(Settings))
