"""Does it help to respect a network's symmetries? Six ways to train on three tasks, with equal budgets.

Tasks are those of `optimizer_tasks.py`. All arms of a task see the same first weights, the same batches in
the same order and the same number of steps, with one schedule (a short warm-up, then a line down to zero).
The learning rate of each arm is the one with the least loss on unseen examples at the end (`memorise`: on
learnt ones), out of as many rates for every arm, on seed TUNING, which is not used again. Then come the seeds
0, 1, 2.

Equal terms for unequal optimizers, derived here:
- A tangential step of DDCAdam with `rms` is a part of the weights, Adam's is a number. A rescaled group gets
  the rate η/ρ, with ρ the root mean square of its first weights, so that first steps have Adam's size.
- Weight decay takes the same part κ of the weights from all arms, whatever their rate: λ = κ/η, and
  κ (1 - μ)/η for SGD with momentum μ. Tensors of translations have none, in any arm.
- DDCAdam differs from AdamW in two ways: it respects the gauges, and its steps grow and shrink with the
  weights. "AdamW, relative" has the second without the first: each rescaled tensor's rate is η times its
  norm over its first norm.

What is reported, over seeds, at the end of training:

    learnt, unseen, gap    cross-entropy in nats on either set, and their difference
    shift, rescale         how far the weights went along the orbits of translations, and of rescalings
    alignment, rates       whether a rate can be read along the trajectory

A rate is that of the bottom of a hidden layer. Between two linear maps with an activation between them, let h
be the activations that enter the second, and δ the gradients that reach the outputs of the first, for labels
drawn from the model itself:

    u          the right singular vector of H (n, h) of the least singular value;  t = σ_min(H) / σ_max(H)
    v          the same of the gradients' matrix (n, h)
    G          mean (δ · u)² over that of all directions: projected sample by sample
    alignment  |⟨u, v⟩|: 1 where activations and gradients vanish in one direction

and the rate is the slope of log G on log t over the trajectory (`geometry/rates.py`), with the least
alignment of all moments: G along a direction in which only H vanishes mixes powers. A unit that never fires
makes t zero; such moments are left out. u, v and this t are our choice for networks whose dead direction
nobody has set by hand; the conditions are those of §12.

A companion paper of "Dead Directions: Geometric Singular Learning" reports gaps of 0.67 and 5.88 for DDCAdam
and AdamW, in a setting that we do not know; this is no repetition of it.

Limits. Rates are tuned on one seed, and weight decay is not tuned for each arm: `modular`, `decay` and
`memorise` show how much the answer depends on it. Without decay, rates chosen by unseen examples are the
smallest ones for every arm, with which nothing is learnt; hence the other choice there.

Cost: about 25 minutes on one core for all tasks; gpt takes half of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from papers.dead_directions.equivariance import GOAL64, equivariance
from papers.dead_directions.kfac import KFAC
from papers.dead_directions.optimizer_tasks import TASKS, Task, losses, modular
from papers.dead_directions.shampoo import SOAP, Shampoo
from papers.outcome import Asked, Result, ResultTable, Row
from topograd.exec.z_loss import z_loss
from topograd.geometry.rates import Rate, fit_rate
from topograd.optim.ddc_adam import DDCAdam
from topograd.optim.gauges import Gauge
from topograd.optim.gauges.rescaling import Rescaling
from topograd.optim.gauges.translation import Translation

WARMUP, READINGS = 20, 12
ROWS = 1024
"""Predictions from which a rate is read."""
EVALUATED = 8192
"""Predictions on which a loss is measured, at most."""
MOMENTUM = 0.9
Z = 0.01
"""The coefficient of the z-loss."""
TUNING = 100
"""The seed on which learning rates are chosen."""
ADAM_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SGD_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
KFAC_RATES = (3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1)
"""Fisher lengths of a step, at most."""
FLOOR = 1e-12
"""Smaller t are rounding."""


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    base: Literal["adamw", "ddc", "sgd", "shampoo", "soap", "kfac"]
    z: float = 0.0
    retract: bool = False
    relative: bool = False
    """Rescaled tensors get steps in proportion to their norm, as they have in DDCAdam."""
    gauged: Literal["all", "rescalings", "shifts"] = "all"
    """The gauges that DDCAdam is told of."""
    decayed: Literal["all", "rescaled", "others"] = "all"
    """The tensors that decay, beside those of shifts, which never do."""
    norms_by_decay: bool = False
    """Norms of rescaled tensors follow decay alone: what a step adds to them is taken back."""

    @property
    def rates(self) -> tuple[float, ...]:
        """Learning rates to choose from; every arm has as many."""
        return {"sgd": SGD_RATES, "kfac": KFAC_RATES}.get(self.base, ADAM_RATES)

    def respects(self, gauge: Gauge) -> bool:
        """Whether the optimizer knows this gauge."""
        shift = isinstance(gauge, Translation)
        return self.base == "ddc" and self.gauged in ("all", "shifts" if shift else "rescalings")


ARMS = (
    Arm("AdamW", "adamw"),
    Arm("AdamW, relative", "adamw", relative=True),
    Arm("AdamW, z-loss", "adamw", z=Z),
    Arm("DDCAdam", "ddc"),
    Arm("DDCAdam, retract", "ddc", retract=True),
    Arm("SGD, momentum", "sgd"),
)


@dataclass(frozen=True)
class Outcome:
    """One run: what it reached, how far it drifted, what could be read, and its curves."""

    task: str
    arm: str
    seed: int
    lr: float
    learnt: float
    unseen: float
    accuracy: float
    shift: float
    rescale: float
    alignment: float
    slope: float | None
    refused: str | None
    curves: dict[str, list[float]]

    @property
    def gap(self) -> float:
        """Loss on unseen examples above the loss on learnt ones."""
        return self.unseen - self.learnt


def make_optimizer(arm: Arm, task: Task, model: nn.Module, lr: float) -> Optimizer:
    """The arm's optimizer: a group for each gauge and one for all else, with the same decay for all arms."""
    named = dict(model.named_parameters())
    covered = {name for gauge in task.gauges for name in gauge.names}
    groups = [_group(arm, task, lr, {name: named[name] for name in named if name not in covered}, None)]
    for gauge in task.gauges:
        tensors = {name: named[name] for name in gauge.names}
        if arm.relative and not isinstance(gauge, Translation):
            groups += [_group(arm, task, lr, {name: tensor}, gauge) for name, tensor in tensors.items()]
        else:
            groups.append(_group(arm, task, lr, tensors, gauge))
    groups = [group for group in groups if group["params"]]
    match arm.base:
        case "ddc":
            known = [gauge for gauge in task.gauges if arm.respects(gauge)]
            return DDCAdam(groups, known, rms=True, retract=arm.retract)
        case "sgd":
            return torch.optim.SGD(groups, momentum=MOMENTUM)
        case "shampoo":
            return Shampoo(groups)
        case "soap":
            return SOAP(groups)
        case "kfac":
            return KFAC(model, groups)
    return torch.optim.AdamW(groups)


