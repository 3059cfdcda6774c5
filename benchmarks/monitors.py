"""Which signal tells a broken training from a calm one, at equal rates of false alarms, and how early.

    python benchmarks/monitors.py [--seeds 12] [--steps 900] [--rounds 7] [--json]

Small GPTs learn bytes of the default corpus with AdamW. Every training runs to its end without a fault; that
is the calm twin. At a step drawn for each fault and seed it is taken up again, bit for bit, and broken:

    abrupt       learning_rate   30 times the learning rate for 5 steps
                 bad_batch       3 batches of random tokens with random targets
                 label_noise     from then on 30 % of the targets are random
                 expansion       the head gets as many rows again, at random, and the classes for them appear
    building up  rate_creep      the learning rate grows by 6 % a step
                 logits          the head's weights grow by 4 % a step
                 fading_channels a quarter of the units of every MLP shrinks by 6 % a step
                 label_drift     the share of random targets grows by 0.6 % a step
                 data_drift      the share of random tokens grows by 0.6 % a step

All signals are read at the same steps, every `INTERVAL`; the phase of a fault is random. A reading's score is
how many robust standard deviations it is from the median of the signal's last readings, on its bad side; that
of a window of `WITHIN` steps its largest. Windows that begin with a fault are told from those of calm twins:

    area         under the ROC: the chance that a broken window scores above a calm one; ½ is chance
    detected     the share of broken windows above the threshold that `FALSE` of the calm windows pass
    early        the same, by readings before the damage: the first step at which the held-out loss is
                 `DAMAGE` times the twin's
    gain         detected and early of *gradient norm or this signal*, less those of the gradient norm, both
                 with `FALSE` of the calm windows: the rarer of the two scores among calm windows counts

Intervals are the middle 90 % over `DRAWS` bootstrap draws of seeds, calm and broken together: thresholds are
drawn anew. A gain whose interval holds 0 is undecided.

    cost         a step with the monitor over one without, on a larger GPT, in turns, by processor time, hooks
                 included; `least` is the ratio of the fastest rounds, `inside` what the readings took alone,
                 `not_read` the signals that were off; goal ≤ 1.03

Source: faults after what is reported of large runs (spikes, bad shards, dead units, exploding logits) and
"Dead Directions: Geometric Singular Learning", Algorithm 1 (expansion); the benchmark is ours.
Limits. Small models, one corpus, one optimizer: it ranks signals, and promises nothing of a large run.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from topograd.cli.console import Json, number, out, print_json
from topograd.cli.progress import OnMore, work_progress
from topograd.data import read_corpus
from topograd.errors import ConfigError
from topograd.geometry.monitors.early_warning import SIGNALS, EarlyWarning
from topograd.geometry.monitors.outliers import MEMORY, deviation
from topograd.limits import REPEATS, SIZE, check_numbers
from topograd.nn.gpt import GPT
from topograd.timing import ratio, read_in_turns

Array = NDArray[np.float64]
VOCAB, CONTEXT, ROWS = 96, 32, 16
OLD = 48
"""Classes before an expansion."""
RATE = 3e-3
INTERVAL = 4
"""Steps between readings."""
FIRST = 160
"""The first step that may be broken: every signal has its memory full."""
WITHIN = 60
DAMAGE = 1.05
FALSE = 0.05
DRAWS = 500
COST_GOAL = 1.03
COST_STEPS = 20
WARMUP = 2
Fault = Literal[
    "learning_rate",
    "bad_batch",
    "label_noise",
    "expansion",
    "rate_creep",
    "logits",
    "fading_channels",
    "label_drift",
    "data_drift",
]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How many trainings are broken."""

    seeds: int = 12
    """Calm trainings, each broken once by every fault."""
    steps: int = 900
    """Steps of a calm training."""
    rounds: int = 7
    """How often the cost is measured, in turns; 0 to leave it out."""
    cost_rows: int = 16
    """Rows of 128 tokens in a step whose cost is measured."""

    def __post_init__(self) -> None:
        if not 0 <= self.seeds <= REPEATS[1]:
            raise ConfigError(f"seeds is {self.seeds}: give 0 (the cost alone) to {REPEATS[1]}")
        check_numbers(self, steps=REPEATS, cost_rows=SIZE)
        if not 0 <= self.rounds <= REPEATS[1]:
            raise ConfigError(f"rounds is {self.rounds}: give 0 to {REPEATS[1]}")
        if self.steps < FIRST + 2 * WITHIN:
            raise ConfigError(f"steps is {self.steps}: give {FIRST + 2 * WITHIN} or more")


