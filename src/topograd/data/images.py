"""ImageSet with labels: IDX files, CIFAR's binary files, and scikit-learn's digits, read where they lie.

    …train…-images-idx3-ubyte[.gz], …train…-labels-idx1-ubyte[.gz]    IDX, grey pictures: MNIST and its kin
    …t10k…-images-idx3-ubyte[.gz], …t10k…-labels-idx1-ubyte[.gz]      held-out ones; t10k may be test
    data_batch_*.bin, test_batch.bin            CIFAR-10: a label and 3 × 32 × 32 bytes, again and again
    train.bin, test.bin                         CIFAR-100: two labels, of which the second counts
    digits                                      1,797 pictures of 8 × 8, of scikit-learn

An IDX file is 0, 0, 8 (unsigned bytes), the number of dimensions, each dimension in four bytes, highest
first, then the data. Nothing is downloaded and nothing is unpickled.

ImageSet are (N, channels, height, width) in uint8, labels (N,) in int64 from 0. Everything is held in memory:
a byte for each number. Limits: at most `MAX_BYTES` of pictures in a file, `MAX_CLASSES` classes; a file
that says more, or that is shorter or longer than it says, is refused.
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

from topograd.errors import DataError

DIGITS = "digits"
"""What stands for scikit-learn's digits where a folder is asked for."""
MAX_BYTES = 2**32
MAX_CLASSES = 10_000
CIFAR = (3, 32, 32)
_TEST = ("t10k", "test")


@dataclass(frozen=True)
class ImageSet:
    """ImageSet (N, channels, height, width), uint8, and their labels (N,), int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def chosen(self, rows: Tensor) -> ImageSet:
        """Some of them."""
        return ImageSet(self.images[rows], self.labels[rows])

    def sample(self, most: int) -> ImageSet:
        """At most this many, spaced evenly."""
        if len(self) <= most:
            return self
        return self.chosen(torch.arange(most) * len(self) // most)

    def held_out(self, every: int) -> tuple[ImageSet, ImageSet]:
        """All but each `every`-th picture, and those."""
        held = torch.arange(len(self)) % every == every - 1
        return self.chosen(~held), self.chosen(held)


@dataclass(frozen=True)
class ImageData:
    """ImageSet to learn from and pictures to be judged by."""

    train: ImageSet
    test: ImageSet
    classes: int
    digest: str
    """SHA-256 of everything that was read."""
    skipped: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.train.shape

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and spread of each channel of the training pictures, on a scale from 0 to 1."""
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
    """The pictures of a folder, or scikit-learn's digits; what cannot be read is refused in one line."""
    if str(source) == DIGITS:
        train, test = _digits()
        where = "scikit-learn's digits"
    else:
        train, test = _folder(Path(source))
        where = str(source)
    if not len(train) or not len(test):
        raise DataError(
            f"{where} has {len(train)} pictures to learn from and {len(test)} others",
            remedy="both are needed",
        )
    if train.shape != test.shape:
        raise DataError(
            f"the pictures of {where} are {_size(train)} to learn from and {_size(test)} to be judged by",
            remedy="they must be of one size",
        )
    classes = int(train.labels.max()) + 1
    known = torch.zeros(max(classes, int(test.labels.max()) + 1), dtype=torch.bool)
    known[train.labels] = True
    unseen = test.labels[~known[test.labels]]
    if len(unseen):
        raise DataError(
            f"class {int(unseen[0])} is among the test labels of {where} and never in its training labels",
            remedy="a network cannot learn it: leave its pictures out, or add some to learn from",
        )
    if classes > MAX_CLASSES:
        raise DataError(
            f"{where} has labels up to {classes - 1}", remedy=f"at most {MAX_CLASSES} classes are read"
        )
    return ImageData(train, test, classes, _digest(train, test))


def read_test_images(source: Path | str, shape: tuple[int, int, int], classes: int) -> ImageSet:
    """The held-out pictures of another folder, if a network for `shape` and `classes` can read them."""
    found = read_images(source)
    if found.shape != shape:
        wanted = " × ".join(map(str, shape))
        raise DataError(
            f"the pictures of {source} are {_size(found.test)} (channels × height × width) and "
            f"the network was trained on {wanted}",
            remedy="give pictures of that size",
        )
    most = int(found.test.labels.max())
    if most >= classes:
        raise DataError(
            f"class {most} of {source} was unseen in training, which had classes 0 to {classes - 1}",
            remedy="leave its pictures out, or train on it",
        )
    return found.test


