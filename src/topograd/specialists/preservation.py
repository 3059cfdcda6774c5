"""Preservation of a base during fine-tuning: its logits on a probe set, compared bit for bit.

    before = Preservation(base)                  the base by itself, before anything is trained
    before.read(stack, plan, active)             after: by the trained stack, with and without what was added

The reading has, for the base's own path: the largest |Δ logit| and whether every bit is the same, bits per
byte of the probe text, and the share of small multiple-choice questions that it answers (the choice with
the highest mean log-probability). And the last two for the model with what was added switched on: that is
what a user sees of forgetting, and what the controls (a single head trained on, LoRA) do to the base too.

The probe set is 16 sentences and 24 questions, in English and Python: a thermometer, not a benchmark. Real
tasks are read beside it where a folder of CORE's files is given (`zero_shot.py`). Cost: one forward of a few
hundred tokens, and of the tasks' items.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.data.loader import IGNORED
from topograd.evaluation.prompts import shared
from topograd.exec.forward import predict, stage_outputs
from topograd.nn.stack import Stack
from topograd.runs.session import LoadedTextRun
from topograd.specialists.zero_shot import ZeroShot
from topograd.topology.branches import predicting_plan
from topograd.topology.plan import Plan

SENTENCES = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "In the beginning of the nineteenth century, most people lived in the countryside.",
    "She opened the window, looked at the rain, and decided to stay at home.",
    "The heart pumps blood through the body, and the lungs take in oxygen.",
    "Light travels faster than sound, which is why we see lightning before we hear thunder.",
    "If you heat ice, it melts; if you cool water enough, it freezes.",
    "The teacher asked the students to read the first chapter before Monday.",
    "def add(a, b):\n    return a + b\n",
    "for i in range(10):\n    print(i)\n",
    "import os\n\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n",
    "class Node:\n    def __init__(self, value):\n        self.value = value\n        self.next = None\n",
    "Raises ValueError if the argument is not a positive integer.",
    "The function returns a list of all the names in the module.",
    "A triangle has three sides, and a square has four equal sides.",
    "Plants use sunlight, water and carbon dioxide to make sugar.",
)
QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("The capital of France is", (" Paris", " London", " Madrid")),
    ("The capital of Japan is", (" Tokyo", " Berlin", " Cairo")),
    ("The opposite of hot is", (" cold", " warm", " red")),
    ("The opposite of up is", (" down", " left", " green")),
    ("Water is made of hydrogen and", (" oxygen", " iron", " gold")),
    ("The sun rises in the", (" east", " west", " kitchen")),
    ("A baby dog is called a", (" puppy", " kitten", " chair")),
    ("The color of the sky on a clear day is", (" blue", " green", " brown")),
    ("Two plus two is", (" four", " seven", " nine")),
    ("A year has twelve", (" months", " weeks", " hours")),
    ("Shakespeare wrote", (" Hamlet", " Python", " Windows")),
    ("The largest planet in the solar system is", (" Jupiter", " Mars", " Venus")),
    ("You read a book with your", (" eyes", " feet", " shoes")),
    ("Bread is made from", (" flour", " stones", " glass")),
    ("In winter it is", (" cold", " hot", " loud")),
    ("The frog jumped into the", (" water", " idea", " number")),
    ("def __init__(", ("self", "return", "import")),
    ("for i in", (" range", " return", " class")),
    ("import", (" os", " (", " ==")),
    ("    return", (" None", " def", " class")),
    ("if x is not", (" None", " import", " def")),
    ("try:\n    f()\nexcept", (" ValueError", " range", " def")),
    ("with open(path) as", (" file", " return", " None")),
    ("raise", (" ValueError", " range", " def")),
)


@dataclass(frozen=True)
class Reading:
    """What is left of a base."""

    base_max_abs_logit_delta: float
    """Largest change of a logit of the base's own path on the probe sentences."""
    base_bit_identical: bool
    """Every logit, those of padding too."""
    base_bpb: float
    base_choices: float
    """Share of the questions that the base's own path answers."""
    bpb: float
    """Of the probe sentences, with what was added switched on."""
    choices: float
    base_tasks: dict[str, float] = field(default_factory=dict)
    """Accuracy of the base's own path on each zero-shot task, where tasks are read."""
    tasks: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    logged = property(as_dict)

    @property
    def words(self) -> str:
        return f"BPB {self.bpb:.3f}, base {self.base_bpb:.3f}"