@dataclass
class Training:
    """A training that can be taken up again: its model, what was read of it, and held-out losses."""

    seed: int
    narrow: bool
    """Whether classes are folded to the first `OLD` of them."""
    step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    readings: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: {s: [] for s in SIGNALS})
    kept: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The whole state before some of its steps."""

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = GPT(layers=2, width=32, heads=2, vocab=VOCAB, context=CONTEXT)
        if self.narrow:
            self.model.head.weight = nn.Parameter(self.model.head.weight.detach()[:OLD].clone())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=(0.9, 0.95))
        self.generator = torch.Generator().manual_seed(self.seed)
        self.batch: tuple[Tensor, Tensor] | None = None

    def loss(self) -> Tensor:
        """Of this step's batch."""
        assert self.batch is not None
        return loss_of(self.model, self.batch)

    def monitored(self) -> EarlyWarning:
        """A monitor that reads every signal every INTERVAL steps."""

        def write(step: int, values: Mapping[str, float]) -> None:
            for name in values.keys() & SIGNALS.keys():
                self.readings[name].append((step, values[name]))

        return EarlyWarning(
            self.model,
            head="head",
            optimizer=self.optimizer,
            every=INTERVAL,
            slow_every=INTERVAL,
            again=self.loss,
            writer=write,
        )

    def state(self, monitor: EarlyWarning) -> dict[str, Any]:
        whole = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "monitor": monitor.state(),
        }
        return copy.deepcopy(whole)

    def taken_up(self, step: int) -> tuple[Training, EarlyWarning]:
        """The same training before a step that was kept, with its readings so far."""
        state = copy.deepcopy(self.kept[step])
        past = {name: [one for one in rows if one[0] < step] for name, rows in self.readings.items()}
        again = Training(self.seed, self.narrow, step, readings=past)
        again.model.load_state_dict(state["model"])
        again.optimizer.load_state_dict(state["optimizer"])
        again.generator.set_state(state["generator"])
        monitor = again.monitored()
        monitor.load_state(state["monitor"])
        return again, monitor


