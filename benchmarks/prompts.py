"""What each prefix answers, and early exits and drafts on code, chat, lists and prose.

    python benchmarks/prompts.py [DIR] [--tokens 48] [--drafts 3] [--rounds 3] [--json]

    questions       eight prompts with one right answer, asked at every exit: what it writes behind the
                    prompt, greedily, ANSWER_TOKENS tokens; whether the answer is in it, in any case of
                    letters; Σ log p of the answer, and the rank of its first token
    leaving early   for each category the mean stage at which tokens leave, the share of texts that are full
                    depth's, and the speed; by the paper's rule and by ours (`decode/wand.py`)
    acceptance      the first stage drafts `drafts` tokens at a time: the share that full depth keeps
    draft stage     the same with each stage but the last as the drafter, over all prompts; `compute` is its
                    share of the layers

Every way continues the same prompts, in turns (`timing.py`); speeds are full depth's time over the way's, the
median over rounds. Texts are greedy. A text that leaves full depth's at a tie of its two best logits is
counted apart (`decode/agreement.py`). Of the two sets of questions `world` asks what the paper asks, `python`
what a model of program text may know.

Source: "Product of Experts" §5.2, §5.3, §5.4, §10.2; its prompts are not published, these are ours.
Limits: four prompts a category; greedy text of a small model loops, which flatters acceptance
(`distinct_4grams`). A word that is found counts even in a wrong sentence, and eight prompts tell no two
models apart: log-probabilities and ranks say more, `eval core` says most. Leaving early needs a calibrated
run; without one it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.table import Table
from rich.text import Text

from topograd.cli.console import DASH, Json, RuntimeFlag, WeightsFlag, note, number, out, print_json
from topograd.decode.agreement import differences, distinct, identical, mean_exit
from topograd.decode.benchmark import continued
from topograd.decode.depths import strategy_of
from topograd.decode.drafters import DraftRule
from topograd.decode.engine import Engine, check_exits
from topograd.decode.model import Model, load
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import DecodeStrategy, FixedDepth
from topograd.errors import ConfigError, RunError
from topograd.evaluation.texts import score_texts
from topograd.limits import DEPTH, REPEATS, check_numbers
from topograd.pretrained import REFERENCE
from topograd.timing import ratio, read_in_turns

MAX_TOKENS = 1_000_000
"""Tokens that one way of decoding writes."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is written behind the prompts of each category."""

    tokens: int = 48
    """Tokens written after each prompt."""
    drafts: int = 3
    """Tokens that are drafted at a time."""
    rounds: int = 3
    """How often every way is measured, in turns."""

    def __post_init__(self) -> None:
        check_numbers(self, tokens=REPEATS, drafts=DEPTH, rounds=REPEATS)
        if self.tokens * self.rounds > MAX_TOKENS:
            raise ConfigError(f"more than {MAX_TOKENS} tokens would be written by each mode; ask for fewer")


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

ANSWER_TOKENS = 12
Question = tuple[str, str]
"""A prompt and its answer, with the space that stands before it."""

QUESTIONS: dict[str, tuple[Question, ...]] = {
    "world": (
        ("The chemical symbol for gold is", " Au"),
        ("Romeo and Juliet was written by William", " Shakespeare"),
        ("The official language of Brazil is", " Portuguese"),
        ("In degrees Celsius, the boiling point of water is", " 100"),
        ("The largest planet in the solar system is", " Jupiter"),
        ("The first president of the United States was George", " Washington"),
        ("The theory of relativity was developed by Albert", " Einstein"),
        ("The planets of the solar system are Mercury, Venus, Earth,", " Mars"),
    ),
    "python": (
        ("class Stack:\n    def __init__(", "self"),
        ("for i in range(10):\n    ", "print"),
        ("if __name__ == ", '"__main__"'),
        ("with open(filename) as", " f"),
        ("try:\n    import foo\nexcept", " ImportError"),
        ("def is_empty(self):\n    return len(", "self"),
        ("    if not isinstance(value, int):\n        raise", " TypeError"),
        ("Return True if the object is callable,", " False"),
    ),
}


def bench_prompts(model: Model, settings: Settings) -> dict[str, Any]:
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


def _modes(model: Model, drafts: int) -> tuple[dict[str, DecodeStrategy], str | None]:
    """Full depth, early exits where the run is calibrated, and each stage as a drafter; and what lacks."""
    engine, problem = model.engine, None
    modes: dict[str, DecodeStrategy] = {"full": FixedDepth(engine)}
    try:
        for rule in RULES:
            modes[rule] = strategy_of(rule, model.session, engine)
    except RunError as error:
        problem = str(error)
    for exit_ in range(engine.last):
        modes[f"draft by stage {exit_ + 1}"] = Speculate(engine, DraftRule(0.0, drafts), exit_)
    return modes, problem


Ways = dict[str, dict[str, Any]]
Seconds = dict[str, list[float]]


