"""A backprop teacher of a staged student: bits per byte and rare facts, with the teacher and without.

The teacher is a network of twice the width that was trained by backprop for four times as long; all students
have the same one. Students of a seed have the same first weights and see the same batches:

    staged             2,2,2, each stage learns from the targets
    staged, taught     2,2,2, each stage also follows the teacher (objective `distillation`, half and half,
                       temperature 2: what `topograd train --teacher RUN --objective distillation` does)
    staged, longer     7/3 of the steps: a taught step is the student's forward and backward pass and the
                       teacher's forward pass, with four times the numbers: 3 and 4 forward passes
    backprop           6; with the preset long
    backprop, taught   6, with the teacher; with the preset long

Each arm takes the factor of all rates of §3 that has the least BPB with a seed that is not used again (the
longer arm that of staged); where it is at an end of its grid, one beyond is tried until it is between others.

Facts: invented people and where they were born, as sentences in one row of each batch, four times as often
if they are common, and hidden ones, which the teacher alone is taught (as often as common ones). Read as
what -log P(answer | prompt) is, in nats, and as known where the right answer is the likeliest of all twelve.

Claims, set before the run, over seeds, each of which has first weights and an order of the text of its own:

    BPB: staged less staged, taught is above 0
    equal work: staged, longer less staged, taught is above 0
    the cut: what the teacher gains staged learning less what it gains backprop is above 0
    rare facts: nats of staged less those of staged, taught are above 0
    keeping: the share of rare facts that staged, taught knows less half of the teacher's is above 0

Source: "Product of Experts" §10.2(2) proposes it and measures nothing; "Distilling the knowledge in a neural
network" (Hinton et al.). Cost: `presets.py`.
Limits. Byte models of 0.2M parameters; one teacher, one mixture and one temperature; equal work by counting
passes. With one teacher the facts are the same for all seeds, and an interval says nothing of other teachers.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.fit import best_between, fit
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.product_of_experts.facts import COUNTRIES, Fact, World
from papers.product_of_experts.token_ratio import scaled
from papers.staged_runs import bytes_config, differences, held_out, minus, order0, values
from papers.verdicts import Claim, Interval, above, settled
from topograd.data import Loader
from topograd.exec.forward import Predictor
from topograd.nn.config import GPTConfig
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.nn.stack import Stack
from topograd.runs.config import TrainConfig
from topograd.runs.session import load_data
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.evaluation import evaluate

TUNING = 100
FACTORS = (0.5, 1.0, 2.0)
LONGER = 7 / 3
TEACHER_STEPS, TEACHER_WIDTH = 4, 2
KINDS = ("common", "rare", "hidden")
EACH = 8
"""Facts of a kind."""
OFTEN = {"common": 4, "rare": 1, "hidden": 4}
STAGED, TAUGHT, BACKPROP, BACKPROP_TAUGHT, LONG = (
    "staged", "staged, taught", "backprop", "backprop, taught", "staged, longer"
)  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One student."""

    name: str
    partition: str
    taught: bool = False
    length: float = 1.0

    @property
    def topology(self) -> Topology:
        return Topology.chain(self.partition, objective="distillation" if self.taught else "cross-entropy")


ARMS = (
    Arm(STAGED, "2,2,2"),
    Arm(LONG, "2,2,2", length=LONGER),
    Arm(TAUGHT, "2,2,2", taught=True),
    Arm(BACKPROP, "6"),
    Arm(BACKPROP_TAUGHT, "6", taught=True),
)


def run(args: Asked) -> Result:
    """Choose rates, train every student with every seed, and judge."""
    check_seeds(args.seeds)
    school = School(config_of(args, 0))
    given = {seed: Given(config_of(args, seed), school) for seed in (TUNING, *range(args.seeds))}
    rows = [_kept(args, given[0], "teacher", 1.0, school.read)]
    factors: dict[str, float] = {}
    arms = ARMS[:3] if args.preset == "small" else ARMS
    for arm in arms:
        factors[arm.name] = factors[STAGED] if arm.name == LONG else _tuned(args, arm, given[TUNING])
    for seed in range(args.seeds):
        for arm in arms:
            rows.append(_row(args, arm, given[seed], factors[arm.name]))
            args.on_more(len(rows), args.seeds * len(arms) + 1)
    return Result(
        setting=f"GPTs of six layers of width {args.width} on bytes, {args.steps} steps of 4 × 64; "
        f"the teacher has width {TEACHER_WIDTH * args.width} and {TEACHER_STEPS * args.steps} steps.",
        rows=rows,
        tables=(_table(rows),),
        findings=tuple(_findings(rows)),
        claims=tuple(settled(_claims(rows), rows)),
        seeds=args.seeds,
        record={"factors": factors},
    )