def run_on(training: Training, monitor: EarlyWarning, tokens: Tensor, last: int, fault: Any = None) -> None:
    """Train up to a step; with a fault, from where the training is."""
    held = batch_of(tokens, torch.Generator().manual_seed(10_000), training.narrow)
    model, optimizer, began = training.model, training.optimizer, training.step
    noise = torch.Generator().manual_seed(training.seed)  # so that later batches are those of the twin
    with monitor:
        for step in range(began, last):
            if step in training.kept:
                training.kept[step] = training.state(monitor)
            since = step - began
            narrow = training.narrow and fault != "expansion"
            batch = batch_of(tokens, training.generator, narrow)
            if fault is not None:
                batch = spoiled(fault, since, *batch, noise)
                disturb(fault, since, model, optimizer, noise)
            training.batch = batch
            loss = training.loss()
            optimizer.zero_grad()
            loss.backward()
            monitor.read(step, loss)
            optimizer.step()
            training.step = step + 1
            with torch.no_grad():
                training.losses[step] = float(loss_of(model, held))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of a batch."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def spoiled(
    fault: str, since: int, inputs: Tensor, targets: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The batch that a fault of the data gives."""
    noise = torch.randint(VOCAB, (2, *inputs.shape), generator=generator)
    drawn = torch.rand(inputs.shape, generator=generator)
    if fault == "bad_batch" and since < 3:
        return noise[0], noise[1]
    if fault in ("label_noise", "label_drift"):
        share = 0.3 if fault == "label_noise" else 0.006 * (since + 1)
        return inputs, torch.where(drawn < share, noise[1], targets)
    if fault == "data_drift":
        return torch.where(drawn < 0.006 * (since + 1), noise[0], inputs), targets
    return inputs, targets


@torch.no_grad()
def disturb(
    fault: str, since: int, model: GPT, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> None:
    """What a fault of the machine or of its settings does before a step."""
    factors = {"learning_rate": 30.0 if since < 5 else 1.0, "rate_creep": 1.06 ** (since + 1)}
    for group in optimizer.param_groups if fault in factors else ():
        group["lr"] = RATE * factors[fault]
    for name, parameter in model.named_parameters() if fault == "fading_channels" else ():
        if name.endswith("mlp.up.weight"):
            parameter[: len(parameter) // 4] *= 0.94
    if fault == "logits":
        model.head.weight *= 1.04
    if fault == "expansion" and since == 0:
        old = model.head.weight
        rows = old.std() * torch.randn(VOCAB - len(old), old.shape[1], generator=generator)
        model.head.weight = nn.Parameter(torch.cat((old, rows)))
        params = optimizer.param_groups[0]["params"]
        params[[one is old for one in params].index(True)] = model.head.weight
        state = optimizer.state.pop(old)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.cat((state[key], torch.zeros_like(rows)))
        optimizer.state[model.head.weight] = state


@dataclass(frozen=True)
class Window:
    """What one window showed: of each signal the largest score, and the largest before the damage."""

    seed: int
    fault: str | None
    best: dict[str, float]
    early: dict[str, float]
    damage: int | None = None
    """Steps from the fault to the damage."""


def scores(readings: list[tuple[int, float]], name: str) -> Iterator[tuple[int, float]]:
    """The score of every reading of a signal."""
    past: deque[float] = deque(maxlen=MEMORY)
    for step, value in readings:
        here = math.log(value) if 0 < value < math.inf else (math.inf if not math.isfinite(value) else -50.0)
        yield step, deviation(past, here, SIGNALS[name])
        if math.isfinite(here):
            past.append(here)


def largest(rated: Mapping[str, list[tuple[int, float]]], start: int, end: int) -> dict[str, float]:
    """Of each signal the largest score from one step to another."""
    return {
        name: max((score for step, score in rows if start <= step < end), default=0.0)
        for name, rows in rated.items()
    }


def windows_of(
    seed: int, settings: Settings, tokens: Tensor, on_more: Callable[[], None]
) -> Iterator[Window]:
    """The calm windows and the broken ones of one seed."""
    draw = np.random.default_rng(seed)
    last = settings.steps - WITHIN
    starts = {fault: int(draw.integers(FIRST, last)) for fault in get_args(Fault)}
    for narrow in (False, True):
        faults = [fault for fault in starts if (fault == "expansion") == narrow]
        calm = Training(seed, narrow, kept={starts[fault]: {} for fault in faults})
        run_on(calm, calm.monitored(), tokens, settings.steps)
        rated = {name: list(scores(rows, name)) for name, rows in calm.readings.items()}
        for start in range(FIRST, last + 1, WITHIN):
            best = largest(rated, start, start + WITHIN)
            yield Window(seed, None, best, best)
        on_more()
        for fault in faults:
            start = starts[fault]
            broken, monitor = calm.taken_up(start)
            run_on(broken, monitor, tokens, start + WITHIN, fault)
            rated = {name: list(scores(rows, name)) for name, rows in broken.readings.items()}
            damage = damaged(broken, calm)
            until = start + WITHIN if damage is None else damage
            best = largest(rated, start, start + WITHIN)
            after = None if damage is None else damage - start
            yield Window(seed, fault, best, largest(rated, start, until), after)
            on_more()


def damaged(broken: Training, twin: Training) -> int | None:
    """The first step behind which the held-out loss is above DAMAGE times the twin's, or None."""
    return next((s for s, loss in broken.losses.items() if not loss <= DAMAGE * twin.losses[s]), None)


