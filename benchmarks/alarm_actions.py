"""How many broken trainings an action on alarms mends.

    python benchmarks/alarm_actions.py [--seeds 4] [--steps 300] [--json]

Trainings and faults of `benchmarks/monitors.py`, from `fault_at` on, in a loop with a `Guard`: learning_rate
and bad_batch, which end by themselves; logits, which is stopped after `GROWN` steps; label_noise, which lasts
to the end, so that no action on a step can mend it: the control. Two more are of one step each, as of a bad
shard or a flipped bit:

    huge_batch       one batch whose loss is multiplied by 1000
    flipped_bit      one weight of the head becomes 1e4 after a step

    mended           trainings whose held-out loss at the end is at most `WITHIN` times that of the twin
                     without a fault; `report`, where nothing is done, is what an action must beat
    calm             the same of trainings without a fault: what the action costs where nothing is wrong

The held-out loss is the mean of the last `LAST` steps. Source: the benchmark is ours.
Limits. Small models, one corpus, one optimizer, a plain loop.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
import tyro
from rich.table import Table
from torch import Tensor

from monitors import Training, _tokens, batch_of, disturb, loss_of, spoiled
from topograd.cli.console import Json, out, print_json
from topograd.errors import DivergenceError
from topograd.geometry.monitors.early_warning import EarlyWarning
from topograd.geometry.monitors.guard import ACTING, Guard, OnAlarm
from topograd.limits import REPEATS, check_numbers

WITHIN = 1.01
LAST = 10
GROWN = 20
FAULTS = ("learning_rate", "bad_batch", "logits", "label_noise")
SINGLE = ("huge_batch", "flipped_bit")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How many trainings are broken, and when."""

    seeds: int = 4
    """Trainings of each fault and action, with a twin each."""
    steps: int = 300
    """Steps of a training."""
    fault_at: int = 140
    """The step at which a fault begins."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, seeds=REPEATS, steps=REPEATS, fault_at=REPEATS)


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """One record for each fault and seed: the end of the twin, and of each action."""
    tokens = _tokens()
    for seed in range(settings.seeds):
        twin = end_of(tokens, settings, seed, None, "report")[0]
        for fault in (None, *FAULTS, *SINGLE):
            record: dict[str, Any] = {"fault": fault or "calm", "seed": seed, "twin": twin}
            for action in get_args(OnAlarm):
                loss, alarms = end_of(tokens, settings, seed, fault, action)
                record[action] = {"loss": loss, "alarms": alarms, "mended": loss <= WITHIN * twin}
            yield record


def end_of(
    tokens: Tensor, settings: Settings, seed: int, fault: str | None, action: OnAlarm
) -> tuple[float, int]:
    """The held-out loss at the end of one training, and how many actions there were."""
    training = Training(seed, narrow=False)
    model, optimizer = training.model, training.optimizer
    held = batch_of(tokens, torch.Generator().manual_seed(10_000), narrow=False)
    noise = torch.Generator().manual_seed(seed)  # so that later batches are those of the twin
    monitor = EarlyWarning(model, head="head", optimizer=optimizer, signals=ACTING)
    guard = Guard(monitor, action, model, optimizer, keep_every=10)
    losses = []
    with monitor:
        for step in range(settings.steps):
            since = step - settings.fault_at
            batch = batch_of(tokens, training.generator, narrow=False)
            if fault in FAULTS and since >= 0 and not (fault == "logits" and since >= GROWN):
                batch = spoiled(fault, since, *batch, noise)
                disturb(fault, since, model, optimizer, noise)
            loss = loss_of(model, batch)
            loss = loss * 1000 if fault == "huge_batch" and since == 0 else loss
            optimizer.zero_grad()
            loss.backward()
            try:
                taken = guard.allows(step, loss)
            except DivergenceError:
                return float("inf"), len(guard.actions)
            if taken:
                optimizer.step()
            if fault == "flipped_bit" and since == 0:
                model.head.weight.data[0, 0] = 1e4
            if step >= settings.steps - LAST:
                with torch.no_grad():
                    losses.append(float(loss_of(model, held)))
    return sum(losses) / len(losses), len(guard.actions)


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Mended trainings by fault and action, and over the faults."""
    faults = list(dict.fromkeys(record["fault"] for record in records))
    by_fault = {
        fault: {
            action: sum(record[action]["mended"] for record in records if record["fault"] == fault)
            for action in get_args(OnAlarm)
        }
        for fault in faults
    }
    broken = [fault for fault in faults if fault != "calm"]
    total = {action: sum(by_fault[fault][action] for fault in broken) for action in get_args(OnAlarm)}
    return {"by_fault": by_fault, "mended": total, "broken": sum(r["fault"] != "calm" for r in records)}


def main() -> int:
    settings = tyro.cli(Settings, description=__doc__)
    records = []
    for record in measure(settings):
        records.append(record)
        print(record, file=sys.stderr, flush=True)
    results = {"settings": asdict(settings), **summary(records), "records": records}
    if settings.json:
        print_json(results)
        return 0
    table = Table(title=f"trainings that end within 1 %, of {settings.seeds}", title_justify="left")
    for column in ("fault", *get_args(OnAlarm)):
        table.add_column(column)
    for fault, counts in results["by_fault"].items():
        table.add_row(fault, *(str(counts[action]) for action in get_args(OnAlarm)))
    out().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
