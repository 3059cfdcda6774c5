"""Image data sets: IDX files, CIFAR's binary files, and scikit-learn's digits.

    …train…-images-idx3-ubyte[.gz], …train…-labels-idx1-ubyte[.gz]    IDX, grey images: MNIST and its kin
    …t10k…-images-idx3-ubyte[.gz], …t10k…-labels-idx1-ubyte[.gz]      held-out ones; t10k may be test
    data_batch_*.bin, test_batch.bin            CIFAR-10: a label and 3 × 32 × 32 bytes, again and again
    train.bin, test.bin                         CIFAR-100: two labels, of which the second counts
    digits                                      1,797 images of 8 × 8, of scikit-learn

An IDX file is 0, 0, 8 (unsigned bytes), the number of dimensions, each dimension in four bytes, highest
first, then the data. Nothing is downloaded and nothing is unpickled.

Images are (N, channels, height, width) in uint8, labels (N,) in int64 from 0. Everything is held in memory:
a byte for each number. Limits: at most `MAX_BYTES` of images in a file, `MAX_CLASSES` classes; a file
with more, or shorter or longer than its header says, raises DataError.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from topograd.data.loader import EpochLoader
from topograd.errors import DataError

DIGITS = "digits"
"""The name of scikit-learn's digits in place of a folder."""
MAX_BYTES = 2**32
MAX_CLASSES = 10_000
CIFAR = (3, 32, 32)
_TEST = ("t10k", "test")


@dataclass(frozen=True)
class ImageSet:
    """Images (N, channels, height, width), uint8, and their labels (N,), int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def chosen(self, indices: Tensor) -> ImageSet:
        """A subset, by indices or a boolean mask."""
        return ImageSet(self.images[indices], self.labels[indices])

    def sample(self, most: int) -> ImageSet:
        """At most this many, spaced evenly."""
        if len(self) <= most:
            return self
        return self.chosen(torch.arange(most) * len(self) // most)

    def held_out(self, every: int) -> tuple[ImageSet, ImageSet]:
        """All images but every `every`-th, and those."""
        held = torch.arange(len(self)) % every == every - 1
        return self.chosen(~held), self.chosen(held)


@dataclass(frozen=True)
class ImageData:
    """Training images and test images."""

    train: ImageSet
    test: ImageSet
    classes: int
    digest: str
    """SHA-256 of all images and labels."""
    skipped: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.train.shape

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and spread of each channel of the training images, on a scale from 0 to 1."""
        channels = self.train.images.shape[1]
        levels = torch.arange(256, dtype=torch.float64) / 255
        means, spreads = [], []
        for channel in range(channels):
            counts = torch.bincount(self.train.images[:, channel].flatten().long(), minlength=256).double()
            share = counts / counts.sum()
            mean = (share * levels).sum()
            means.append(round(mean.item(), 6))
            spreads.append(round(max((share * (levels - mean) ** 2).sum().sqrt().item(), 1e-3), 6))
        return tuple(means), tuple(spreads)


def read_images(source: Path | str) -> ImageData:
    """The images of a folder, or scikit-learn's digits; unreadable data raises DataError."""
    if str(source) == DIGITS:
        train, test = _digits()
        where = "scikit-learn's digits"
    else:
        train, test = _folder(Path(source))
        where = str(source)
    if not len(train) or not len(test):
        raise DataError(setting="source", given=source, allowed="a folder with training and test images")
    if train.shape != test.shape:
        raise DataError(
            setting="source",
            given=source,
            allowed=f"images of one size, not {_size(train)} and {_size(test)}",
        )
    classes = int(train.labels.max()) + 1
    known = torch.zeros(max(classes, int(test.labels.max()) + 1), dtype=torch.bool)
    known[train.labels] = True
    unseen = test.labels[~known[test.labels]]
    if len(unseen):
        raise DataError(
            f"class {int(unseen[0])} is among the test labels of {where} and never in its training labels",
            setting="source",
            given=source,
            remedy="a network cannot learn it: leave its images out, or add some for training",
        )
    if classes > MAX_CLASSES:
        raise DataError(
            setting="source", given=source, allowed=f"a data set of at most {MAX_CLASSES} classes"
        )
    sha = hashlib.sha256()
    for part in (train, test):
        sha.update(repr(tuple(part.images.shape)).encode())
        sha.update(part.images.contiguous().numpy().data)
        sha.update(part.labels.contiguous().numpy().data)
    return ImageData(train, test, classes, sha.hexdigest())


def read_test_images(source: Path | str, shape: tuple[int, int, int], classes: int) -> ImageSet:
    """The held-out images of another folder, if a network for `shape` and `classes` can read them."""
    data = read_images(source)
    if data.shape != shape:
        wanted = " × ".join(map(str, shape))
        raise DataError(
            f"the images of {source} are {_size(data.test)} (channels × height × width) and "
            f"the network was trained on {wanted}",
            setting="source",
            given=source,
            remedy="give images of that size",
        )
    last = int(data.test.labels.max())
    if last >= classes:
        problem = f"class {last} of {source} was unseen in training, which had classes 0 to {classes - 1}"
        remedy = "leave its images out, or train on it"
        raise DataError(problem, setting="source", given=source, remedy=remedy)
    return data.test


def _size(images: ImageSet) -> str:
    return " × ".join(map(str, images.shape))


# Folders


