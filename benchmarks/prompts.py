"""Early exits and drafts by what is written: code, chat, lists, prose; and which stage drafts best.

    leaving early   for each category the mean stage at which tokens leave, the share of texts that are full
                    depth's, and the speed; by the paper's rule and by ours (`depth/exit_rules.py`)
    acceptance      the first stage drafts `drafts` tokens at a time: the share that full depth keeps
    draft stage     the same with each stage but the last as the drafter, over all prompts; `compute` is its
                    share of the layers

Every way continues the same prompts, in turns (`timing.py`); speeds are full depth's time over the way's, the
median over rounds. Texts are greedy. A text that leaves full depth's at a tie of its two best logits is
counted apart (`depth/agreement.py`). The 8-prompt table of every prefix is in `evaluation/questions.py`.

Source: "Product of Experts" §5.3, §5.4, §10.2; its prompts are not published, these are ours. Limits: four
prompts a category; greedy text of a small model loops, which flatters acceptance (`distinct_4grams`). Leaving
early needs a calibrated run; without one it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from questions import prefix_table, right_counts
from topograd.decode.agreement import differences, distinct, identical, mean_stage
from topograd.decode.autotune import DraftRule
from topograd.decode.benchmark import continued
from topograd.decode.engine import Engine, Mode, Prefix
from topograd.decode.exit_rules import check_exits
from topograd.decode.model import Model
from topograd.decode.modes import mode_of
from topograd.decode.sampling import Sampling
from topograd.decode.speculation import Speculate
from topograd.errors import ConfigError, RunError
from topograd.limits import DEPTH, REPEATS, check_numbers
from topograd.timing import ratio, read_in_turns

MOST_TOKENS = 1_000_000
"""Tokens that one way of decoding writes."""


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """How much is written behind the prompts of each category."""

    tokens: int = 48
    """Tokens written after each prompt."""
    drafts: int = 3
    """Tokens that are drafted at a time."""
    rounds: int = 3
    """How often every way is measured, in turns."""

    def __post_init__(self) -> None:
        check_numbers(self, tokens=REPEATS, drafts=DEPTH, rounds=REPEATS)
        if self.tokens * self.rounds > MOST_TOKENS:
            raise ConfigError(f"more than {MOST_TOKENS} tokens would be written by each mode; ask for fewer")


RULES = ("wand:sum-of-bounds", "wand:flip-rate")
"""The paper's rule with safety 1, and ours."""
CATEGORIES: dict[str, tuple[str, ...]] = {
    "code": (
        "def read_lines(path):\n    with open(path) as file:\n",
        "class Node:\n    def __init__(self, value):\n",
        "import os\nimport sys\n\ndef main():\n",
        "for key, value in items.items():\n    if value is None:\n",
    ),
    "chat": (
        "User: Hello, can you help me?\nAssistant:",
        "User: How do I open a file?\nAssistant:",
        "User: What is the capital of France?\nAssistant:",
        "User: Thank you!\nAssistant:",
    ),
    "lists": (
        "Things to buy:\n- milk\n- bread\n-",
        "The steps are:\n1. Open the file.\n2. Read the lines.\n3.",
        "one, two, three, four,",
        "Monday, Tuesday, Wednesday,",
    ),
    "prose": (
        "It was a cold morning, and the streets of the town were",
        "The history of the region begins with",
        "When the value is not given, the function returns",
        "She looked out of the window and",
    ),
}


def bench_prompts(model: Model, settings: PromptSettings) -> dict[str, Any]:
    """Every table of this module, as plain numbers."""
    engine, session = model.engine, model.session
    check_exits(session.plan)
    prompts = {name: [model.encode(text) for text in texts] for name, texts in CATEGORIES.items()}
    modes, problem = _modes(model, settings.drafts)
    measured = {name: _measured(engine, modes, rows, settings) for name, rows in prompts.items()}
    known = prefix_table(model)
    return {
        "run": str(session.run.folder),
        "runtime": engine.runtime.name,
        "threads": torch.get_num_threads(),
        "settings": vars(settings),
        "exits": len(engine.exits),
        "questions": known,
        "right": {name: right_counts(rows) for name, rows in known.items()},
        "not_measured": problem,
        "categories": {name: ways for name, (ways, _) in measured.items()},
        "all": _overall(list(measured.values()), [len(rows) for rows in prompts.values()]),
        "compute": _shares(engine),
    }


def _modes(model: Model, drafts: int) -> tuple[dict[str, Mode], str | None]:
    """Full depth, early exits where the run is calibrated, and each stage as a drafter; and what lacks."""
    engine, problem = model.engine, None
    modes: dict[str, Mode] = {"full": Prefix(engine, None, Sampling())}
    try:
        for rule in RULES:
            modes[rule] = mode_of(rule, model.session, engine, Sampling())
    except RunError as error:
        problem = str(error)
    for exit_ in range(engine.last):
        modes[f"draft by stage {exit_ + 1}"] = Speculate(engine, DraftRule(0.0, drafts), exit_)
    return modes, problem


Ways = dict[str, dict[str, Any]]
Seconds = dict[str, list[float]]


def _measured(
    engine: Engine, modes: Mapping[str, Mode], prompts: Sequence[Sequence[int]], settings: PromptSettings
) -> tuple[Ways, Seconds]:
    """What every way makes of some prompts, and its seconds in each round."""
    written = {name: continued(mode, prompts, settings.tokens) for name, mode in modes.items()}
    full = written["full"].texts
    clocks = {name: partial(_seconds, mode, prompts, settings.tokens) for name, mode in modes.items()}
    seconds = read_in_turns(clocks, settings.rounds, warmup=0)
    ways: Ways = {}
    for name, made in written.items():
        ways[name] = {
            "prompts": len(prompts),
            "speedup": ratio(seconds, "full", name).as_dict(),
            "identical": identical(made.texts, full),
            **differences(engine, prompts, made.texts, full),
            "mean_stage": mean_stage(made.texts),
            "acceptance": made.acceptance,
        }
    ways["full"]["distinct_4grams"] = distinct(full)
    return ways, seconds


def _seconds(mode: Mode, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    return continued(mode, prompts, tokens).seconds


def _overall(measured: Sequence[tuple[Ways, Seconds]], counts: Sequence[int]) -> Ways:
    """The same over all categories: times added up round by round, shares weighed by prompts."""
    names = list(measured[0][0])
    seconds = {
        name: [sum(times) for times in zip(*(each[name] for _, each in measured), strict=True)]
        for name in names
    }
    total: Ways = {}
    for name in names:
        rows = [ways[name] for ways, _ in measured]
        total[name] = {
            "prompts": sum(counts),
            "speedup": ratio(seconds, "full", name).as_dict(),
            "mismatches": sum(row["mismatches"] for row in rows),
            "ties": sum(row["ties"] for row in rows),
        }
        for key in ("identical", "mean_stage", "acceptance"):
            values = [(row[key], n) for row, n in zip(rows, counts, strict=True) if row[key] is not None]
            weight = sum(n for _, n in values)
            total[name][key] = sum(x * n for x, n in values) / weight if weight else None
    return total


def _shares(engine: Engine) -> list[float]:
    """The share of all layers that each exit runs."""
    layers = [
        sum(len(engine.plan.stages[each.index].layers) for each in engine.plan.needed(stage))
        for stage in engine.exits
    ]
    return [count / layers[-1] for count in layers]
