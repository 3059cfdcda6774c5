"""What fine-tuning costs the old text: measured, bounded, and the same after a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from raising import refused
from topograd.data.loader import IGNORED
from topograd.errors import ConfigError, DataError, TopogradError
from topograd.exec.forward import Predictor
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import open_session
from topograd.runs.tune_config import TuneConfig
from topograd.training.forgetting import NAME, _parts, old_text
from topograd.training.runs import resume, start

Settings = Callable[..., TrainConfig]


@pytest.fixture
def settings(straight: Run, old: Path, tmp_path: Path) -> Settings:
    """Settings that fine-tune a small run with a LoRA, on text that is unlike its own."""
    base = TrainConfig.from_dict(straight.read_config())
    new = tmp_path / "new.txt"
    new.write_text("ZQ#9 XW%7 " * 200)

    def make(**tune: Any) -> TrainConfig:
        steps = tune.pop("steps", 6)
        given = {"lora_rank": 2, "old_text": str(old), **tune}
        return replace(
            base, init=str(straight.folder), data=str(new), steps=steps, save_every=2, eval_every=0,
            eval_bytes=300, optimizer=replace(base.optimizer, name="adamw", lr_matrix=0.05),
            tune=TuneConfig(**given),
        )  # fmt: skip

    return make


@pytest.fixture
def old(tmp_path: Path) -> Path:
    file = tmp_path / "old.txt"
    file.write_text("Stages predict, and no gradient crosses between them.\n" * 30)
    return file


def logged(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in r.items() if k != "seconds"}
        for r in Run.open(folder).metrics()
        if r["kind"] == kind
    ]


@pytest.mark.parametrize("directions", ["safe", "dead", "random", "pissa", "plain"])
def test_learned_and_forgotten_are_those_of_the_merged_model(
    settings: Settings, straight: Run, tmp_path: Path, directions: str
) -> None:
    results = start(settings(lora_directions=directions), tmp_path / "run").train()
    text = json.loads((tmp_path / "run" / NAME).read_text())["judged"]
    inputs, targets = (torch.tensor(text[key]) for key in ("inputs", "targets"))
    found = []
    for folder in (straight.folder, tmp_path / "run"):
        session = open_session(folder)
        nbytes = sum(len(session.tokenizer.pieces[t]) for t in targets[targets != IGNORED].tolist())
        with torch.no_grad():
            z = Predictor(session.stack, session.plan)(inputs)
        found.append(float(F.cross_entropy(z.mT, targets, reduction="sum")) / math.log(2) / nbytes)
    assert results["forgotten"] == pytest.approx(found[1] - found[0], abs=1e-5)
    first, *_, last = logged(tmp_path / "run", "eval")
    assert (first["learned"], first["forgotten"]) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert results["learned"] == pytest.approx(
        first["bpb"]["prediction"] - last["bpb"]["prediction"], abs=1e-9
    )


@pytest.mark.parametrize(
    "tune", [{"lora_directions": "safe"}, {"lora_directions": "pissa", "max_forgetting": 1e-4}]
)
def test_a_resumed_run_is_the_same_bit_for_bit(
    settings: Settings, old: Path, tmp_path: Path, tune: dict[str, Any]
) -> None:
    whole = start(settings(**tune), tmp_path / "whole").train()
    start(settings(**tune), tmp_path / "parts").train(stop_after=3)
    old.unlink()
    again = resume(tmp_path / "parts").train()
    for key in ("learned", "forgotten", "bpb"):
        assert again[key] == whole[key]
    for kind in ("train", "forgetting"):
        assert logged(tmp_path / "parts", kind) == logged(tmp_path / "whole", kind)
    stores = [Run.open(tmp_path / name).store for name in ("whole", "parts")]
    assert len({store.weights(store.names()[-1]) for store in stores}) == 1


@pytest.mark.parametrize("directions", ["plain", "pissa"])
def test_the_bound_is_kept_and_the_largest_share_is_taken(
    settings: Settings, tmp_path: Path, directions: str
) -> None:
    free = start(settings(lora_directions=directions, steps=3), tmp_path / "free").train()
    most = free["forgotten"] / 2
    assert most > 0
    bounded = settings(lora_directions=directions, steps=3, max_forgetting=most)
    results = start(bounded, tmp_path / "bounded").train()
    assert results["forgotten"] <= most
    factors = [
        record["factor"] for record in logged(tmp_path / "bounded", "forgetting") if "factor" in record
    ]
    assert factors
    assert all(0 < factor < 1 for factor in factors)


def test_without_old_text_the_base_draws_some(settings: Settings, tmp_path: Path) -> None:
    results = start(settings(lora_directions="safe", old_text=None, steps=2), tmp_path / "run").train()
    table = json.loads((tmp_path / "run" / NAME).read_text())
    assert table["source"] == "drawn by the base"
    assert math.isfinite(results["forgotten"])


def test_old_chats_are_read_as_the_base_spells_them(
    settings: Settings, straight: Run, tmp_path: Path
) -> None:
    chats = tmp_path / "old.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"No {i}."}]}
        for i in range(40)
    ]
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = start(settings(old_text=str(chats), lora_directions="safe"), tmp_path / "run").train()
    assert math.isfinite(results["forgotten"])
    tokenizer = open_session(straight.folder).tokenizer
    first = tokenizer.decode(old_text(tokenizer, 64, str(chats)).judged.inputs[0, 1:].tolist())
    assert first.startswith("User: Hi\nAssistant: No ")


def test_old_text_is_cut_into_sequences_that_do_not_judge_what_they_read(straight: Run, old: Path) -> None:
    tokenizer = open_session(straight.folder).tokenizer
    text = old_text(tokenizer, 16, str(old))
    assert text.read.inputs.shape[1] == text.judged.inputs.shape[1] == 16
    assert len(text.read.inputs) == pytest.approx(3 * len(text.judged.inputs), abs=3)
    assert torch.equal(text.read.inputs[:, 1:], text.read.targets[:, :-1].where(
        text.read.targets[:, :-1] != IGNORED, tokenizer.separator))  # fmt: skip
    one = _parts(text.read.inputs[:1], text.read.inputs[:1], tokenizer, "here")
    assert torch.equal(one.read.inputs, one.judged.inputs)


@pytest.mark.parametrize(
    ("tune", "setting"),
    [
        ({"lora_rank": 0, "lora_directions": "safe"}, "lora_directions"),
        ({"lora_rank": 0, "max_forgetting": 0.1}, "max_forgetting"),
        ({"max_forgetting": 0.0}, "max_forgetting"),
        ({"lora_directions": "sideways"}, "lora_directions"),
        ({"old_text": " "}, "old_text"),
    ],
)
def test_refused(tune: dict[str, Any], setting: str) -> None:
    with refused(ConfigError, setting=setting):
        TuneConfig(**{"lora_rank": 2, **tune})


def test_a_text_that_is_not_there_leaves_no_run(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(TopogradError):
        start(settings(old_text=str(tmp_path / "none.txt")), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(DataError):
        start(settings(old_text=str(empty)), tmp_path / "run")


def test_a_base_with_heads_of_its_own_is_tuned_in_its_own_topology(
    settings: Settings, config: TrainConfig, tmp_path: Path
) -> None:
    """The message names the topology: [model] is what a run takes from its base anyway."""
    staged = replace(config, steps=1).changed(partition="1,1", heads="per-stage")
    base = start(staged, tmp_path / "base").train()["run"]
    tuned = replace(settings(steps=2), init=base)
    with refused(ConfigError, setting="init") as caught:
        start(tuned, tmp_path / "other")
    assert "[topology]" in str(caught.value)
    results = start(tuned.changed(partition="1,1", heads="per-stage"), tmp_path / "same").train()
    assert math.isfinite(results["forgotten"])
