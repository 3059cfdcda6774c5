"""Folders of images: what is read, and what is refused in one line."""

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from raising import refused
from topograd.data.images import DIGITS, read_images, read_test_images
from topograd.errors import DataError


@pytest.fixture
def folder(idx_folder: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(idx_folder, tmp_path / "copy"))


def damage(path: Path, change: str) -> None:
    content = bytearray(gzip.decompress(path.read_bytes()))
    if change == "cut":
        content = content[:-10]
    elif change == "more":
        content += b"x"
    elif change == "magic":
        content[2] = 9
    elif change == "huge":
        content[4:8] = b"\xff\xff\xff\xff"
    elif change == "head":
        content = content[:9]
    path.write_bytes(gzip.compress(bytes(content)))


def test_images_and_labels_are_those_of_the_files(idx_folder: Path) -> None:
    data = read_images(idx_folder)
    assert data.shape == (1, 8, 8)
    assert data.classes == 3
    assert (len(data.train), len(data.test)) == (120, 60)
    assert data.train.labels[:6].tolist() == [0, 1, 2, 0, 1, 2]
    raw = gzip.decompress((idx_folder / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    assert data.train.images.flatten().tolist() == list(raw)
    mean, std = data.statistics()
    pixels = data.train.images.double() / 255
    assert mean[0] == pytest.approx(pixels.mean().item(), abs=1e-6)
    assert std[0] == pytest.approx(pixels.std(unbiased=False).item(), abs=1e-6)


def test_plain_files_are_read_like_gzipped_ones(folder: Path, idx_folder: Path) -> None:
    for path in list(folder.glob("*.gz")):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert read_images(folder).digest == read_images(idx_folder).digest


@pytest.mark.parametrize("change", ["cut", "more", "magic", "huge", "head"])
def test_a_damaged_file_is_refused(folder: Path, change: str) -> None:
    damage(folder / "train-images-idx3-ubyte.gz", change)
    with refused(DataError, setting="path", given=folder / "train-images-idx3-ubyte.gz"):
        read_images(folder)


def test_a_gzip_file_that_ends_early_is_refused(folder: Path) -> None:
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-200])
    with refused(DataError, setting="path"):
        read_images(folder)


def test_labels_that_do_not_match_are_refused(folder: Path) -> None:
    shutil.copy(folder / "t10k-labels-idx1-ubyte.gz", folder / "train-labels-idx1-ubyte.gz")
    with refused(DataError, setting="source"):
        read_images(folder)


def test_a_class_unseen_in_training_is_refused(folder: Path) -> None:
    path = folder / "t10k-labels-idx1-ubyte.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[-1] = 7
    path.write_bytes(gzip.compress(bytes(content)))
    with refused(DataError, setting="source"):
        read_images(folder)


def test_images_of_another_size_are_refused(folder: Path) -> None:
    path = folder / "t10k-images-idx3-ubyte.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[8:16] = b"\0\0\0\x04\0\0\0\x10"
    path.write_bytes(gzip.compress(bytes(content)))
    with refused(DataError, setting="source"):
        read_images(folder)


def test_other_images_must_fit_the_network(idx_folder: Path) -> None:
    assert len(read_test_images(idx_folder, (1, 8, 8), 3)) == 60
    with refused(DataError, setting="source"):
        read_test_images(idx_folder, (1, 28, 28), 10)
    with refused(DataError, setting="source"):
        read_test_images(idx_folder, (1, 8, 8), 2)


def test_folders_without_images_are_refused(tmp_path: Path, folder: Path) -> None:
    with refused(DataError, setting="source"):
        read_images(tmp_path / "copy" / "..")
    with refused(DataError, setting="source"):
        read_images(tmp_path / "nowhere")
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    with refused(DataError, setting="source"):
        read_images(folder)


@pytest.mark.parametrize("labels", [1, 2])
def test_cifars_records(tmp_path: Path, labels: int) -> None:
    random = np.random.default_rng(0)
    rows = random.integers(0, 256, (8, labels + 3072), dtype=np.uint8)
    rows[:, labels - 1] = np.arange(8) % 4
    if labels == 1:
        rows[:4].tofile(tmp_path / "data_batch_1.bin")
        rows[4:].tofile(tmp_path / "data_batch_2.bin")
        rows[:3].tofile(tmp_path / "test_batch.bin")
        cut = tmp_path / "data_batch_2.bin"
    else:
        rows.tofile(tmp_path / "train.bin")
        rows[:3].tofile(tmp_path / "test.bin")
        cut = tmp_path / "train.bin"
    data = read_images(tmp_path)
    assert data.shape == (3, 32, 32)
    assert data.train.labels.tolist() == [0, 1, 2, 3] * 2
    assert torch.equal(data.train.images[5].flatten(), torch.from_numpy(rows[5, labels:]))
    cut.write_bytes(cut.read_bytes()[:-1])
    with refused(DataError, setting="path"):
        read_images(tmp_path)


def test_the_digits_of_scikit_learn() -> None:
    pytest.importorskip("sklearn")
    data = read_images(DIGITS)
    assert data.shape == (1, 8, 8)
    assert data.classes == 10
    assert len(data.train) + len(data.test) == 1797
    assert data.train.images.max() == 240


def test_what_is_held_out_is_not_learned_from(idx_folder: Path) -> None:
    train = read_images(idx_folder).train
    rest, held = train.held_out(4)
    assert torch.equal(held.images, train.images[3::4])
    assert len(rest) + len(held) == len(train)
    assert torch.equal(rest.labels[:4], train.labels[[0, 1, 2, 4]])


def test_a_sample_is_spaced_evenly(idx_folder: Path) -> None:
    test = read_images(idx_folder).test
    assert test.sample(1000) is test
    assert torch.equal(test.sample(20).labels, test.labels[::3])
