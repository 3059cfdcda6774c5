"""Quantised weights beside a run: read back as they were, and refused for another run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from raising import refused
from topograd.decode.depths import engine_of
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.errors import RunError
from topograd.pretrained import REFERENCE
from topograd.runs.session import open_session
from topograd.runtime.onnx_runtime import OnnxRuntime
from topograd.runtime.quantize import load_weights, quantize, save_weights, weights_file


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_what_is_kept_is_used(tmp_path: Path, precision: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(REFERENCE, folder)
    session = open_session(folder)
    engine = engine_of(session, "onnx", precision)
    (text,) = generate_batch(FixedDepth(engine), [[5, 6, 7]], 8)
    assert isinstance(engine.runtime, OnnxRuntime)
    file = weights_file(folder, precision)
    save_weights(file, engine.runtime.made, "int8" if precision == "int8" else "int4", session.weights)
    again = engine_of(session, "onnx", precision)
    assert isinstance(again.runtime, OnnxRuntime)
    assert again.runtime.made.keys() == engine.runtime.made.keys()
    for name, packed in engine.runtime.made.items():
        np.testing.assert_array_equal(again.runtime.made[name].codes, packed.codes)
    assert generate_batch(FixedDepth(again), [[5, 6, 7]], 8) == [text]


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    file = weights_file(tmp_path, "int8")
    save_weights(file, {}, "int8", "a")
    with refused(RunError, setting="weights"):
        load_weights(file, "int8", "b")
    file.write_bytes(b"nothing")
    with refused(RunError, setting="path"):
        load_weights(file, "int8", "a")


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    file = weights_file(tmp_path, "int8")
    save_weights(file, {"a": quantize(np.ones((4, 32), np.float32), "int8")}, "int8", "a")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with refused(RunError, setting="path"):
        load_weights(file, "int8", "a")