def judged(windows: list[Window]) -> dict[str, dict[str, float]]:
    """Area, detection, early detection and gains of every signal over these windows."""
    calm = [one for one in windows if one.fault is None]
    broken = [one for one in windows if one.fault is not None]
    found = {}
    rare = {name: Rareness(calm, name) for name in SIGNALS}
    alone = rare["gradient_norm"].shares([rare["gradient_norm"]], calm, broken)
    for name, own in rare.items():
        detected, early = own.shares([own], calm, broken)
        both = own.shares([rare["gradient_norm"], own], calm, broken)
        found[name] = {
            "area": own.area([one.best[name] for one in broken]),
            "detected": detected,
            "early": early,
            "gain_detected": both[0] - alone[0],
            "gain_early": both[1] - alone[1],
        }
    return found


class Rareness:
    """How seldom a calm window has so large a score of one signal."""

    def __init__(self, calm: list[Window], name: str) -> None:
        self.name = name
        self._calm = np.sort([one.best[name] for one in calm])

    def __call__(self, values: list[float]) -> Array:
        """-log of the share of calm windows that score as much; beyond them by the score itself."""
        found = np.asarray(values, dtype=np.float64)
        above = len(self._calm) - np.searchsorted(self._calm, found, side="left")
        beyond = np.maximum(found - self._calm[-1], 0) / (1 + abs(self._calm[-1]))
        return -np.log((above + 1) / (len(self._calm) + 1)) + 1e-3 * np.arctan(beyond)

    def area(self, values: list[float]) -> float:
        """The chance that one of these is above a calm one, ties by half."""
        found = np.asarray(values, dtype=np.float64)
        below, until = (np.searchsorted(self._calm, found, side=side) for side in ("left", "right"))
        return float((below + until).mean() / (2 * len(self._calm)))

    @staticmethod
    def shares(signals: list[Rareness], calm: list[Window], broken: list[Window]) -> tuple[float, float]:
        """Broken windows that the signals together detect, in all and before the damage, at FALSE."""

        def joint(windows: list[Window], early: bool) -> Array:
            ways = [one([(w.early if early else w.best)[one.name] for w in windows]) for one in signals]
            return np.max(ways, axis=0)

        quiet = np.sort(joint(calm, False))
        threshold = quiet[min(len(quiet) - 1, math.ceil((1 - FALSE) * len(quiet)) - 1)]
        return tuple(float((joint(broken, early) > threshold).mean()) for early in (False, True))  # type: ignore[return-value]


def with_intervals(windows: list[Window], draws: int = DRAWS) -> dict[str, dict[str, Any]]:
    """The same with the middle 90 % over draws of seeds."""
    seeds = sorted({one.seed for one in windows})
    by_seed = {seed: [one for one in windows if one.seed == seed] for seed in seeds}
    generator = np.random.default_rng(0)
    values = judged(windows)
    drawn = [
        judged([one for seed in generator.choice(seeds, len(seeds)) for one in by_seed[seed]])
        for _ in range(draws)
    ]
    found: dict[str, dict[str, Any]] = {}
    for name, row in values.items():
        found[name] = {}
        for key, value in row.items():
            low, high = np.quantile([one[name][key] for one in drawn], (0.05, 0.95))
            found[name][key] = {"value": value, "interval": [float(low), float(high)]}
    return found


def by_fault(windows: list[Window]) -> dict[str, dict[str, Any]]:
    """The share of each fault's windows that every signal detects, and when the damage comes."""
    calm = [one for one in windows if one.fault is None]
    found = {}
    for fault in get_args(Fault):
        broken = [one for one in windows if one.fault == fault]
        after = [one.damage for one in broken if one.damage is not None]
        shares = {name: Rareness.shares([Rareness(calm, name)], calm, broken) for name in SIGNALS}
        found[fault] = {
            "detected": {name: share[0] for name, share in shares.items()},
            "early": {name: share[1] for name, share in shares.items()},
            "damaged": len(after) / len(broken),
            "steps_to_damage": statistics.median(after) if after else None,
        }
    return found


