"""Exits on a frozen trunk: how much of the last stage's choice can be read off the state of an earlier one.

    affine       T(u) = u + A u + b
    low rank     T(u) = u + U V u                        rank RANK
    swiglu       T(u) = u + A u + b + D (silu(G u) ⊙ (E u))

u is the state at a stage's end divided by its rms; the base's own norm and head read T(u), on the draft
vocabulary. Fitted by the cross-entropy to the base's own distribution there. T starts as the identity: the
logit lens. It is a diagnosis: an exit whose agreement is low can neither leave early nor draft well, whatever
the rule. Source: "Eliciting Latent Predictions from Transformers with the Tuned Lens" (Belrose et al. 2023).

Cost: the head on the draft vocabulary for each token and exit; a few minutes of SmolLM2. Limits: agreement is
teacher-forced, on the model's own text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.models.own_text import OwnText, heldout_rows, rows_of_step, training_rows
from topograd.nn.draft_stage import rank_tokens
from topograd.nn.stack import Stack
from topograd.runs.session import Session

Kind = Literal["lens", "low-rank", "affine", "swiglu"]
RANK = 64
STEPS, ROWS = 60, 2
MEASURED_ROWS = 16
VOCABULARY = 4096
RATE = 0.002
OnStep = Callable[[int, int], None]


class Translator(nn.Module):
    """T of the module's head; the identity at first."""

    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "low-rank":
            self.down = nn.Linear(width, RANK, bias=False)
            self.up = nn.Linear(RANK, width, bias=False)
            nn.init.zeros_(self.up.weight)
        if kind in ("affine", "swiglu"):
            self.affine = nn.Linear(width, width)
            nn.init.zeros_(self.affine.weight)
            nn.init.zeros_(self.affine.bias)
        if kind == "swiglu":
            self.gate, self.lift = (nn.Linear(width, width, bias=False) for _ in range(2))
            self.drop = nn.Linear(width, width, bias=False)
            nn.init.zeros_(self.drop.weight)

    def forward(self, u: Tensor) -> Tensor:
        if self.kind == "lens":
            return u
        if self.kind == "low-rank":
            return u + self.up(self.down(u))
        moved = u + self.affine(u)
        return moved if self.kind == "affine" else moved + self.drop(F.silu(self.gate(u)) * self.lift(u))


def exit_readings(
    session: Session,
    text: OwnText,
    on_step: OnStep | None = None,
    kinds: Sequence[Kind] = ("lens", "affine"),
    steps: int = STEPS,
) -> list[dict[str, Any]]:
    """For each exit but the last and each kind: how often its likeliest token is the last stage's."""
    rows, measuring = training_rows(len(text)), heldout_rows(len(text))[:MEASURED_ROWS]
    tokens = torch.from_numpy(text.all_tokens()[0][rows])
    vocab = rank_tokens(tokens, session.config.model.vocab, VOCABULARY)
    exits = range(len(session.plan.predicting()) - 1)
    found = []
    for number, (place, kind) in enumerate(itertools.product(exits, kinds)):
        torch.manual_seed(0)
        translator = Translator(kind, session.stack.width)
        if kind != "lens":
            _fit(session.stack, translator, text, rows, place, vocab, steps)
        if on_step is not None:
            on_step(number + 1, len(exits) * len(kinds))
        rate = _agreement(session.stack, translator, text, measuring, place)
        parameters = sum(p.numel() for p in translator.parameters())
        found.append({"stage": place + 1, "kind": kind, "parameters": parameters, "agreement": rate})
    return found


def _fit(
    stack: Stack,
    translator: Translator,
    text: OwnText,
    rows: Sequence[int],
    place: int,
    vocab: Tensor,
    steps: int,
) -> None:
    optimizer = torch.optim.Adam(translator.parameters(), lr=RATE)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / steps)
        block = text.take(rows_of_step(rows, ROWS, 0, step))
        states = block.states[:, 1:].flatten(0, 1)  # a first state is unlike all others
        with torch.no_grad():
            wanted = stack.readout(states[:, -1], stack.last_stage, vocab).softmax(-1)
        said = stack.readout(translator(states[:, place]), stack.last_stage, vocab)
        optimizer.zero_grad()
        F.cross_entropy(said, wanted).backward()
        optimizer.step()


@torch.no_grad()
def _agreement(stack: Stack, translator: Translator, text: OwnText, rows: Sequence[int], place: int) -> float:
    """On the whole vocabulary, where the token behind is the model's own."""
    hits = count = 0
    for row in rows:
        block = text.take([row])
        own = block.own[0, 1:]
        states = block.states[0, :-1][own]
        if len(states):
            said = stack.readout(translator(states[:, place]), stack.last_stage).argmax(-1)
            hits += int((said == block.tokens[0, 1:][own]).sum())
            count += len(states)
    return hits / max(count, 1)
