"""Batches of images: every image once an epoch, and the same ones from any place."""

from pathlib import Path

import pytest
import torch

from raising import refused
from topograd.data.images import ImageLoader, ImageSet, read_images
from topograd.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return ImageSet(torch.arange(10, dtype=torch.uint8).reshape(10, 1, 1, 1), torch.arange(10))


def test_an_epoch_has_every_image_once(images: ImageSet) -> None:
    loader = ImageLoader(images, 4, 0)
    labels = torch.cat([next(loader)[1] for _ in range(5)])
    assert sorted(labels[:10].tolist()) == list(range(10))
    assert sorted(labels[10:].tolist()) == list(range(10))
    assert labels[:10].tolist() != labels[10:].tolist()


def test_images_and_labels_stay_together(idx_folder: Path) -> None:
    data = read_images(idx_folder)
    images, labels = next(ImageLoader(data.train, 32, 3))
    known = {
        image.numpy().tobytes(): label
        for image, label in zip(data.train.images, data.train.labels.tolist(), strict=True)
    }
    assert [known[image.numpy().tobytes()] for image in images] == labels.tolist()


def test_a_loader_goes_on_from_any_place(images: ImageSet) -> None:
    loader = ImageLoader(images, 3, 7)
    for _ in range(4):
        next(loader)
    other = ImageLoader(images, 3, 7)
    other.seek(loader.position)
    assert torch.equal(next(loader)[1], next(other)[1])


def test_bad_settings_and_places_are_refused(images: ImageSet) -> None:
    with pytest.raises(ConfigError):
        ImageLoader(images, 0, 0)
    with refused(DataError, setting="images"):
        ImageLoader(images.chosen(torch.arange(0)), 2, 0)
    for place in ({"epoch": 0}, {"epoch": 0, "row": 11}, {"epoch": -1, "row": 0}):
        with refused(DataError, setting="position"):
            ImageLoader(images, 2, 0).seek(place)