def config_of(args: Asked, seed: int) -> TrainConfig:
    """A student's settings but for its topology and rates; prompts must fit into the context."""
    config = bytes_config(args, seed, batch=4, tiny_batch=2, eval_bytes=20_000)
    return replace(config, model=config.model.changed(context=64))


class School:
    """Text, facts and the teacher, which all students have."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, data = load_data(config)
        self.data, self.text = data, held_out(self.config, data)
        facts = World.make(people=EACH * len(KINDS), relations=("born",)).facts
        self.facts = {kind: facts[i :: len(KINDS)] for i, kind in enumerate(KINDS)}

    def batches(self, steps: int, kinds: Sequence[str], seed: int) -> list[tuple[Tensor, Tensor]]:
        """The text in an order of its own; the last row of each batch has facts of these kinds."""
        loader = Loader(self.data.train, self.config.model.context, self.config.batch, seed)
        chosen, result = random.Random(seed), []
        told = [fact for kind in kinds for fact in self.facts[kind] for _ in range(OFTEN[kind])]
        for _ in range(steps):
            inputs, targets = (x.clone() for x in next(loader))
            text = " ".join(fact.statement(0) for fact in chosen.sample(told, 4))
            row = self.tokens(text)[: inputs.shape[1] + 1]
            inputs[-1], targets[-1] = row[:-1], row[1:]
            result.append((inputs, targets))
        return result

    def tokens(self, text: str) -> Tensor:
        tokenizer = self.data.tokenizer
        return torch.tensor([tokenizer.separator, *tokenizer.encode(text)])

    @cached_property
    def teacher(self) -> Predictor:
        """Wider, trained for longer, on the text in another order and on all the facts."""
        wide = self.config.gpt.changed(width=TEACHER_WIDTH * self.config.model.width)
        batches = self.batches(TEACHER_STEPS * self.config.steps, KINDS, 1000)
        stack, plan = _trained(wide, Topology.chain("6"), self.config, batches, 1.0, None)
        return Predictor(stack, plan).eval().requires_grad_(False)

    def read(self, stack: Stack | None = None, plan: Plan | None = None) -> Row:
        """Bits per byte, and what is known of each kind of fact; of the teacher by default."""
        model = self.teacher if stack is None or plan is None else Predictor(stack.eval(), plan)
        bpb = evaluate(model.stack, model.plan, self.text).bpb
        row: Row = {"bpb": bpb.prediction, "bpb_stages": bpb.stages, "order0": order0(self.text)}
        for kind in KINDS:
            tables = [(COUNTRIES.index(f.answer), self.answers(model, f)) for f in self.facts[kind]]
            row[f"{kind} nats"] = -statistics.fmean(table[answer] for answer, table in tables)
            row[f"{kind} known"] = statistics.fmean(max(table) == table[answer] for answer, table in tables)
        return row

    @torch.no_grad()
    def answers(self, model: nn.Module, fact: Fact) -> list[float]:
        """The log-probability of every possible answer behind a fact's prompt, in nats."""
        start = len(self.tokens(fact.prompt))
        rows = [self.tokens(f"{fact.prompt} {country}.") for country in COUNTRIES]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        logits = model(padded[:, :-1].clamp_min(0)).float()
        nats = F.cross_entropy(logits.mT, padded[:, 1:], reduction="none")
        result: list[float] = (-nats[:, start - 1 :].double().sum(1)).tolist()
        return result