def _group(
    arm: Arm, task: Task, lr: float, tensors: Mapping[str, Tensor], gauge: Gauge | None
) -> dict[str, Any]:
    """A param group; `first_rms` is what relative steps are relative to."""
    shift = isinstance(gauge, Translation)
    rescaled = gauge is not None and not shift
    size = rms(tensors.values()) if rescaled else 1.0
    rate = lr / size if gauge is not None and arm.respects(gauge) else lr
    shrink = task.shrink * (1 - MOMENTUM if arm.base == "sgd" else 1.0)
    if shift or arm.decayed == ("others" if rescaled else "rescaled"):
        shrink = 0.0
    first = size if arm.relative and rescaled else None
    return {"params": list(tensors.items()), "lr": rate, "weight_decay": shrink / rate, "first_rms": first}


def set_rates(groups: Sequence[dict[str, Any]], firsts: Sequence[tuple[float, float]], part: float) -> None:
    """Give the groups a part of their first rates; relative ones follow their size, and keep their decay."""
    for group, (rate, decay) in zip(groups, firsts, strict=True):
        grown = rms(group["params"]) / group["first_rms"] if group["first_rms"] else 1.0
        group["lr"], group["weight_decay"] = rate * part * grown, decay / grown


def rms(tensors: Iterable[Tensor]) -> float:
    """The root mean square over all numbers of some tensors."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return flat.square().mean().sqrt().item()


def schedule(step: int, steps: int) -> float:
    """The part of the learning rate at a step: up over WARMUP steps, down to zero at the end."""
    return min(1.0, (step + 1) / WARMUP) * (1 - step / steps)


def train(task: Task, arm: Arm, lr: float, seed: int, readings: int = READINGS) -> Outcome:
    """One run, measured `readings` times. Weights and batches come from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.build()
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    optimizer = make_optimizer(arm, task, model, lr)
    firsts = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    batches = torch.Generator().manual_seed(seed)
    wanted = {round(task.steps * (i + 1) / readings) for i in range(readings)}
    rows: list[dict[str, float]] = []
    for step in range(task.steps):
        set_rates(optimizer.param_groups, firsts, schedule(step, task.steps))
        optimizer.zero_grad()
        inputs, classes = _batch(task, batches)
        logits = model(inputs)
        (losses(logits, classes) + (z_loss(logits, arm.z) if arm.z else 0.0)).backward()
        with _norms_by_decay(task, model, optimizer) if arm.norms_by_decay else nullcontext():
            optimizer.step()
        if step + 1 in wanted:
            rows.append({"step": step + 1, **measure(task, model, start)})
            if not math.isfinite(rows[-1]["unseen"]):
                break
    return _outcome(task, arm, lr, seed, rows)


