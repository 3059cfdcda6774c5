"""Continual learning: tasks of two classes, one after another, by seven methods and one that forgets nothing.

What is asked ("Product of Experts" A.3, on Split-CIFAR-10): PoE + KD keeps 2.1 times EWC's accuracy (41.2 %
to 19.5 %), and shrinkage that is added when it predicts gains 4.3 points more. Here: the paper's four
methods, with LwF, replay, and specialists on a frozen base with a router, on split digits, MNIST or
Fashion-MNIST, class- and domain-incremental (`continual_tasks.py`). The network is an MLP; the paper's is not
named.

The strength of ewc, lwf and poe-kd (and the rate, where a preset has several) is chosen for each method and
scenario on a seed that is not reported, by the average accuracy on pictures held out of the tasks' training.
Every method has the same steps for each task. Cost: about a second for a method, a scenario and a seed on
digits, ten on MNIST. Limits: tasks are known while they are learned, and the choice of a strength sees all
tasks at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.product_of_experts.continual_methods import METHODS, STRENGTHS, Sizes
from papers.product_of_experts.continual_tasks import (
    SCENARIOS,
    Scenario,
    TaskData,
    accuracies,
    average,
    for_tuning,
    forgetting,
    split,
    transfer,
)
from papers.verdicts import Claim, above
from topograd.data.images import DIGITS, ImageData, read_images
from topograd.nn.images.config import ImageConfig

TUNING_SEED = 1000
PAPER: Mapping[str, str] = {"finetune": "19.4", "ewc": "19.5", "poe-kd": "41.2", "poe-shrink": "45.5"}
"""Average accuracies of the paper, on Split-CIFAR-10."""
NAMES = ("finetune", "ewc", "lwf", "replay", "poe-kd", "poe-shrink", "specialists", "joint")


@dataclass(frozen=True)
class Scale:
    """How large a preset is."""

    batch: int
    pictures: int | None
    rates: tuple[float, ...]
    """What is tried; the first is taken where nothing is tuned."""
    tuned: bool = False
    """Whether rate and strength are chosen on another seed."""
    widths: tuple[int, ...] = ()
    steps: int = 0
    seeds: int = 0
    """These three are what was asked for (`presets.py`)."""


PRESETS: Mapping[str, Scale] = {
    "tiny": Scale(batch=32, pictures=40, rates=(0.003,)),
    "small": Scale(batch=64, pictures=2000, rates=(0.001,), tuned=True),
}


def run(args: Asked) -> Result:
    """Every method with every seed in both scenarios."""
    scale = replace(PRESETS[args.preset], widths=args.parts("width"), steps=args.steps, seeds=args.seeds)
    seeds, data, on_more = scale.seeds, args.data, args.on_more
    check_seeds(seeds)
    pictures = read_images(data or DIGITS)
    total = len(SCENARIOS) * len(METHODS) * (seeds + scale.tuned)
    done = iter(range(1, total + 1))
    rows: list[Row] = []
    for scenario in SCENARIOS:
        tasks = split(pictures, scenario, scale.pictures)
        for method in METHODS:
            place = {"scenario": scenario, "method": method}
            tune = partial(_tuned, method, scenario, tasks, pictures, scale)
            chosen = args.kept.row(place, tune)
            if scale.tuned:
                on_more(next(done), total)
            sizes = _sizes(pictures, scenario, scale, chosen["rate"], chosen["strength"])
            for seed in range(seeds):
                make = partial(learn, method, scenario, tasks, sizes, seed)
                rows += args.kept.rows({**place, "seed": seed}, make)
                on_more(next(done), total)
    claims = _claims(rows)
    return Result(
        setting=_setting(data, pictures, scale),
        rows=rows,
        tables=tuple(_table(rows, scenario) for scenario in SCENARIOS),
        findings=tuple(_findings(rows)),
        claims=claims,
        seeds=seeds,
        record={"scale": asdict(scale)},
    )


def learn(method: str, scenario: Scenario, tasks: list[TaskData], sizes: Sizes, seed: int) -> list[Row]:
    """All tasks in turn: a row for each way in which the method's network predicts."""
    learner = METHODS[method](sizes, seed)
    untrained = accuracies(learner.predict, tasks)
    matrices: dict[str, list[list[float]]] = {}
    for task in tasks:
        learner.learn(task)
        for name, predict in learner.predictors().items():
            matrices.setdefault(name or method, []).append(accuracies(predict, tasks))
    return [
        {
            "method": name,
            "scenario": scenario,
            "seed": seed,
            "accuracy": average(matrix),
            "forgetting": forgetting(matrix),
            "transfer": transfer(matrix, untrained),
            "memory": learner.memory(),
            "rate": sizes.rate,
            "strength": sizes.strength if method in STRENGTHS else None,
            "matrix": matrix,
        }
        for name, matrix in matrices.items()
    ]