class Given:
    """What a seed's students have in common."""

    def __init__(self, config: TrainConfig, school: School) -> None:
        self.config, self.seed, self.school = replace(school.config, seed=config.seed), config.seed, school

    @cached_property
    def lessons(self) -> list[tuple[Tensor, Tensor]]:
        """Of the longest student; the others have its first ones."""
        return self.school.batches(round(LONGER * self.config.steps), ("common", "rare"), self.seed)

    def learn(self, arm: Arm, factor: float) -> Row:
        """A student's readings after its training."""
        batches = self.lessons[: round(arm.length * self.config.steps)]
        teacher = self.school.teacher if arm.taught else None
        config = self.config
        return self.school.read(*_trained(config.gpt, arm.topology, config, batches, factor, teacher))


def _trained(
    model: GPTConfig,
    topology: Topology,
    config: TrainConfig,
    batches: Sequence[tuple[Tensor, Tensor]],
    factor: float,
    teacher: Predictor | None,
) -> tuple[GPT, Plan]:
    torch.manual_seed(config.seed)
    stack = GPT(model)
    plan = prepare(stack, topology)
    fit(stack, plan, batches, len(batches), scaled(config.optimizer, factor), teacher=teacher)
    return stack, plan


def _tuned(args: Asked, arm: Arm, given: Given) -> float:
    """The factor of the rates with the least bits per byte."""
    if args.preset == "tiny":
        return 1.0
    return best_between(FACTORS, lambda factor: float(_row(args, arm, given, factor)["bpb"]))


def _row(args: Asked, arm: Arm, given: Given, factor: float) -> Row:
    return _kept(args, given, arm.name, factor, partial(given.learn, arm, factor))


def _kept(args: Asked, given: Given, arm: str, factor: float, make: Callable[[], Row]) -> Row:
    key = {"arm": arm, "seed": given.seed, "factor": factor}
    return key | args.kept.row(key, make)


def _claims(rows: Sequence[Row]) -> list[Claim]:
    gain = differences(rows, STAGED, TAUGHT)
    rare = [f"rare {what}" for what in ("nats", "known")]
    [knows] = values(rows, "teacher", rare[1])
    judged = [
        above("bits per byte", "the teacher helps", "BPB of staged less staged, taught", gain),
        above(
            "equal work",
            "the teacher helps more than as much work without it",
            "BPB of staged, longer less staged, taught",
            differences(rows, LONG, TAUGHT),
        ),
        above(
            "rare facts",
            "the teacher hands rare facts on",
            "nats of rare answers of staged less staged, taught",
            differences(rows, STAGED, TAUGHT, rare[0]),
        ),
        above(
            "keeping",
            "the student keeps half of the rare facts that the teacher knows",
            "the share of rare facts that staged, taught knows less half of the teacher's",
            [known - 0.5 * knows for known in values(rows, TAUGHT, rare[1])],
        ),
    ]
    if values(rows, BACKPROP):
        effect = "what the teacher gains staged learning less what it gains backprop, BPB"
        other = minus(gain, differences(rows, BACKPROP, BACKPROP_TAUGHT))
        judged.append(above("the cut", "the teacher makes up for gradients that are cut", effect, other))
    return judged


def _table(rows: Sequence[Row]) -> ResultTable:
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        factor = next(row["factor"] for row in rows if row["arm"] == arm)
        cells = [str(Interval.of(values(rows, arm)))]
        for kind in KINDS:
            cells.append(str(Interval.of(values(rows, arm, f"{kind} nats"))))
            cells.append(f"{statistics.fmean(values(rows, arm, f'{kind} known')):.2f}")
        lines.append((arm, f"{factor:g}", *cells))
    header = ("arm", "rates ×", "BPB", *(f"{kind}, {what}" for kind in KINDS for what in ("nats", "known")))
    caption = "Bits per byte of held-out text, and facts: nats of the right answer, share that is known"
    return ResultTable(caption, header, tuple(lines))


def _findings(rows: Sequence[Row]) -> list[str]:
    gains = {
        what: Interval.of(differences(rows, STAGED, arm))
        for what, arm in (("A teacher", TAUGHT), ("As much work without one", LONG))
    }
    return [f"{what} gains staged learning {gain} bits per byte." for what, gain in gains.items()]