@contextmanager
def _norms_by_decay(task: Task, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Around a step: rescaled blocks end with the norm that decay alone would have left."""
    named = dict(model.named_parameters())
    gauges = [gauge for gauge in task.gauges if isinstance(gauge, Rescaling)]
    blocks = [named[piece.name] for gauge in gauges for block in gauge.blocks for piece in block]
    keep = {id(p): 1 - g["lr"] * g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    wanted = [keep[id(tensor)] * tensor.detach().norm() for tensor in blocks]
    yield
    with torch.no_grad():
        for tensor, norm in zip(blocks, wanted, strict=True):
            tensor.mul_(norm / tensor.norm())


def _batch(task: Task, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs, classes = task.learnt
    if task.batch >= len(inputs):
        return inputs, classes
    rows = torch.randint(len(inputs), (task.batch,), generator=generator)
    return inputs[rows], classes[rows]


@torch.no_grad()
def measure(task: Task, model: nn.Module, start: Mapping[str, Tensor]) -> dict[str, float]:
    """Losses, drift since the start, and what a rate is made of, at this moment."""
    named = {name: tensor.detach() for name, tensor in model.named_parameters()}
    learnt, _ = _losses(model, task.learnt)
    unseen, accuracy = _losses(model, task.unseen)
    drifts: dict[bool, list[float]] = {True: [0.0], False: [0.0]}
    for gauge in task.gauges:
        drifts[isinstance(gauge, Translation)].append(gauge.drift(start, named))
    result = {"learnt": learnt, "unseen": unseen, "accuracy": accuracy}
    result |= {"shift": math.hypot(*drifts[True]), "rescale": math.hypot(*drifts[False])}
    if not math.isfinite(learnt + unseen):  # it diverged
        return result | asdict(Moment(0.0, 0.0, 0.0))
    return result | asdict(read_moment(model, task.pair, _first(task.learnt, ROWS)[0]))


def _first(data: tuple[Tensor, Tensor], predictions: int) -> tuple[Tensor, Tensor]:
    """The first examples, as many as make this number of predictions."""
    inputs, classes = data
    many = max(1, predictions * len(classes) // classes.numel())
    return inputs[:many], classes[:many]


def _losses(model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Mean loss and the share of right answers."""
    inputs, classes = _first(data, EVALUATED)
    logits = torch.cat([model(part) for part in inputs.split(256)])
    return losses(logits, classes).item(), (logits.argmax(-1) == classes).double().mean().item()


def _outcome(task: Task, arm: Arm, lr: float, seed: int, rows: Sequence[Mapping[str, float]]) -> Outcome:
    last = rows[-1]
    rate = readable([Moment(row["t"], row["G"], row["alignment"]) for row in rows])
    curves = {key: [row[key] for row in rows] for key in last}
    return Outcome(
        task=task.name,
        arm=arm.name,
        seed=seed,
        lr=lr,
        learnt=last["learnt"],
        unseen=last["unseen"],
        accuracy=last["accuracy"],
        shift=last["shift"],
        rescale=last["rescale"],
        alignment=min(row["alignment"] for row in rows),
        slope=rate.slope,
        refused=rate.refused,
        curves=curves,
    )


@dataclass(frozen=True)
class Moment:
    """t, G along the activations' bottom, and the alignment of the two bottoms."""

    t: float
    G: float
    alignment: float


def read_moment(model: nn.Module, pair: tuple[str, str], inputs: Tensor) -> Moment:
    """What the layer between two maps says now, on some inputs, with the model's own labels."""
    first, second = (model.get_submodule(name) for name in pair)
    seen: dict[str, Tensor] = {}
    hooks = [
        first.register_forward_hook(lambda module, given, out: seen.__setitem__("z", out)),
        second.register_forward_hook(lambda module, given, out: seen.__setitem__("h", given[0])),
    ]
    try:
        with torch.enable_grad():
            logits = model(inputs).flatten(0, -2)
            generator = torch.Generator(logits.device).manual_seed(0)
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(1)
            (delta,) = torch.autograd.grad(
                nn.functional.cross_entropy(logits, drawn, reduction="sum"), seen["z"]
            )
    finally:
        for hook in hooks:
            hook.remove()
    return _moment(seen["h"].detach().flatten(0, -2), delta.flatten(0, -2))


def _moment(H: Tensor, delta: Tensor) -> Moment:
    H, delta = H.double(), delta.double()
    _, activations, right = torch.linalg.svd(H, full_matrices=False)
    u, v = right[-1], torch.linalg.svd(delta, full_matrices=False).Vh[-1]
    G = (delta @ u).square().mean() / delta.square().sum(1).mean()
    return Moment((activations[-1] / activations[0]).item(), G.item(), (u @ v).abs().clamp(max=1).item())


def readable(moments: Sequence[Moment]) -> Rate:
    """The rate over a trajectory, or why there is none."""
    held = {moment.t: moment for moment in moments if moment.t > FLOOR}
    alignment = min(moment.alignment for moment in moments)
    t, values = (list(held), [moment.G for moment in held.values()]) if held else ([1.0], [0.0])
    return fit_rate(
        t,
        values,
        estimator="Fisher, one draw of the labels",
        noise="noisy",
        alignment_error=math.tan(math.acos(min(alignment, 1.0))),
    )


def tune(
    task: Task, arm: Arm, seed: int = TUNING, rates: Sequence[float] | None = None
) -> tuple[float, dict[float, float]]:
    """The rate with the least loss on the task's choice of examples, and all losses; what diverges is inf."""
    tried = {}
    for lr in arm.rates if rates is None else rates:
        run = train(task, arm, lr, seed, readings=1)
        loss = run.unseen if task.tuned_on == "unseen" else run.learnt
        tried[lr] = loss if math.isfinite(loss) else math.inf
    return min(tried, key=lambda lr: tried[lr]), tried


def run(args: Asked) -> Result:
    """Every arm on every task; with the preset tiny, on one small task."""
    tiny, seeds = args.preset == "tiny", args.seeds
    tasks = [modular(p=7, hidden=16)] if tiny else [make() for make in TASKS.values()]
    tasks = [replace(task, steps=steps) for task, steps in zip(tasks, args.parts("steps"), strict=True)]
    done, by_task = 0, []
    for task in tasks:
        result: dict[str, Any] = {"task": task.name, "tried": {}, "runs": []}
        for arm in ARMS:
            key = {"task": task.name, "arm": arm.name, "seeds": seeds}
            compared = args.kept.row(key, partial(_compared, task, arm, seeds))
            result["tried"][arm.name] = {float(lr): loss for lr, loss in compared["tried"].items()}
            result["runs"] += compared["runs"]
            done += 1
            args.on_more(done, len(tasks) * len(ARMS))
        by_task.append(result)
    return Result(
        setting=(
            f"Tasks: {', '.join(task.name for task in tasks)}. All arms of a task see the same first "
            "weights, batches and number of steps; each has the best of as many learning rates."
        ),
        rows=[
            {k: v for k, v in one.items() if k != "curves"} for result in by_task for one in result["runs"]
        ],
        tables=tuple(table(result) for result in by_task),
        seeds=seeds,
        record={
            "arms": [arm.name for arm in ARMS],
            "by_task": by_task,
            "equivariance": {**equivariance(5 if tiny else 200), "goal": GOAL64},
        },
    )


def _compared(task: Task, arm: Arm, seeds: int) -> Row:
    tried, runs = compare(task, arm, seeds)
    return {"tried": tried, "runs": [{**asdict(one), "gap": one.gap} for one in runs]}


def compare(task: Task, arm: Arm, seeds: int) -> tuple[dict[float, float], list[Outcome]]:
    """An arm on a task: the losses of the rates that were tried, and its runs with the best of them."""
    lr, tried = tune(task, arm)
    return tried, [train(task, arm, lr, seed) for seed in range(seeds)]


COLUMNS = ("learnt", "unseen", "gap", "accuracy", "shift", "rescale", "alignment")


def table(result: Mapping[str, Any]) -> ResultTable:
    """Mean ± standard deviation over seeds for each arm; a rate counts where it was not refused."""
    rows = []
    for arm, tried in result["tried"].items():
        runs = [run for run in result["runs"] if run["arm"] == arm]
        lr = runs[0]["lr"]
        edge = "*" if lr in (min(tried), max(tried)) else ""
        cells = [_spread([run[column] for run in runs]) for column in COLUMNS]
        read = sum(run["refused"] is None for run in runs)
        rows.append((arm, f"{lr:g}{edge}", *cells, f"{read}/{len(runs)}"))
    caption = (
        f"{result['task']}: cross-entropy in nats, mean ± standard deviation over seeds; "
        "* is an end of the rates that were tried"
    )
    return ResultTable(caption, ("arm", "lr", *COLUMNS, "rates"), tuple(rows))


def _spread(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    return f"{mean:.3g} ± {statistics.stdev(values):.1g}" if len(values) > 1 else f"{mean:.3g}"
