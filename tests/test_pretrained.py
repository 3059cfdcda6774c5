"""The model that comes with the package: small, explained, calibrated, deeper is better, drafts are exact."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from decoding import written
from topograd.decode.agreement import differences
from topograd.decode.calibration.store import load
from topograd.decode.depths import engine_of
from topograd.decode.drafters import DraftRule
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.errors import RunError
from topograd.pretrained import REFERENCE
from topograd.runs.config import VERSION
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, open_session

PROMPTS = ("def read(self, size=-1):\n", "import os\n\n\nclass ")


@pytest.fixture(scope="module")
def session() -> LoadedTextRun:
    return open_session(REFERENCE)


def test_it_is_small() -> None:
    sizes = {path: path.stat().st_size for path in REFERENCE.rglob("*") if path.is_file()}
    assert 0 < sum(sizes.values()) <= 16 * 2**20, sizes


def test_it_says_how_it_was_made() -> None:
    assert "topograd train" in (REFERENCE / "README.md").read_text()


def test_it_opens_in_float32(session: LoadedTextRun) -> None:
    assert {parameter.dtype for parameter in session.stack.parameters()} == {torch.float32}
    assert all(parameter.isfinite().all() for parameter in session.stack.parameters())


def test_it_is_calibrated(session: LoadedTextRun) -> None:
    calibration, tuning = load(session, engine_of(session).runtime)
    assert (calibration.step, calibration.stages) == (session.step, len(session.plan.stages))
    assert calibration.tokens > 1000
    assert tuning.greedy is not None
    assert (tuning.greedy.drafters, round(tuning.greedy.predicted, 2)) == (("lookup",), 1.76)


def test_its_manifest_binds_all_that_belongs_to_it(session: LoadedTextRun, tmp_path: Path) -> None:
    bound = json.loads(session.run.manifest.path.read_text())["files"]
    assert bound.keys() == {"config.toml", "tokenizer.json", "results.json", "calibration.json"}
    for name in bound:
        session.run.manifest.verify(name)
    copy = Run(shutil.copytree(REFERENCE, tmp_path / "run"))
    for name in bound:
        (copy.folder / name).write_bytes((copy.folder / name).read_bytes() + b" ")
        with pytest.raises(RunError, match=f"{name} is not the file that this run wrote"):
            copy.manifest.verify(name)


def test_its_settings_are_todays_and_its_layers_are_counted_from_the_last(session: LoadedTextRun) -> None:
    assert session.run.read_config()["version"] == VERSION
    assert session.config.gpt.count_from == "last"
    assert session.config.topology.partition == "2,2,2,2"
    assert (session.plan.prediction.kind, session.plan.last) == ("last", 3)


def test_every_stage_makes_it_better(session: LoadedTextRun) -> None:
    results = json.loads((REFERENCE / "results.json").read_text())
    assert (results["steps"], results["finished"]) == (session.step, True)
    prefix = results["bpb"]["prefix"]
    assert len(prefix) == len(session.plan.stages) > 1
    assert all(later < earlier for earlier, later in pairwise(prefix))
    assert prefix[-1] == results["bpb"]["last"]


def test_drafts_write_what_full_depth_writes(session: LoadedTextRun) -> None:
    engine, tokenizer = engine_of(session), session.tokenizer
    drafted = accepted = 0
    for text in PROMPTS:
        prompt = [tokenizer.separator, *tokenizer.encode(text)]
        full = generate_batch(FixedDepth(engine), [prompt], 16)
        result, tally = written(Speculate(engine, DraftRule(0.0, 3)), [prompt], 16)
        assert differences(engine, [prompt], result, full)["mismatches"] == 0
        drafted, accepted = drafted + tally.drafted, accepted + tally.accepted
    assert 0 < accepted <= drafted