class Preservation:
    """The probe set, and what a base made of it before."""

    def __init__(self, base: LoadedTextRun, tasks: ZeroShot | None = None) -> None:
        self.tasks = tasks
        tokenizer = base.tokenizer
        rows = [tokenizer.encode(text) for text in SENTENCES]
        context = base.config.model.context
        self.sentences, self.targets = _batch(rows, tokenizer.separator, context)
        self.nbytes = sum(len(tokenizer.pieces[t]) for row in rows for t in row[:context])
        self.items = [[tokenizer.encode(q + choice) for choice in choices] for q, choices in QUESTIONS]
        self.starts = [
            # a tokenizer may join the question's last token and what follows
            [min(shared([tokenizer.encode(q), ids]), len(ids) - 1) for ids in each]
            for (q, _), each in zip(QUESTIONS, self.items, strict=True)
        ]
        self.separator, self.context = tokenizer.separator, context
        flat = [ids for each in self.items for ids in each]
        self.choice_inputs, self.choice_targets = _batch(flat, self.separator, context)
        scored = torch.full_like(self.choice_targets, IGNORED)
        for row, (ids, start) in enumerate(
            zip(flat, [start for each in self.starts for start in each], strict=True)
        ):
            scored[row, start : len(ids)] = self.choice_targets[row, start : len(ids)]
        self.choice_targets, self.chosen = scored, (scored != IGNORED).nonzero(as_tuple=True)
        (self.before,) = _logits(base.stack, [base.plan], self.sentences)

    def read(self, stack: Stack, base: Plan, active: Plan | None = None) -> Reading:
        """What a stack makes of the probe set by the base's plan and by the `active` one.

        Both are plans of the same stages that predict otherwise: each stage runs once.
        """
        plans = [base] if active is None else [base, active]
        now, *on = _logits(stack, plans, self.sentences)
        now = now[..., : self.before.shape[-1]]  # new tokens have logits of their own behind these
        choices = [self.answered(z) for z in _logits(stack, plans, self.choice_inputs, self.chosen)]
        bpbs = [self.bpb_of(z) for z in (now, *on)]
        tasks: list[dict[str, float]] = [{}] if self.tasks is None else self.tasks.read(stack, plans)
        moved, same = self.moved(now), torch.equal(now, self.before)
        off, last = dict(tasks[0]), dict(tasks[-1])
        return Reading(moved, same, bpbs[0], choices[0], bpbs[-1], choices[-1], off, last)

    def moved(self, logits: Tensor) -> float:
        """Largest change of a logit of the sentences. Padding is left out: it is never read,
        and a control moves it most."""
        there = self.targets != IGNORED
        return float((logits[there] - self.before[there]).abs().max())

    def bpb_of(self, logits: Tensor) -> float:
        """Bits per byte of the sentences under some logits of them."""
        nats = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten(), reduction="sum")
        return float(nats) / math.log(2) / self.nbytes

    def answered(self, logits: Tensor) -> float:
        """The share of the questions that logits of `choice_inputs`, where there is a target, answer: by the
        choice of the least mean loss. One that the context cuts off before its choices is not answered."""
        rows = self.chosen[0]
        counts = torch.bincount(rows, minlength=len(self.choice_inputs))
        losses = F.cross_entropy(logits.float(), self.choice_targets[self.chosen], reduction="none")
        means = torch.zeros(len(counts)).index_add(0, rows, losses) / counts  # 0/0 where nothing was seen
        each = means.split([len(choices) for choices in self.items])
        return sum(int(part.argmin()) == 0 and bool(part.isfinite().all()) for part in each) / len(self.items)


@torch.no_grad()
def _logits(
    stack: Stack, plans: Sequence[Plan], inputs: Tensor, where: tuple[Tensor, ...] | None = None
) -> list[Tensor]:
    """What each plan predicts, at all positions or `where`; their stages run once."""
    full = [predicting_plan(plan) for plan in plans]
    wanted = sorted({stage for plan in full for stage, _ in plan.prediction.full})
    device = next(stack.parameters()).device
    outputs = stage_outputs(stack, full[0], inputs.to(device), wanted)
    if where is not None:
        outputs = {stage: h[where] for stage, h in outputs.items()}
    return [predict(stack, plan, outputs, plan.prediction.full).cpu() for plan in full]


def _batch(rows: Sequence[Sequence[int]], separator: int, context: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets): each row behind a separator, padded."""
    width = min(max(map(len, rows)), context)
    inputs = torch.full((len(rows), width), separator)
    targets = torch.full((len(rows), width), IGNORED)
    for i, row in enumerate(rows):
        ids = torch.tensor(row[:width])
        targets[i, : len(ids)] = ids
        inputs[i, 1 : len(ids)] = ids[:-1]
    return inputs, targets