def _measured(
    engine: Engine, modes: Mapping[str, DecodeStrategy], prompts: Sequence[Sequence[int]], settings: Settings
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
            "mean_stage": mean_exit(made.texts),
            "acceptance": made.acceptance,
        }
    ways["full"]["distinct_4grams"] = distinct(full)
    return ways, seconds


def _seconds(strategy: DecodeStrategy, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    return continued(strategy, prompts, tokens).seconds


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


def prefix_table(model: Model) -> dict[str, list[dict[str, Any]]]:
    """For each set, each prompt with what every exit makes of it."""
    return {name: _asked(model, questions) for name, questions in QUESTIONS.items()}


def right_counts(rows: Sequence[dict[str, Any]]) -> list[int]:
    """How many prompts of a set each exit answers."""
    return [sum(row["exits"][k]["right"] for row in rows) for k in range(len(rows[0]["exits"]))]


def _asked(model: Model, questions: Sequence[Question]) -> list[dict[str, Any]]:
    scored = score_texts(model, [(prompt, [answer]) for prompt, answer in questions])
    rows = []
    for (prompt, answer), [each] in zip(questions, scored, strict=True):
        exits = []
        for k, stage in enumerate(each.stages()):
            text = str(model.generate(prompt, ANSWER_TOKENS, depth=f"prefix:{k + 1}"))
            right = answer.strip().lower() in text.lower()
            first = stage["tokens"][0]
            exits.append({"text": text, "right": right, "logprob": stage["logprob"], "rank": first["rank"]})
        rows.append({"prompt": prompt, "answer": answer, "exits": exits})
    return rows


def prompt_tables(results: Mapping[str, Any]) -> list[Table]:
    """All of them, in the paper's order."""
    answers = [answer_table(name, rows) for name, rows in results["questions"].items()]
    ways = list(results["all"])
    early = [way for way in ways if way.startswith("wand")]
    drafting = [way for way in ways if way.startswith("draft")]
    tables = [*answers, *(category_table(results, way) for way in (*early, *drafting[:1]))]
    if drafting:
        tables.append(drafter_table(results, drafting))
    if results["not_measured"] is not None and tables:
        tables[-1].caption = f"not measured: leaving early ({results['not_measured']})"
    return tables


def answer_table(name: str, rows: list[dict[str, Any]]) -> Table:
    """A row for each prompt: what every exit writes, and the rank of the answer's first token."""
    table = Table(title=f"Eight prompts, {name}: right, and the rank of the answer", title_justify="left")
    table.add_column("prompt", overflow="fold")
    table.add_column("answer")
    exits = range(len(rows[0]["exits"]))
    for k in exits:
        table.add_column(f"stage {k + 1}", justify="right")
    for row in rows:
        marks = [f"{'yes' if each['right'] else 'no'} ({each['rank']})" for each in row["exits"]]
        table.add_row(Text(row["prompt"]), Text(row["answer"].strip()), *marks)
    table.add_section()
    table.add_row("right", "", *(str(sum(row["exits"][k]["right"] for row in rows)) for k in exits))
    return table


def category_table(results: Mapping[str, Any], way: str) -> Table:
    """One way by category."""
    table = Table(title=way, title_justify="left")
    columns = ("category", "prompts", "speed", "same texts", "ties", "stage", "kept")
    for column in columns:
        table.add_column(column, justify="left" if column == "category" else "right")
    for name, ways in results["categories"].items():
        table.add_row(name, *_cells(ways[way]))
    table.add_section()
    table.add_row("all", *_cells(results["all"][way]))
    return table


def drafter_table(results: Mapping[str, Any], drafting: list[str]) -> Table:
    """Each stage as the drafter, over all prompts."""
    table = Table(
        title=f"Draft stages, {results['settings']['drafts']} tokens at a time", title_justify="left"
    )
    for column in ("drafter", "compute", "prompts", "speed", "same texts", "ties", "stage", "kept"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for k, way in enumerate(drafting):
        table.add_row(way, f"{100 * results['compute'][k]:.0f} %", *_cells(results["all"][way]))
    return table


def _cells(way: Mapping[str, Any]) -> list[str]:
    kept = way["acceptance"]
    return [
        str(way["prompts"]),
        number(way["speedup"]["median"], 2),
        number(way["identical"], 2),
        str(way["ties"]),
        number(way["mean_stage"], 2),
        DASH if kept is None else number(kept, 2),
    ]


def main(
    folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="DIR")],
    settings: Annotated[Settings, tyro.conf.arg(name="")],
    runtime: RuntimeFlag = None,
    weights: WeightsFlag = "float32",
    json: Json = False,
) -> None:
    """What each prefix answers, and early exits and drafts on code, chat, lists and prose.

    Args:
        folder: The run's folder; by default the reference model that comes with the package.
    """
    model = load(folder or REFERENCE, runtime=runtime, weights=weights)
    note(f"measuring {model.session.run.folder}: some minutes, on a quiet machine if you can")
    results = bench_prompts(model, settings)
    if json:
        print_json(results)
        return
    for table in prompt_tables(results):
        out().print(table)


if __name__ == "__main__":
    tyro.cli(main)
