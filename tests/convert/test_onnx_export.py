"""Stages as ONNX graphs: the script beside them, with onnxruntime and numpy alone, writes the same texts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

from topograd.convert import onnx_export
from topograd.convert.export import export_model
from topograd.convert.onnx_export import SCRIPT, write_onnx
from topograd.decode.depths import engine_of
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.errors import ConfigError
from topograd.pretrained import REFERENCE
from topograd.runs.config import TrainConfig
from topograd.runs.session import open_session
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.runs import start


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("onnx") / "reference"
    found = export_model(REFERENCE, out, "onnx")
    assert found["format"] == "onnx"
    assert {"manifest.json", "run.py", "tables.npz", "head.onnx", "stage-4.onnx", "stage-4.bin"} <= {
        *found["files"]
    }
    return out


def run(out: Path, *arguments: str) -> str:
    """The script in a Python that cannot import torch or topograd."""
    alone = "import sys; sys.modules['torch'] = sys.modules['topograd'] = None"
    begin = f"{alone}; sys.argv = {[str(out), *arguments]}"
    code = f"{begin}; import runpy; runpy.run_path({str(out / 'run.py')!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.covers("gpt", "export")
@pytest.mark.covers("gpt", "export", feature="early exit")
def test_the_script_writes_the_texts_of_the_manifest(exported: Path) -> None:
    texts = json.loads((exported / "manifest.json").read_text())["texts"]
    exits = {left for text in texts for _, left in text["tokens"]}
    assert len(texts) == 3
    assert len(exits) > 1, "some tokens leave early"
    assert json.loads(run(exported)) == {"texts": 3, "equal": 3}
    assert len(SCRIPT.read_text().splitlines()) <= 66


def test_the_script_continues_tokens_as_torch_does(exported: Path) -> None:
    session = open_session(REFERENCE)
    (text,) = generate_batch(FixedDepth(engine_of(session, "torch")), [[5, 6, 7]], 32)
    assert [int(token) for token in run(exported, "5", "6", "7").split()] == [e.token for e in text]


def test_one_stage_is_written_at_full_depth(config: TrainConfig, tmp_path: Path) -> None:
    whole = replace(config, topology=replace(config.topology, partition="L"), steps=1)
    start(whole, tmp_path / "run").train()
    export_model(tmp_path / "run", tmp_path / "out", "onnx")
    assert json.loads(run(tmp_path / "out")) == {"texts": 1, "equal": 1}


def test_what_is_no_chain_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(REFERENCE)
    session.plan = Plan.of(Topology.chain("2,2,2,2").with_input_bus(), 8)
    with pytest.raises(ConfigError, match="no plain chain of stages that predict"):
        write_onnx(tmp_path, session)
    monkeypatch.setattr(onnx_export, "unsupported_reason", lambda stack: "Mamba2 layers are not written")
    with pytest.raises(ConfigError, match="cannot be written as ONNX: Mamba2 layers are not written"):
        write_onnx(tmp_path, session)