def _size(pictures: ImageSet) -> str:
    return " × ".join(map(str, pictures.shape))


def _digest(*parts: ImageSet) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(repr(tuple(part.images.shape)).encode())
        sha.update(part.images.contiguous().numpy().data)
        sha.update(part.labels.contiguous().numpy().data)
    return sha.hexdigest()


# Folders


def _folder(folder: Path) -> tuple[ImageSet, ImageSet]:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {what}", remedy=f"give a folder of IDX or CIFAR binary files, or {DIGITS}")
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
        remedy="give a folder that has",
    )


def _idx_pair(folder: Path, names: list[str], test: bool) -> ImageSet:
    kind = "test" if test else "training"

    def one(word: str) -> Path:
        fits = [n for n in names if word in n and any(mark in n for mark in _TEST) == test]
        if not test:
            fits = [n for n in fits if "train" in n]
        if len(fits) != 1:
            found = f"has {len(fits)}: {', '.join(fits)}" if fits else "has none"
            raise DataError(f"{folder} must have one IDX file of {kind} {word.split('-')[0]} and {found}")
        return folder / fits[0]

    images_file, labels_file = one("images-idx3"), one("labels-idx1")
    images, labels = _read_idx(images_file, 3), _read_idx(labels_file, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_file} has {len(images)} pictures and {labels_file} has {len(labels)} labels",
            remedy="give the labels of these pictures",
        )
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
        raise DataError(f"{path} is truncated or damaged ({problem})", remedy="fetch it again") from None
    except OSError as problem:
        raise DataError(
            f"{path} cannot be read ({problem.strerror or problem})", remedy="restore it"
        ) from None
    if len(body) < wanted:
        raise DataError(
            f"{path} is truncated: its header speaks of {wanted} bytes and {len(body)} follow",
            remedy="fetch it again",
        )
    if more:
        raise DataError(
            f"{path} goes on behind the {wanted} bytes that its header speaks of", remedy="fetch it again"
        )
    return np.frombuffer(bytearray(body), dtype=np.uint8).reshape(sizes)


def _header(path: Path, head: bytes, dimensions: int) -> tuple[int, ...]:
    if len(head) < 4 + 4 * dimensions:
        raise DataError(
            f"{path} is truncated: an IDX header has {4 + 4 * dimensions} bytes", remedy="fetch it again"
        )
    if head[:3] != b"\0\0\x08" or head[3] != dimensions:
        raise DataError(
            f"{path} begins with {head[:4].hex(' ')}, not with 00 00 08 {dimensions:02x}: it is no IDX file "
            "of "
            f"unsigned bytes with {dimensions} dimension{'s' if dimensions > 1 else ''}"
        )
    sizes = tuple(int.from_bytes(head[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    if min(sizes) < 1 or math.prod(sizes) > MAX_BYTES:
        shown = " × ".join(map(str, sizes))
        raise DataError(f"{path} says that it holds {shown} bytes", remedy=f"1 to {MAX_BYTES} are read")
    return sizes


def _cifar(folder: Path, names: list[str], labels: int) -> ImageSet:
    """Records of `labels` label bytes, the last of which counts, and a picture."""
    record = labels + math.prod(CIFAR)
    parts = []
    for name in names:
        path = folder / name
        size = path.stat().st_size
        if not 0 < size <= MAX_BYTES or size % record:
            raise DataError(
                f"{path} has {size} bytes, which is no whole number of CIFAR's records of {record}",
                remedy="it is truncated or something else: fetch it again",
            )
        parts.append(np.fromfile(path, dtype=np.uint8).reshape(-1, record))
    rows = np.concatenate(parts)
    images = torch.from_numpy(np.ascontiguousarray(rows[:, labels:])).reshape(-1, *CIFAR)
    return ImageSet(images, torch.from_numpy(rows[:, labels - 1].astype(np.int64)))


def _digits() -> tuple[ImageSet, ImageSet]:
    """Every fifth picture is held out; the 17 levels of grey are spread over 0 to 240."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "scikit-learn, which brings the digits, is not installed",
            remedy=("pip install 'topograd[studies]', or give a folder of IDX or CIFAR binary files"),
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy((pixels * 15).astype(np.uint8)).reshape(-1, 1, 8, 8)
    every = ImageSet(images, torch.from_numpy(labels.astype(np.int64)))
    held = torch.arange(len(every)) % 5 == 4
    return every.chosen(~held), every.chosen(held)
