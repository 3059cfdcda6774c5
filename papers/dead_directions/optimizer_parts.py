"""Which part of DDCAdam helps on modular addition? And what do Shampoo, SOAP and K-FAC do on the cheap tasks?

`optimizer_comparison.py` finds that DDCAdam generalises on modular addition where AdamW is halfway there.
DDCAdam differs from AdamW in several ways at once, and each arm here has one of them less, or more:

    rescaling alone, shift alone       DDCAdam is told of one gauge: that of the MLP, or of the output bias
    norms by decay alone               what a step adds to the norms of the MLP is taken back (AdamW: too)
    decay on the MLP alone, elsewhere  the tensors that decay (AdamW: too)
    AdamW, relative                    steps in proportion to the norm, and nothing else of DDCAdam

Decay in the lifted coordinates is no arm of its own: ρ W for both blocks and their bias moves the log-norms
by log ρ each, which is the radial coordinate alone, and leaves every invariant direction. So decoupled decay
in raw and in lifted coordinates is the same step for this gauge, by algebra.

Shampoo, SOAP and K-FAC (`shampoo.py`, `kfac.py`) run on the same task and on digits. All arms
have the same first weights, batches, steps, schedule and decay, as there. AdamW and DDCAdam have the rates
that the comparison chose out of six, and a part has that of the optimizer it is a part of, so that nothing
else changes; of DDCAdam with the shift alone all but a bias is AdamW, and so is its rate. Peers take the best
of three rates for unseen examples on a seed that is not used again.

    gain    log10 of AdamW's loss on unseen examples over the arm's, by seed: 1 is ten times less

What part of DDCAdam's gain an arm keeps is its gain over DDCAdam's, both means over seeds.
Cost: a training of `modular` takes six seconds of one core, one of `digits` two.
Limits. A part at its own best rate might keep more; one size of the task; decay is that of the comparison.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from papers.dead_directions.optimizer_comparison import Arm, train, tune
from papers.dead_directions.optimizer_tasks import Task, digits, modular
from papers.outcome import Asked, Result, ResultTable, Row
from papers.verdicts import Claim, Drawing, Interval, Series, above

PEERS = (Arm("Shampoo", "shampoo"), Arm("SOAP", "soap"), Arm("K-FAC", "kfac"))
BOTH = (Arm("AdamW", "adamw"), Arm("DDCAdam", "ddc"))
PARTS = (
    Arm("DDCAdam, rescaling alone", "ddc", gauged="rescalings"),
    Arm("DDCAdam, shift alone", "ddc", gauged="shifts"),
    Arm("DDCAdam, norms by decay alone", "ddc", norms_by_decay=True),
    Arm("AdamW, norms by decay alone", "adamw", norms_by_decay=True),
    Arm("DDCAdam, decay on the MLP alone", "ddc", decayed="rescaled"),
    Arm("AdamW, decay on the MLP alone", "adamw", decayed="rescaled"),
    Arm("DDCAdam, decay elsewhere", "ddc", decayed="others"),
    Arm("AdamW, decay elsewhere", "adamw", decayed="others"),
    Arm("AdamW, relative", "adamw", relative=True),
)
CHOSEN = {
    "modular": {"adamw": 1e-2, "ddc": 1e-3},
    "digits": {"adamw": 3e-3, "ddc": 3e-4},
}
"""The comparison's rates, by task and base."""
TRIED = {"shampoo": (3e-3, 1e-2, 3e-2), "soap": (3e-3, 1e-2, 3e-2), "kfac": (1e-3, 3e-3, 1e-2)}
"""Rates of peers."""


def arms_of(task: Task) -> tuple[Arm, ...]:
    """Parts on modular addition, where there is a gain to take apart; peers everywhere."""
    return (*BOTH, *PARTS, *PEERS) if task.name == "modular" else (*BOTH, *PEERS)


def run(args: Asked) -> Result:
    """Every arm on both tasks, the seeds of all arms one after another."""
    tiny = args.preset == "tiny"
    tasks = [modular(p=7, hidden=16), digits(hidden=8)] if tiny else [modular(), digits()]
    tasks = [replace(task, steps=steps) for task, steps in zip(tasks, args.parts("steps"), strict=True)]
    total = sum(len(PEERS) + len(arms_of(task)) * args.seeds for task in tasks)
    done, rows = 0, []
    rates: dict[tuple[str, str], float] = {}
    for task in tasks:
        for arm in PEERS:
            key = {"task": task.name, "arm": arm.name}
            rates[task.name, arm.name] = args.kept.row(key, partial(_tuned, task, arm))["lr"]
            done += 1
            args.on_more(done, total)
    for seed in range(args.seeds):
        for task in tasks:
            for arm in arms_of(task):
                lr = rates.get((task.name, arm.name)) or chosen(task, arm)
                run: Row = {"task": task.name, "arm": arm.name, "seed": seed, "lr": lr}
                rows.append({**run, **args.kept.row(run, partial(_trained, task, arm, lr, seed))})
                done += 1
                args.on_more(done, total)
    judged = claims(rows)
    return Result(
        setting=f"Modular addition and digits, {args.seeds} seeds; every arm with the same first weights, "
        "batches, steps and decay, parts with the rate of their optimizer, peers with the best of three.",
        rows=rows,
        tables=tuple(table(task.name, rows) for task in tasks),
        findings=tuple(findings(rows)),
        drawing=drawing(rows),
        claims=tuple(judged),
        seeds=args.seeds,
    )


