"""Reach of safe directions: how much old text, which rank and layers, and CORE tasks before and after.

The setting and the arms lora, safe and dead are those of `safe_adapters.py`, on the new text that is
forgotten over most there (facts), with the rates that were tuned for each model. The model is the one that
comes with the package. One thing is changed at a time; the middle is 32 windows of old text, rank 4, the maps
of all layers:

    old text    2, 8 and 32 windows of 64 tokens (fewer tokens than inputs with 2 and 8), safe and dead
    rank        2, 4, 16; lora and safe
    layers      all, the lower half, the upper half; lora and safe

Rates are not tuned anew, so a curve over ranks is one over ranks at one rate.

CORE tasks: the preset long has SmolLM2 (where its wheel is) at the middle alone. Before any step and after
the last one the first items of copa, winograd, openbook_qa and lambada_openai (0-shot) in CORE's order are
asked. `right` is whether an item is answered as its file says, `nats` the mean loss of the right answer's
tokens. Differences of two models are over the same items, with a bootstrap over items. Task files are those
in OUT/core; without that folder nothing is asked.

Claims, set before the run:

    old text    over seeds, what safe forgets at the end with 2 windows less what lora forgets is below 0
    CORE        the items that safe answers right less those that lora does, over all items, is above 0

Cost on one core: seconds for tiny; small three minutes, long five.
Limits. One text, few seeds, one rate. CORE has few items of four tasks and one training of each arm: its
intervals are over items.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from papers.beyond.adapter_tables import gain
from papers.beyond.bases import folders
from papers.beyond.safe_adapter_tables import at_end
from papers.beyond.safe_adapters import ARMS, SMALL, TINY, Study
from papers.outcome import Asked, Result, ResultTable, Row
from papers.verdicts import FAILED, HELD, UNDECIDED, Claim, Interval, above
from topograd.evaluation.intervals import mean_interval
from topograd.evaluation.prompts import bundle_of
from topograd.evaluation.tasks import TASKS, Item, Task, examples, find_files, read_items
from topograd.geometry.safe_directions import input_moments
from topograd.runs.session import open_session

TEXT = "facts"
RATES = {
    "reference": {"lora": 1.8e-2, "safe": 0.162, "dead": 0.162},
    "smollm2": {"lora": 6e-3, "safe": 1.8e-2, "dead": 1.8e-2},
}
"""Of `adapter_peers.py` and of `safe_adapters.py`."""
TASK_NAMES = ("copa", "winograd", "openbook_qa", "lambada_openai")
ITEMS = {"tiny": 2, "long": 25}


@dataclass(frozen=True)
class Place:
    """What is changed; each by itself."""

    windows: int = 32
    """Of old text."""
    rank: int = 4
    layers: str = "all"


MIDDLE = Place()
CURVES: tuple[tuple[str, str, tuple[str, ...], tuple[Place, ...]], ...] = (
    ("old text, windows", "windows", ("safe", "dead"), (Place(2), Place(8), MIDDLE)),
    ("rank", "rank", ("lora", "safe"), (Place(rank=2), MIDDLE, Place(rank=16))),
    ("layers", "layers", ("lora", "safe"), (MIDDLE, Place(layers="lower"), Place(layers="upper"))),
)


def run(args: Asked) -> Result:
    """The middle, then each curve, seed by seed; CORE with the first seed."""
    models = folders(args)
    name = list(models)[-1] if args.preset == "long" else "reference"
    size = TINY if args.preset == "tiny" else SMALL
    tasks = None if args.kept.file is None else args.kept.file.parent / "core"
    if args.preset == "small" or tasks is None or not tasks.is_dir():
        tasks = None
    study, rows = ReachStudy(name, open_session(models[name]), size, args, tasks), list[Row]()
    todo = [(arm, MIDDLE) for arm in ("lora", "safe", "dead")]
    curves = () if args.preset == "long" else CURVES
    todo += [(arm, place) for _, _, arms, places in curves for arm in arms for place in places]
    todo = list(dict.fromkeys(todo))
    core = study.before_core() if tasks is not None else None
    for seed in range(args.seeds):
        for arm, place in todo:
            rows.append(study.row(arm, place, seed))
            args.on_more(len(rows), args.seeds * len(todo))
    return Result(
        setting=f"Model: {name}. New text: {TEXT}. {args.steps} steps of {size.batch} sequences of "
        f"{size.length} tokens; rates {RATES[name]}.",
        rows=rows,
        tables=(*(_curve(*curve, rows) for curve in curves), *(() if core is None else (_core(core, rows),))),
        claims=tuple(_claims(core, rows)),
        seeds=args.seeds,
        record={"core before": core},
    )


class ReachStudy(Study):
    """The study with one thing changed at a time, and with task items after the last step."""

    def __init__(self, name: str, session: Any, size: Any, args: Asked, tasks: Path | None) -> None:
        super().__init__(name, session, size, args)
        self.tasks, self.whole, self.asking, self.windows = tasks, dict(self.maps), False, size.old

    def row(self, arm: str, place: Place, seed: int) -> Row:
        """An arm at a place; the first seed's middle is asked the items too."""
        chosen = next(one for one in ARMS if one.name == arm)
        layers = len(self.model.stack.layers)
        span = {"all": range(layers), "lower": range(layers // 2), "upper": range(layers // 2, layers)}
        kept = {f"stack.layers.{i}." for i in span[place.layers]}
        self.maps = {n: m for n, m in self.whole.items() if any(n.startswith(start) for start in kept)}
        self.size = replace(self.size, rank=min(place.rank, 4 if self.args.preset == "tiny" else place.rank))
        self.windows, self._read = place.windows, (("", 0), {})
        self.asking = self.tasks is not None and place == MIDDLE and not seed
        rate = RATES[self.name][arm]
        key = self._key(chosen, TEXT, seed, rate) | {"rank": place.rank, "layers": place.layers}
        key |= {"old": place.windows, "asked": self.asking}
        return key | self._kept(key, partial(self.learn, chosen, TEXT, seed, rate)) | vars(place)

    def moments(self, text: str, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Of all maps, read on the first windows of the old text."""
        _, after = super().moments(text, seed)
        some = self.old[0].inputs[: self.windows]
        return input_moments(self.model, self.maps, some.split(8)), after

    def _curve(self, *args: Any) -> Row:
        row = super()._curve(*args)
        return row | {"core": self.core()} if self.asking else row

    def before_core(self) -> Row:
        """The items before any step."""
        return self._kept({"core before": ITEMS[self.args.preset], "tasks": TASK_NAMES}, self.core)

    def core(self) -> Row:
        """By task, of each item whether it is answered right, and the loss of the right answer."""
        assert self.tasks is not None
        tasks = [TASKS[label] for label in TASK_NAMES]
        files, result = find_files(self.tasks, tasks), {}
        for task in (task for task in tasks if task.label in files):
            items = read_items(task, files[task.label])
            count = min(ITEMS[self.args.preset], len(items))
            result[task.label] = [self.answer(task, items, i) for i in range(count)]
        return result

    @torch.no_grad()
    def answer(self, task: Task, items: Sequence[Item], index: int) -> tuple[int, float]:
        """Whether the model as it is now answers an item right, and the right answer's nats a token."""
        shown = examples(task, items, index)
        bundle, _ = bundle_of(task, items[index], shown, self.session.tokenizer, 512)
        losses, greedy = [], True
        for row in bundle:
            tokens = torch.tensor(row.tokens)
            logits = self.model(tokens[None, :-1])[0, row.start - 1 :].float()
            losses.append(float(torch.nn.functional.cross_entropy(logits, tokens[row.start :])))
            greedy = bool((logits.argmax(-1) == tokens[row.start :]).all())
        if task.kind == "language_modeling":
            return int(greedy), losses[0]
        gold = items[index]["gold"]
        return int(losses.index(min(losses)) == gold), losses[gold]


def _at(rows: Sequence[Row], arm: str, place: Place) -> list[Row]:
    return [row for row in rows if row["arm"] == arm and all(row[k] == v for k, v in vars(place).items())]


def _curve(
    title: str, field: str, arms: Sequence[str], places: Sequence[Place], rows: Sequence[Row]
) -> ResultTable:
    lines = []
    for arm in arms:
        for place in places:
            here = _at(rows, arm, place)
            won = statistics.fmean(gain(row) / row["new"][0] for row in here)
            lost = Interval.of(at_end(here, [TEXT], arm))
            parameters = f"{here[0]['parameters']:,}"
            lines.append((arm, str(getattr(place, field)), parameters, f"{100 * won:.1f} %", str(lost)))
    header = ("arm", title, "learning", "learned", "forgotten at the end, BPB")
    return ResultTable(f"{title}: what is changed, the rest as in the middle", header, tuple(lines))


def _pairs(one: Row, other: Row, place: int, tasks: Sequence[str] = TASK_NAMES) -> np.ndarray:
    """Differences of two models, item by item: 0 of what is right, 1 of nats."""
    labels = [task for task in tasks if task in one]
    return np.array([[a[place] - b[place]] for t in labels for a, b in zip(one[t], other[t], strict=True)])


def _bounds(values: np.ndarray) -> str:
    [(low, high)] = mean_interval(values)
    return f"{values.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def _asked_rows(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["arm"]: row["core"] for row in rows if "core" in row}


def _core(before: Row, rows: Sequence[Row]) -> ResultTable:
    lines = []
    for label in (*[task for task in TASK_NAMES if task in before], "all"):
        tasks = TASK_NAMES if label == "all" else (label,)
        items = [item for task in tasks if task in before for item in before[task]]
        cells = [str(len(items)), f"{statistics.fmean(item[0] for item in items):.3f}"]
        for core in _asked_rows(rows).values():
            cells += [_bounds(_pairs(core, before, place, tasks)) for place in (0, 1)]
        lines.append((label, *cells))
    arms = [f"{arm}, {what}" for arm in _asked_rows(rows) for what in ("right", "nats")]
    caption = (
        "CORE tasks: the share of items that is right before, and what changes with each arm (95 %, items)"
    )
    return ResultTable(caption, ("task", "items", "before", *arms), tuple(lines))


def _claims(core: Row | None, rows: Sequence[Row]) -> list[Claim]:
    judged, few = list[Claim](), at_end(_at(rows, "safe", Place(2)), [TEXT], "safe")
    if few:
        usual = at_end(_at(rows, "lora", MIDDLE), [TEXT], "lora")
        less = [b - a for a, b in zip(few, usual, strict=True)]
        effect = "what lora forgets at the end less what safe does that read two windows, bits per byte"
        words = "two windows of old text are enough to forget less than LoRA"
        judged.append(above("old text", words, effect, less))
    answers = _asked_rows(rows)
    if core is not None and {"safe", "lora"} <= answers.keys():
        differences = _pairs(answers["safe"], answers["lora"], 0)
        [(low, high)] = mean_interval(differences)
        rule = "held if the 95 % bootstrap interval over items lies above 0, failed if below"
        verdict = HELD if low > 0 else FAILED if high < 0 else UNDECIDED
        words = "safe directions keep more of what CORE tasks ask than LoRA"
        judged.append(Claim("CORE", words, rule, _bounds(differences), verdict, (float(differences.mean()),)))
    return judged
