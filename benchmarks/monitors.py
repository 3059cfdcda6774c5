"""Which signal warns of a broken training, how early, and how often for nothing.

    python benchmarks/monitors.py [--seeds 3] [--steps 220] [--rounds 7] [--json]

Small GPTs learn bytes of the default corpus with AdamW, each beside a twin of the same seed that nothing
happens to. At step `fault_at` one fault begins:

    learning_rate    30 times the learning rate for 5 steps
    bad_batch        3 batches of random tokens with random targets
    dead_channel     a quarter of the units of every MLP is set to zero, and its weights are held there
    label_noise      from then on 30 % of the targets are random
    logits           the head's weights grow by 8 % a step for 40 steps
    expansion        classes appear that were never there before

    damage           the first step at which the loss on a held-out batch is `DAMAGE` times the twin's
    lead             damage less the first alarm at or after the fault, in steps: positive is before it. The
                     median over faults and seeds with both; an alarm later than `WITHIN` steps is none
    detected         the share of faulty runs with an alarm in time
    false_alarms     alarms of the twins and of steps before the fault, per 1000 readings

    cost             a step with the monitor over one without, on a larger GPT, in turns, by processor time;
                     `least` is the ratio of the fastest rounds; `inside` is 1 + what the calls of `read`
                     alone take of a step without it, which noise elsewhere does not move; goal ≤ 1.03

Source: faults after what is reported of large runs (spikes, bad shards, dead units, exploding logits) and
"Dead Directions: Geometric Singular Learning", Algorithm 1 (expansion); the benchmark is ours.
Limits. Small models, one corpus, one optimizer: it ranks signals, and promises nothing of a large run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args

import torch
import tyro
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from topograd.cli.console import Json, number, out, print_json
from topograd.cli.progress import OnMore, work_progress
from topograd.data import read_corpus
from topograd.errors import ConfigError
from topograd.geometry.monitors.early_warning import SIGNALS, EarlyWarning
from topograd.limits import REPEATS, SIZE, check_numbers
from topograd.nn.gpt import GPT
from topograd.timing import ratio, read_in_turns


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How many trainings are broken, and when."""

    seeds: int = 3
    """Trainings of each fault, with a twin each."""
    steps: int = 220
    """Steps of a training."""
    fault_at: int = 140
    """The step at which a fault begins."""
    rounds: int = 7
    """How often the cost is measured, in turns; 0 to leave it out."""
    cost_rows: int = 16
    """Rows of 128 tokens in a step whose cost is measured."""

    def __post_init__(self) -> None:
        check_numbers(self, seeds=REPEATS, steps=REPEATS, fault_at=REPEATS, cost_rows=SIZE)
        if not 0 <= self.rounds <= REPEATS[1]:
            raise ConfigError(f"rounds is {self.rounds}: give 0 to {REPEATS[1]}")
        if not 20 <= self.fault_at < self.steps:
            raise ConfigError(
                f"fault_at is {self.fault_at} of {self.steps} steps: give 20 or more, and some steps after it"
            )


Fault = Literal["learning_rate", "bad_batch", "dead_channel", "label_noise", "logits", "expansion"]
VOCAB, CONTEXT, ROWS = 96, 32, 16
OLD = 48
"""Classes before an expansion."""
RATE = 3e-3
DAMAGE = 1.05
WITHIN = 60
COST_GOAL = 1.03
COST_STEPS = 20
WARMUP = 2


@dataclass(frozen=True)
class Training:
    """What one training showed: held-out losses, and the steps of each signal's alarms."""

    losses: list[float]
    alarms: dict[str, list[int]]
    readings: dict[str, int]


def bench_monitors(settings: Settings, on_more: OnMore | None = None) -> dict[str, Any]:
    """Lead, detection and false alarms of every signal, by fault, and what the monitor costs."""
    tokens = _tokens()
    faults = get_args(Fault)
    total, done = settings.seeds * (len(faults) + 2), 0
    broken: dict[str, list[tuple[Training, int | None]]] = {fault: [] for fault in faults}
    twins: list[Training] = []
    for seed in range(settings.seeds):
        calm = {}
        for narrow in (False, True):
            calm[narrow] = train(tokens, settings, seed, None, narrow=narrow)
            done = _more(on_more, done, total)
        twins += calm.values()
        for fault in faults:
            narrow = fault == "expansion"
            one = train(tokens, settings, seed, fault, narrow=narrow)
            broken[fault].append((one, _damage(one, calm[narrow], settings.fault_at)))
            done = _more(on_more, done, total)
    return {
        "settings": asdict(settings),
        "signals": {name: _score(name, broken, twins, settings) for name in SIGNALS},
        "damage": {fault: [damage for _, damage in runs] for fault, runs in broken.items()},
        "cost": measure_cost(settings) if settings.rounds else None,
    }