def _folder(folder: Path) -> tuple[ImageSet, ImageSet]:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        remedy = f"give a folder of IDX or CIFAR binary files, or {DIGITS}"
        raise DataError(f"{folder} {what}", setting="source", given=folder, remedy=remedy)
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    if any("idx3" in name for name in names):
        return _idx_pair(folder, names, False), _idx_pair(folder, names, True)
    batches = [n for n in names if n.startswith("data_batch_") and n.endswith(".bin")]
    if batches and "test_batch.bin" in names:
        return _cifar(folder, batches, 1), _cifar(folder, ["test_batch.bin"], 1)
    if {"train.bin", "test.bin"} <= set(names):
        return _cifar(folder, ["train.bin"], 2), _cifar(folder, ["test.bin"], 2)
    raise DataError(
        f"{folder} has neither IDX files (train-images-idx3-ubyte, t10k-images-idx3-ubyte and "
        "their labels, maybe with .gz) nor CIFAR's binary files (data_batch_1.bin, "
        "test_batch.bin)",
        setting="source",
        given=folder,
        remedy="give a folder that has",
    )


def _idx_pair(folder: Path, names: list[str], test: bool) -> ImageSet:
    kind = "test" if test else "training"

    def one(word: str) -> Path:
        fits = [n for n in names if word in n and any(mark in n for mark in _TEST) == test]
        if not test:
            fits = [n for n in fits if "train" in n]
        if len(fits) != 1:
            count = f"has {len(fits)}: {', '.join(fits)}" if fits else "has none"
            problem = f"{folder} must have one IDX file of {kind} {word.split('-')[0]} and {count}"
            raise DataError(problem, setting="source", given=folder)
        return folder / fits[0]

    images_file, labels_file = one("images-idx3"), one("labels-idx1")
    images, labels = _read_idx(images_file, 3), _read_idx(labels_file, 1)
    if len(images) != len(labels):
        problem = f"{images_file} has {len(images)} images and {labels_file} has {len(labels)} labels"
        raise DataError(problem, setting="source", given=folder, remedy="give the labels of these images")
    return ImageSet(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long())


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The bytes of an IDX file, checked against its header; never more is unpacked than the header allows."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            head = file.read(4 + 4 * dimensions)
            sizes = _header(path, head, dimensions)
            wanted = math.prod(sizes)
            body = file.read(wanted)
            more = file.read(1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise _damaged(path, f"is truncated or damaged ({problem})") from None
    except OSError as problem:
        raise _damaged(path, f"cannot be read ({problem.strerror or problem})") from None
    if len(body) < wanted:
        raise _damaged(path, f"is truncated: its header announces {wanted} bytes and {len(body)} follow")
    if more:
        raise _damaged(path, f"has more than the {wanted} bytes that its header announces")
    return np.frombuffer(bytearray(body), dtype=np.uint8).reshape(sizes)


def _header(path: Path, head: bytes, dimensions: int) -> tuple[int, ...]:
    if len(head) < 4 + 4 * dimensions:
        raise _damaged(path, f"is truncated: an IDX header has {4 + 4 * dimensions} bytes")
    if head[:3] != b"\0\0\x08" or head[3] != dimensions:
        expected = f"00 00 08 {dimensions:02x}, as an IDX file of unsigned bytes in {dimensions} dimensions"
        raise _damaged(path, f"begins with {head[:4].hex(' ')}, not with {expected}")
    sizes = tuple(int.from_bytes(head[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    if min(sizes) < 1 or math.prod(sizes) > MAX_BYTES:
        shown = " × ".join(map(str, sizes))
        raise _damaged(path, f"announces {shown} bytes, and 1 to {MAX_BYTES} are read")
    return sizes


def _damaged(path: Path, problem: str) -> DataError:
    return DataError(
        f"{path} {problem}", setting="path", given=path, remedy="restore it or download it again"
    )


def _cifar(folder: Path, names: list[str], labels: int) -> ImageSet:
    """Records of `labels` label bytes, the last of which counts, and an image."""
    record = labels + math.prod(CIFAR)
    parts = []
    for name in names:
        path = folder / name
        size = path.stat().st_size
        if not 0 < size <= MAX_BYTES or size % record:
            raise _damaged(path, f"has {size} bytes, no whole number of CIFAR's records of {record}")
        parts.append(np.fromfile(path, dtype=np.uint8).reshape(-1, record))
    rows = np.concatenate(parts)
    images = torch.from_numpy(np.ascontiguousarray(rows[:, labels:])).reshape(-1, *CIFAR)
    return ImageSet(images, torch.from_numpy(rows[:, labels - 1].astype(np.int64)))


def _digits() -> tuple[ImageSet, ImageSet]:
    """Every fifth image is held out; the 17 levels of grey are spread over 0 to 240."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        problem = "scikit-learn, which has the digits, is not installed"
        remedy = "pip install 'topograd[studies]', or give a folder of IDX or CIFAR binary files"
        raise DataError(problem, setting="source", given=DIGITS, remedy=remedy) from None
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy((pixels * 15).astype(np.uint8)).reshape(-1, 1, 8, 8)
    return ImageSet(images, torch.from_numpy(labels.astype(np.int64))).held_out(5)


class ImageLoader(EpochLoader[tuple[Tensor, Tensor]]):
    """Batches (images, labels): uint8 (batch, channels, height, width) and int64 (batch,)."""

    def __init__(self, images: ImageSet, batch: int, seed: int) -> None:
        if not len(images):
            raise DataError("there is no image to train on", setting="images", remedy="give at least one")
        self.images = images
        super().__init__(batch, seed)

    def _draw(self, generator: np.random.Generator) -> ImageSet:
        return self.images

    def __next__(self) -> tuple[Tensor, Tensor]:
        chosen = self.images.chosen(torch.tensor(list(self._next_rows())))
        return chosen.images, chosen.labels
