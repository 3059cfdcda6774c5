"""Exits on a frozen trunk, fitted on the model's own text: translators of the states at the stages' ends.

    1. A, b of the affine part by least squares: T(u_k) near u_K, the state at the last stage's end
    2. everything by the cross-entropy to the model's own distribution, on its likeliest tokens

u is a state divided by its rms; the head of the exit reads T(u) (`nn/translator.py`). How often an exit then
says what full depth says is measured on text that was not learned from and that the model wrote greedily. An
exit whose agreement is low can neither leave early nor draft well, whatever the rule; `topograd calibrate`
measures what it is worth.

Cost: the head on VOCABULARY tokens for each token and exit; some minutes of SmolLM2. Limits: agreement is
teacher-forced, on the model's own text. Source: "Eliciting Latent Predictions from Transformers with the
Tuned Lens" (Belrose et al. 2023), which trains; the start by least squares is ours.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.convert.own_text import OwnText, greedy_rows, heldout_rows, rows_of_step, training_rows
from topograd.nn.draft_stage import rank_tokens
from topograd.nn.stack import Stack
from topograd.nn.translator import Translator
from topograd.runs.session import LoadedTextRun
from topograd.training.trainer import Schedule, StepRecord, Task, train_task

STEPS, ROWS = 100, 2
MEASURED_ROWS = 16
REGRESSED_ROWS = 256
RIDGE = 1e-3
"""Of the mean square of a number in a state, which is 1."""
VOCABULARY = 4096
RATE = 0.001
OnStep = Callable[[int, int], None]


def fit_exits(
    session: LoadedTextRun,
    text: OwnText,
    on_step: OnStep | None = None,
    steps: int = STEPS,
    work: Path | None = None,
) -> tuple[dict[int, Translator], list[dict[str, Any]]]:
    """The translators of all exits but the last, by head, and how often each exit says what full depth says:
    with its translator, and without one (`lens`). With a `work` folder a stopped call is resumed."""
    rows = training_rows(len(text))
    measuring = greedy_rows(text, heldout_rows(len(text)))[:MEASURED_ROWS]
    tokens = torch.from_numpy(text.all_tokens()[0][rows])
    vocab = rank_tokens(tokens, session.config.model.vocab, VOCABULARY)
    exits = [session.plan.stages[k].head for k in session.plan.predicting()[:-1]]
    fitted: dict[int, Translator] = {}
    found: list[dict[str, Any]] = []
    for place, head in enumerate(exits):
        translator = fitted[head] = Translator(session.stack.width)
        lens = agreement(session.stack, translator, text, measuring, place, head)
        regress(translator, text, rows, place)
        task = TranslatorTask(session.stack, translator, text, rows, place, head, vocab, steps)
        train_task(task, None if work is None else work / f"exit-{place + 1}")
        rate = agreement(session.stack, translator, text, measuring, place, head)
        parameters = sum(p.numel() for p in translator.parameters())
        found.append({"stage": place + 1, "parameters": parameters, "agreement": rate, "lens": lens})
        if on_step is not None:
            on_step(place + 1, len(exits))
    return fitted, found


@torch.no_grad()
def regress(translator: Translator, text: OwnText, rows: Sequence[int], place: int) -> None:
    """Set the affine part to the least-squares map from an exit's states to the last stage's."""
    width = translator.affine.in_features
    gram, cross = torch.zeros(width + 1, width + 1), torch.zeros(width + 1, width)
    count = 0
    for row in rows[:: max(1, len(rows) // REGRESSED_ROWS)]:
        states = text.take([row]).states[0, 1:]  # a first state is unlike all others
        u = F.pad(states[:, place], (0, 1), value=1.0)
        gram += u.T @ u
        cross += u.T @ (states[:, -1] - states[:, place])
        count += len(u)
    gram += RIDGE * max(count, 1) * torch.eye(width + 1)
    solved = torch.linalg.solve(gram, cross)
    translator.affine.weight.copy_(solved[:-1].T)
    translator.affine.bias.copy_(solved[-1])


class TranslatorTask(Task):
    """A translator that learns what the last stage says, from the states at `place`, read by `head`."""

    def __init__(
        self,
        stack: Stack,
        translator: Translator,
        text: OwnText,
        rows: Sequence[int],
        place: int,
        head: int,
        vocab: Tensor,
        steps: int,
    ) -> None:
        super().__init__(Schedule(steps))
        self.stack, self.text, self.rows, self.vocab = stack, text, rows, vocab
        self.model = self.translator = translator
        self.place, self.head = place, head
        self.optimizers = {"adam": torch.optim.Adam(translator.parameters(), lr=RATE)}
        about = {"tokens": text.tokens, "weights": text.weights, "place": place, "head": head}
        self.key = about | {"vocabulary": len(vocab), "steps": steps}

    def step(self, step: int) -> StepRecord:
        optimizer = self.optimizers["adam"]
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / self.schedule.steps)
        block = self.text.take(rows_of_step(self.rows, ROWS, 0, step))
        states = block.states[:, 1:].flatten(0, 1)
        with torch.no_grad():
            wanted = self.stack.readout(states[:, -1], self.stack.last_stage, self.vocab).softmax(-1)
        said = self.stack.readout(self.translator(states[:, self.place]), self.head, self.vocab)
        optimizer.zero_grad()
        loss = F.cross_entropy(said, wanted)
        loss.backward()
        optimizer.step()
        return StepRecord([loss.item()])


@torch.no_grad()
def agreement(
    stack: Stack, translator: Translator, text: OwnText, rows: Sequence[int], place: int, head: int
) -> float:
    """On the whole vocabulary, where the token behind is the model's own."""
    hits = count = 0
    for row in rows:
        block = text.take([row])
        own = block.own[0, 1:]
        states = block.states[0, :-1][own]
        if len(states):
            said = stack.readout(translator(states[:, place]), head).argmax(-1)
            hits += int((said == block.tokens[0, 1:][own]).sum())
            count += len(states)
    return hits / max(count, 1)