def _sizes(pictures: ImageData, scenario: Scenario, scale: Scale, rate: float, strength: float) -> Sizes:
    mean, std = pictures.statistics()
    classes = pictures.classes if scenario == "class" else 2
    network = ImageConfig(widths=scale.widths, shape=pictures.shape, classes=classes, mean=mean, std=std)
    return Sizes(network=network, steps=scale.steps, batch=scale.batch, rate=rate, strength=strength)


def _candidates(method: str, scale: Scale) -> Iterator[tuple[float, float]]:
    return product(scale.rates, STRENGTHS.get(method, (0.5,)))


def _tuned(
    method: str,
    scenario: Scenario,
    tasks: list[TaskData],
    pictures: ImageData,
    scale: Scale,
) -> Row:
    """Rate and strength with the best average accuracy on pictures held out of the tasks' training."""
    if not scale.tuned:
        return {"rate": scale.rates[0], "strength": STRENGTHS.get(method, (0.5,))[0]}
    result: dict[tuple[float, float], float] = {}
    for candidate in _candidates(method, scale):
        sizes = _sizes(pictures, scenario, scale, *candidate)
        result[candidate] = learn(method, scenario, for_tuning(tasks), sizes, TUNING_SEED)[0]["accuracy"]
    rate, strength = max(result, key=lambda c: result[c])
    return {"rate": rate, "strength": strength}


def _of(rows: list[Row], scenario: str, method: str, key: str = "accuracy") -> list[float]:
    return [row[key] for row in rows if (row["scenario"], row["method"]) == (scenario, method)]


def _claims(rows: list[Row]) -> tuple[Claim, ...]:
    """What the paper's table says, judged in the scenario that it has: class-incremental."""

    def difference(a: str, b: str) -> list[float]:
        pairs = zip(_of(rows, "class", a), _of(rows, "class", b), strict=True)
        return [x - y for x, y in pairs]

    return (
        above(
            "poe-kd over ewc",
            "PoE + KD keeps more than EWC (2.1 times in the paper)",
            "the average accuracy of poe-kd minus that of ewc, class-incremental,",
            difference("poe-kd", "ewc"),
        ),
        above(
            "shrinkage gains",
            "retroactive shrinkage adds to PoE + KD (4.3 points in the paper)",
            "the average accuracy of poe-shrink minus that of poe-kd, class-incremental,",
            difference("poe-shrink", "poe-kd"),
        ),
        above(
            "stages or distillation",
            "stages keep more than backprop with the same distillation; the paper does not compare",
            "the average accuracy of poe-kd minus that of lwf, class-incremental,",
            difference("poe-kd", "lwf"),
        ),
    )


def _findings(rows: list[Row]) -> Iterator[str]:
    for scenario in SCENARIOS:
        kd, ewc = (statistics.fmean(_of(rows, scenario, m)) for m in ("poe-kd", "ewc"))
        yield (
            f"{scenario}-incremental: poe-kd has {100 * kd:.1f} %, {kd / max(ewc, 1e-9):.2f} times ewc's "
            f"{100 * ewc:.1f} %."
        )


def _table(rows: list[Row], scenario: Scenario) -> ResultTable:
    cells = []
    for method in NAMES:
        accuracy = _of(rows, scenario, method)
        if not accuracy:
            continue
        spread = f" ± {100 * statistics.stdev(accuracy):.1f}" if len(accuracy) > 1 else ""
        lost, ahead, retained = (
            statistics.fmean(_of(rows, scenario, method, key)) for key in ("forgetting", "transfer", "memory")
        )
        cells.append(
            (
                method,
                f"{100 * statistics.fmean(accuracy):.1f}{spread}",
                f"{100 * lost:.1f}",
                f"{100 * ahead:+.1f}",
                f"{retained / 1024:.0f}",
                PAPER.get(method, "–") if scenario == "class" else "–",
            )
        )
    header = ("method", "accuracy, %", "forgetting", "forward transfer", "memory, KiB", "paper (CIFAR-10)")
    return ResultTable(f"{scenario}-incremental", header, tuple(cells))


def _setting(data: str | None, pictures: ImageData, scale: Scale) -> str:
    name = "scikit-learn's digits" if data in (None, DIGITS) else str(data).rstrip("/").rpartition("/")[2]
    widths = "-".join(map(str, scale.widths))
    return (
        f"Split {name}, tasks of two classes, an MLP of widths {widths}, {scale.steps} steps of "
        f"{scale.batch} "
        f"for each task, strengths chosen for each method."
    )