def chosen(task: Task, arm: Arm) -> float:
    """The rate of the optimizer that an arm is a part of."""
    return CHOSEN[task.name]["adamw" if arm.gauged == "shifts" else arm.base]


def _tuned(task: Task, arm: Arm) -> Row:
    lr, tried = tune(task, arm, rates=TRIED[arm.base])
    return {"lr": lr, "tried": list(tried.values())}


def _trained(task: Task, arm: Arm, lr: float, seed: int) -> Row:
    result = train(task, arm, lr, seed, readings=1)
    return {"learnt": result.learnt, "unseen": result.unseen, "accuracy": result.accuracy}


def _unseen(rows: Sequence[Row], task: str, arm: str) -> list[float]:
    """By seed; what diverged is far away, not infinite."""
    results = [row for row in rows if (row["task"], row["arm"]) == (task, arm)]
    losses = [row["unseen"] for row in sorted(results, key=lambda row: row["seed"])]
    return [loss if math.isfinite(loss) else 1e3 for loss in losses]


def gains(rows: Sequence[Row], task: str, arm: str, over: str = "AdamW") -> list[float]:
    """log10 of another arm's loss over this one's, by seed."""
    pairs = zip(_unseen(rows, task, over), _unseen(rows, task, arm), strict=True)
    return [math.log10(other / own) for other, own in pairs]


def _names(rows: Sequence[Row], task: str) -> list[str]:
    return list(dict.fromkeys(row["arm"] for row in rows if row["task"] == task))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """DDCAdam's gain, which parts of it have a gain of their own, and DDCAdam against the peers."""
    message = "DDCAdam generalises better because its steps do not depend on the gauge."
    judged = []
    for arm in ("DDCAdam", "DDCAdam, rescaling alone", "DDCAdam, shift alone", "AdamW, relative"):
        name, effect = f"modular: {arm} gains on AdamW", f"{arm}'s gain, log10 of losses on unseen examples,"
        judged.append(above(name, message, effect, gains(rows, "modular", arm)))
    for task in ("modular", "digits"):
        for peer in PEERS:
            effect = f"log10 of {peer.name}'s loss on unseen examples over DDCAdam's"
            values = gains(rows, task, "DDCAdam", peer.name)
            judged.append(above(f"{task}: DDCAdam is ahead of {peer.name}", message, effect, values))
    return judged


def table(task: str, rows: Sequence[Row]) -> ResultTable:
    """One line for each arm: its rate, losses over seeds, and its gain over AdamW with an interval."""
    lines = []
    whole = statistics.fmean(gains(rows, task, "DDCAdam"))
    for arm in _names(rows, task):
        mine = [row for row in rows if (row["task"], row["arm"]) == (task, arm)]
        gain = gains(rows, task, arm)
        share = f"{statistics.fmean(gain) / whole:.2f}" if abs(whole) > 1e-9 else ""
        means = [statistics.fmean(row[key] for row in mine) for key in ("learnt", "unseen", "accuracy")]
        cells = (f"{mine[0]['lr']:g}", *(f"{mean:.3g}" for mean in means))
        lines.append((arm, *cells, str(Interval.of(gain)), share))
    caption = f"{task}: means over seeds; gain is log10 of AdamW's loss on unseen examples over the arm's"
    header = ("arm", "lr", "learnt", "unseen", "accuracy", "gain", "of DDCAdam's")
    return ResultTable(caption, header, tuple(lines))


def findings(rows: Sequence[Row]) -> list[str]:
    """How much of the gain each part keeps."""
    whole = statistics.fmean(gains(rows, "modular", "DDCAdam"))
    if whole <= 0:
        return ["DDCAdam has no gain over AdamW here, so that there is nothing to take apart."]
    retained = {arm.name: statistics.fmean(gains(rows, "modular", arm.name)) / whole for arm in PARTS}
    ordered = sorted(retained, key=lambda name: -retained[name])
    parts = "; ".join(f"{name} {retained[name]:.0%}" for name in ordered)
    return [f"Of DDCAdam's gain on modular addition ({whole:.2f} decades) these keep: {parts}."]


def drawing(rows: Sequence[Row]) -> Drawing:
    """Gains on modular addition, one place for each arm."""
    names = _names(rows, "modular")
    series = [Series.of(name, [i], [gains(rows, "modular", name)]) for i, name in enumerate(names)]
    return Drawing(
        "Modular addition taken apart", "arm", "log10 of AdamW's loss over the arm's", tuple(series)
    )
