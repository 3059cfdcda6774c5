"""Splits and measures of continual learning, by hand."""

from pathlib import Path

import pytest
import torch

from papers.product_of_experts.continual_tasks import accuracies, average, forgetting, split, transfer
from raising import refused
from topograd.data.images import ImageData, ImageSet, read_images
from topograd.errors import DataError

MATRIX = [[0.9, 0.0, 0.0], [0.5, 0.8, 0.1], [0.7, 0.6, 0.9]]


def test_measures() -> None:
    assert average(MATRIX) == pytest.approx((0.7 + 0.6 + 0.9) / 3)
    assert forgetting(MATRIX) == pytest.approx(((0.9 - 0.7) + (0.8 - 0.6)) / 2)
    assert transfer(MATRIX, [0.1, 0.2, 0.3]) == pytest.approx(((0.0 - 0.2) + (0.1 - 0.3)) / 2)


def test_tasks_have_two_classes_each() -> None:
    labels = torch.arange(40) % 4
    pictures = ImageSet(labels.to(torch.uint8).reshape(40, 1, 1, 1), labels)
    data = ImageData(pictures, pictures, 4, "")
    by_class, by_domain = split(data, "class"), split(data, "domain")
    assert [task.train.labels.unique().tolist() for task in by_class] == [[0, 1], [2, 3]]
    assert [task.train.labels.unique().tolist() for task in by_domain] == [[0, 1], [0, 1]]
    assert torch.equal(by_domain[1].test.images.flatten() - 2, by_domain[1].test.labels)
    assert len(split(data, "class", most=6)[0].train) == 6
    assert accuracies(lambda images: images.flatten().long(), by_class) == [1.0, 1.0]
    assert accuracies(lambda images: images.flatten().long(), by_domain) == [1.0, 0.0]


def test_too_few_classes_are_refused(idx_folder: Path) -> None:
    with refused(DataError, setting="data", given=3):
        split(read_images(idx_folder), "class")