def bench_monitors(settings: Settings, on_more: OnMore | None = None) -> dict[str, Any]:
    """What every signal detects, by fault, and what the monitor costs."""
    results: dict[str, Any] = {"settings": asdict(settings)}
    if settings.seeds:
        tokens, done = _tokens(), 0
        total = settings.seeds * (len(get_args(Fault)) + 2)

        def more() -> None:
            nonlocal done
            done += 1
            if on_more is not None:
                on_more(done, total)

        windows = [one for seed in range(settings.seeds) for one in windows_of(seed, settings, tokens, more)]
        calm = sum(one.fault is None for one in windows)
        results |= {"calm_windows": calm, "broken_windows": len(windows) - calm}
        results |= {"calm_steps": 2 * settings.seeds * settings.steps}
        results |= {"signals": with_intervals(windows), "faults": by_fault(windows)}
    return {**results, "cost": measure_cost(settings) if settings.rounds else None}


COSTS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "each_step": {"every": 1, "slow_every": 1},
    "with_sharpness": {},
}
"""The monitor at its defaults, with a reading of everything at each step, and at its defaults with the
critical sharpness, which takes up to seven forward passes at every slow reading."""


def measure_cost(settings: Settings) -> dict[str, Any]:
    """A step with the monitor over one without, and which signals it read."""
    torch.manual_seed(0)
    inputs = torch.randint(VOCAB, (settings.cost_rows, 128))
    steps, inside = {}, dict.fromkeys(COSTS, 0.0)
    read: dict[str, set[str]] = {name: set() for name in COSTS}
    for name in ("plain", *COSTS):
        model = GPT(layers=4, width=128, heads=4, vocab=VOCAB, context=128)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        monitor = None
        if name in COSTS:
            monitor = EarlyWarning(
                model,
                head="head",
                optimizer=optimizer,
                again=partial(loss_of, model, (inputs, inputs)) if name == "with_sharpness" else None,
                writer=lambda step, values, seen=read[name]: seen.update(values.keys() & SIGNALS.keys()),  # type: ignore[misc]
                **COSTS[name],
            )
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
            "not_read": sorted(SIGNALS.keys() - read[name]),
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


def batch_of(tokens: Tensor, generator: torch.Generator, narrow: bool) -> tuple[Tensor, Tensor]:
    """Rows at random places; `narrow` folds the classes."""
    starts = torch.randint(len(tokens) - CONTEXT - 1, (ROWS,), generator=generator)
    rows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts.tolist()])
    rows = rows % OLD if narrow else rows
    return rows[:, :-1], rows[:, 1:]


def monitors_table(results: Mapping[str, Any]) -> Table:
    """Each signal with its intervals."""
    title = f"Signals of a broken training; {FALSE:.0%} of calm windows pass a threshold"
    table = Table(title=title, title_justify="left")
    keys = ("area", "detected", "early", "gain_detected", "gain_early")
    for column in ("signal", *(key.replace("_", " ") for key in keys)):
        table.add_column(column, justify="left" if column == "signal" else "right")
    for name, row in results["signals"].items():
        cells = [(row[key]["value"], *row[key]["interval"]) for key in keys]
        table.add_row(name, *(f"{value:.2f} [{low:.2f}, {high:.2f}]" for value, low, high in cells))
    if (cost := results["cost"]) is not None:
        table.caption = f"a step with the monitor costs {number(cost['default']['median'], 3)}"
    return table


def main(settings: Annotated[Settings, tyro.conf.arg(name="")], json: Json = False) -> None:
    """Break small trainings in nine ways: what each signal detects at an equal rate of false alarms."""
    with work_progress("breaking small trainings: ten minutes or so") as on_more:
        results = bench_monitors(settings, on_more)
    if json or not settings.seeds:
        print_json(results)
        return
    out().print(monitors_table(results))


if __name__ == "__main__":
    tyro.cli(main)