def train(tokens: Tensor, settings: Settings, seed: int, fault: Fault | None, *, narrow: bool) -> Training:
    """One training with a monitor; `narrow` folds the classes until an expansion begins."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GPT(layers=2, width=32, heads=2, vocab=VOCAB, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    held = _batch(tokens, torch.Generator().manual_seed(10_000), narrow)
    losses: list[float] = []
    readings = dict.fromkeys(SIGNALS, 0)

    def count(step: int, values: Any) -> None:
        for name in values:
            readings[name] = readings.get(name, 0) + 1

    monitor = EarlyWarning(model, head="head", optimizer=optimizer, writer=count)
    with monitor:
        for step in range(settings.steps):
            begun = fault is not None and step >= settings.fault_at
            since = step - settings.fault_at
            inputs, targets = _batch(tokens, generator, narrow and not (begun and fault == "expansion"))
            if begun:
                inputs, targets = _spoiled(fault, since, inputs, targets, generator)
                _disturb(fault, since, model, optimizer)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            monitor.read(step, loss)
            optimizer.step()
            if begun:
                _disturb(fault, since, model, optimizer, after=True)
            with torch.no_grad():
                losses.append(float(F.cross_entropy(model(held[0]).flatten(0, 1), held[1].flatten())))
    alarms: dict[str, list[int]] = {name: [] for name in SIGNALS}
    for alarm in monitor.alarms:
        alarms[alarm.signal].append(alarm.step)
    return Training(losses, alarms, readings)


def _spoiled(
    fault: Fault | None, since: int, inputs: Tensor, targets: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The batch that a fault of the data gives."""
    random = torch.randint(VOCAB, (2, *inputs.shape), generator=generator)
    if fault == "bad_batch" and since < 3:
        return random[0], random[1]
    if fault == "label_noise":
        wrong = torch.rand(targets.shape, generator=generator) < 0.3
        return inputs, torch.where(wrong, random[1], targets)
    return inputs, targets


