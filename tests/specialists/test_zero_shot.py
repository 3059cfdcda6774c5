"""Zero-shot tasks of a model in training: as `eval core` scores them, for several plans from one pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from raising import refused
from topograd.decode.model import Model
from topograd.errors import DataError
from topograd.evaluation.core import CoreRequest, evaluate_core
from topograd.runs.session import LoadedTextRun
from topograd.specialists.attach import attach, new_specialist
from topograd.specialists.composition import composed
from topograd.specialists.model import SpecialistPool
from topograd.specialists.zero_shot import ZeroShot


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    words = ["stage", "relay", "loss", "head", "gate", "norm", "tap"]
    items = [{"query": f"the {w}", "choices": [w, w[::-1]], "gold": 0} for w in words]
    (folder / "copa.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    shown = [{"query": "a", "choices": ["b", "c"], "gold": 0}] * 12
    (folder / "piqa.jsonl").write_text("".join(json.dumps(item) + "\n" for item in shown))
    return folder


def test_it_scores_as_eval_core_does(gpt: LoadedTextRun, tasks: Path, tmp_path: Path) -> None:
    adapter = new_specialist(tmp_path / "s", gpt)
    attached = attach(gpt, [adapter])
    with torch.no_grad():
        weight = attached.part("s").get_parameter("head.weight")
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    found = ZeroShot(gpt, tasks, 7).read(
        attached.stack, [composed(attached, {}), composed(attached, {"s": 1.0})]
    )
    assert [list(each) for each in found] == [["copa"], ["copa"]], "piqa shows examples, so it is left out"
    request = CoreRequest(tasks, ("copa",), depth="full")
    pool = SpecialistPool(attached, runtime="torch")
    for each, model in zip(found, (Model(gpt, "torch"), pool.model({"s": 1.0})), strict=True):
        assert each["copa"] == evaluate_core(model, request).tasks[0].accuracy[0]
    assert found[1]["copa"] != found[0]["copa"]
    assert ZeroShot(gpt, tasks, 3).read(gpt.stack, [gpt.plan])[0]["copa"] in (0, 1 / 3, 2 / 3, 1)


def test_a_folder_without_such_tasks_is_refused(gpt: LoadedTextRun, tasks: Path, tmp_path: Path) -> None:
    (tasks / "copa.jsonl").unlink()
    with refused(DataError, setting="tasks"):
        ZeroShot(gpt, tasks, 5)
    with pytest.raises(DataError, match="is no folder"):
        ZeroShot(gpt, tmp_path / "nowhere", 5)
