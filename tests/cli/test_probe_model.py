"""What `inspect` and `coefficient` read a run of any task on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from topograd.cli.probe_model import BATCH_TOKENS, open_probe
from topograd.data.loader import IGNORED


@pytest.fixture
def image_run(call: Any, tmp_path: Path) -> Path:
    """A perceptron of digits."""
    words = ["--data", "digits", "--model", "mlp", "--widths", 12, 12, "--steps", 40, "--eval-every", 40]
    assert call("train", "--task", "images", *words, "--out", tmp_path / "images").code == 0
    return tmp_path / "images"


@pytest.fixture
def masked_run(call: Any, size: list[str], tmp_path: Path) -> Path:
    """An encoder of a few steps."""
    assert call("train", "--task", "masked", *size, "--steps", 3, "--out", tmp_path / "masked").code == 0
    return tmp_path / "masked"


def test_a_run_on_images_is_read_on_its_held_out_images(image_run: Path, call: Any) -> None:
    probe = open_probe(image_run, None, None, None)
    inputs, labels = probe.batches[0]
    assert labels is not None
    assert inputs.shape[0] == len(labels) <= BATCH_TOKENS
    assert probe.outputs(probe.model, inputs).argmax(-1).shape == labels.shape
    found = call("inspect", image_run, "--json").json
    assert found["loss"] == "cross-entropy"
    assert found["text"] == "the run's held-out images"
    assert {one["kind"] for one in found["directions"]} > {"symmetry"}, "and directions that were followed"
    assert found["terms"] == sum(len(x) for x, _ in probe.batches)
    parts = call("coefficient", image_run, "--layers", 1, "--draws", 8, "--json").json["parts"]
    assert parts[0]["terms"] >= 100


def test_an_encoder_is_asked_for_its_hidden_tokens(masked_run: Path, call: Any) -> None:
    probe = open_probe(masked_run, None, None, None)
    again = open_probe(masked_run, None, None, None)
    for (inputs, targets), (same, _) in zip(probe.batches, again.batches, strict=True):
        assert targets is not None
        hidden = targets != IGNORED
        assert hidden.any(1).all()
        assert (inputs[hidden] == inputs[hidden][0]).all(), "the mask's own token"
        assert torch.equal(inputs, same)
    found = call("inspect", masked_run, "--scans", 1, "--json").json
    assert found["terms"] == sum(int((y != IGNORED).sum()) for _, y in probe.batches if y is not None)
