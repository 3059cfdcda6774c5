"""Tasks that come one after another, made of one set of pictures, and what is measured on them.

The classes are shared out in pairs, in order: 0 and 1, 2 and 3, and so on. Two scenarios (van de Ven and
Tolias 2019), in neither of which a network is told which task a picture is of:

    class    class-incremental: name the class among all classes
    domain   domain-incremental: say whether it is the first or the second of its pair

After each task, a_ij is the accuracy on task j's held-out pictures after task i has been learned:

    accuracy     (1/T) Σ_j a_Tj
    forgetting   (1/(T-1)) Σ_{j<T} max_{i<T} a_ij - a_Tj
    transfer     (1/(T-1)) Σ_{j>1} a_{j-1,j} - b_j,   b_j what the untrained network has: forward transfer

Source: "Product of Experts" A.3; Lopez-Paz and Ranzato 2017 for the measures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from topograd.data.images import ImageData, ImageSet
from topograd.errors import DataError

Scenario = Literal["class", "domain"]
SCENARIOS: tuple[Scenario, ...] = ("class", "domain")
Predict = Callable[[Tensor], Tensor]
"""ImageSet to the numbers of the classes that a network names."""


@dataclass(frozen=True)
class TaskData:
    """One task: its pictures, with the labels that the scenario asks for."""

    classes: tuple[int, ...]
    train: ImageSet
    test: ImageSet


def split(data: ImageData, scenario: Scenario, most: int | None = None) -> list[TaskData]:
    """The tasks of some pictures; at most `most` of them to learn from in each, and half as many to judge
    by."""
    if data.classes < 4:
        raise DataError(
            f"there are {data.classes} classes",
            setting="data",
            given=data.classes,
            remedy="tasks of two need at least 4 classes",
        )
    tasks = []
    for first in range(0, data.classes - 1, 2):
        classes = (first, first + 1)
        parts = [_only(part, classes, scenario) for part in (data.train, data.test)]
        if most is not None:
            parts = [parts[0].sample(most), parts[1].sample(max(most // 2, 1))]
        tasks.append(TaskData(classes, *parts))
    return tasks


def for_tuning(tasks: Sequence[TaskData], every: int = 5) -> list[TaskData]:
    """The same tasks judged by one in `every` of their pictures to learn from, which are not learned from."""
    return [TaskData(task.classes, *task.train.held_out(every)) for task in tasks]


def _only(pictures: ImageSet, classes: tuple[int, ...], scenario: Scenario) -> ImageSet:
    rows = torch.isin(pictures.labels, torch.tensor(classes)).nonzero().flatten()
    chosen = pictures.chosen(rows)
    return chosen if scenario == "class" else ImageSet(chosen.images, chosen.labels - classes[0])


def batches(pictures: ImageSet, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches in an order that the seed decides."""
    from topograd.data.images import ImageLoader

    return ImageLoader(pictures, min(size, len(pictures)), seed)


@torch.no_grad()
def accuracies(predict: Predict, tasks: Sequence[TaskData]) -> list[float]:
    """The accuracy on each task's held-out pictures."""
    return [(predict(task.test.images) == task.test.labels).double().mean().item() for task in tasks]


def average(matrix: Sequence[Sequence[float]]) -> float:
    """The mean accuracy over all tasks when the last has been learned."""
    return statistics.fmean(matrix[-1])


def forgetting(matrix: Sequence[Sequence[float]]) -> float:
    """What was lost of each earlier task's best accuracy, on average.

    >>> forgetting([[0.9, 0.1], [0.4, 0.8]])
    0.5
    """
    before = matrix[:-1]
    return statistics.fmean(max(row[j] for row in before[j:]) - matrix[-1][j] for j in range(len(matrix) - 1))


def transfer(matrix: Sequence[Sequence[float]], untrained: Sequence[float]) -> float:
    """What a task gains from those before it, before it is learned itself."""
    return statistics.fmean(matrix[j - 1][j] - untrained[j] for j in range(1, len(matrix)))