@torch.no_grad()
def _disturb(
    fault: Fault | None, since: int, model: GPT, optimizer: torch.optim.Optimizer, after: bool = False
) -> None:
    """What a fault of the machine does before (or `after`) the step."""
    if fault == "learning_rate" and not after:
        for group in optimizer.param_groups:
            group["lr"] = 30 * RATE if since < 5 else RATE
    if fault == "dead_channel":
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.up.weight"):
                parameter[: len(parameter) // 4] = 0
            if name.endswith("mlp.down.weight"):
                parameter[:, : parameter.shape[1] // 4] = 0
    if fault == "logits" and after and since < 40:
        model.head.weight *= 1.08


def _damage(one: Training, twin: Training, fault_at: int) -> int | None:
    """The first step of a held-out loss above DAMAGE times the twin's; None if there is none."""
    for step in range(fault_at, len(one.losses)):
        if not one.losses[step] <= DAMAGE * twin.losses[step]:
            return step
    return None


def _score(
    name: str,
    broken: dict[str, list[tuple[Training, int | None]]],
    twins: list[Training],
    settings: Settings,
) -> dict[str, Any]:
    leads: dict[str, list[int]] = {}
    detected: dict[str, list[bool]] = {}
    wrong = sum(len(twin.alarms[name]) for twin in twins)
    readings = sum(twin.readings[name] for twin in twins)
    for fault, runs in broken.items():
        for one, damage in runs:
            first = next(_in_time(one.alarms[name], settings.fault_at), None)
            detected.setdefault(fault, []).append(first is not None)
            if first is not None and damage is not None:
                leads.setdefault(fault, []).append(damage - first)
    every = [lead for values in leads.values() for lead in values]
    shares = {fault: sum(values) / len(values) for fault, values in detected.items()}
    return {
        "lead": statistics.median(every) if every else None,
        "false_alarms": 1000 * wrong / readings if readings else None,
        "detected": sum(shares.values()) / len(shares),
        "lead_by_fault": {fault: statistics.median(values) for fault, values in leads.items()},
        "detected_by_fault": shares,
    }


def _in_time(steps: list[int], fault_at: int) -> Iterator[int]:
    return (step for step in steps if fault_at <= step < fault_at + WITHIN)


def measure_cost(settings: Settings) -> dict[str, Any]:
    """A step with the monitor at its defaults, and with a reading each step, over one without."""
    torch.manual_seed(0)
    inputs = torch.randint(VOCAB, (settings.cost_rows, 128))
    steps, inside = {}, {"default": 0.0, "each_step": 0.0}
    for name, every in (("plain", None), ("default", None), ("each_step", 1)):
        model = GPT(layers=4, width=128, heads=4, vocab=VOCAB, context=128)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        monitor = None
        if name != "plain":
            more = {} if every is None else {"every": every, "slow_every": every}
            monitor = EarlyWarning(model, head="head", optimizer=optimizer, **more)  # type: ignore[arg-type]
            monitor.__enter__()
        steps[name] = _stepping(model, optimizer, monitor, inputs, partial(_add, inside, name))
    clocks = {name: partial(_clock, run) for name, run in steps.items()}
    seconds = read_in_turns(clocks, settings.rounds, warmup=WARMUP)
    least = {name: min(values) for name, values in seconds.items()}
    plain = statistics.fmean(seconds["plain"]) * (settings.rounds + WARMUP)
    return {
        name: {
            **ratio(seconds, name, "plain").as_dict(),
            "least": least[name] / least["plain"],
            "inside": 1 + inside[name] / plain,
        }
        for name in inside
    } | {
        "goal": COST_GOAL,
        "threads": torch.get_num_threads(),
    }


def _clock(run: Callable[[], object]) -> float:
    """Processor time, which other processes disturb less than the clock."""
    began = time.process_time()
    run()
    return time.process_time() - began


def _add(totals: dict[str, float], name: str, seconds: float) -> None:
    totals[name] += seconds


def _stepping(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    monitor: EarlyWarning | None,
    inputs: Tensor,
    spent: Callable[[float], None],
) -> Callable[[], None]:
    """Some steps, the same batch each time; `spent` is told what each reading took."""
    state = {"step": 0}

    def run() -> None:
        for _ in range(COST_STEPS):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten())
            optimizer.zero_grad()
            loss.backward()
            if monitor is not None:
                spent(_clock(partial(monitor.read, state["step"], loss)))
            optimizer.step()
            state["step"] += 1

    return run


def _tokens() -> Tensor:
    """Characters of the default corpus as classes; others than printable ASCII are a blank."""
    text = "".join(document.text for document in read_corpus(None).heldout)[:400_000]
    codes = torch.tensor([ord(c) - 32 if 32 <= ord(c) < 127 else 95 if c == "\n" else 0 for c in text])
    return codes.clamp(0, VOCAB - 1)


def _batch(tokens: Tensor, generator: torch.Generator, narrow: bool) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(tokens) - CONTEXT - 1, (ROWS,), generator=generator)
    rows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts.tolist()])
    rows = rows % OLD if narrow else rows
    return rows[:, :-1], rows[:, 1:]


def _more(on_more: OnMore | None, done: int, total: int) -> int:
    if on_more is not None:
        on_more(done + 1, total)
    return done + 1


def monitors_table(results: Mapping[str, Any]) -> Table:
    """Each signal: lead over the damage, false alarms, and which faults it saw."""
    table = Table(title="Signals of a broken training", title_justify="left")
    for column in ("signal", "lead", "false /1000", "detected", "by fault"):
        table.add_column(column, justify="left" if column in ("signal", "by fault") else "right")
    for name, row in results["signals"].items():
        seen = (f"{fault} {share:.0%}" for fault, share in row["detected_by_fault"].items() if share)
        cells = (number(row["lead"], 0), number(row["false_alarms"], 2), number(row["detected"], 2))
        table.add_row(name, *cells, ", ".join(seen))
    table.caption = "lead: steps from the alarm to the damage of the held-out loss; negative is after it"
    if (cost := results["cost"]) is not None:
        table.caption += f"; a step with the monitor costs {number(cost['default']['median'], 3)}"
    return table


def main(settings: Annotated[Settings, tyro.conf.arg(name="")], json: Json = False) -> None:
    """Break small trainings in six ways: how early each signal warns, and how often for nothing."""
    with work_progress("breaking small trainings: two minutes or so") as on_more:
        results = bench_monitors(settings, on_more)
    if json:
        print_json(results)
        return
    out().print(monitors_table(results))


if __name__ == "__main__":
    tyro.cli(main)
