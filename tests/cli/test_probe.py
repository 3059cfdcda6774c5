"""`topograd probe BASE --prompt --target`: rank, logit and probability are those of the model's logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from topograd.decode.model import load
from topograd.runs.folder import Run

Call = Callable[..., Any]


def test_it_reads_what_the_model_predicts(straight: Run, call: Call) -> None:
    model = load(straight.folder)
    words = ("probe", straight.folder, "--prompt", "sta", "--target", "ge")
    found = call(*words, "--json").json
    ids, target = model.encode("sta"), model.encode("ge")
    assert found["tokens"] == target
    logits = model.logits([*ids, *target[:-1]])[len(ids) - 1 :]
    last, first = found["stages"][-1], logits[0]
    assert last["logit"] == pytest.approx(float(first[target[0]]), abs=1e-4)
    assert last["rank"] == 1 + int((first > first[target[0]]).sum())
    assert last["probability"] == pytest.approx(float(first.softmax(-1)[target[0]]), rel=1e-4)
    each = logits.log_softmax(-1)[range(len(target)), target]
    assert last["sequence"] == pytest.approx(float(each.sum().exp()), rel=1e-4)
    scored = call("score", straight.folder, "--context", "sta ", "--continuation", "ge", "--json").json
    spaced = call("probe", straight.folder, "--prompt", "sta ", "--target", "ge", "--json").json
    assert spaced["tokens"] == [token["token"] for token in scored["stages"][-1]["tokens"]]
    assert spaced["stages"][-1]["rank"] == scored["stages"][-1]["tokens"][0]["rank"]
    assert found["stages"][0]["logit"] != last["logit"]


def test_it_has_every_stage(straight: Run, call: Call, spec: Path) -> None:
    words = ("probe", straight.folder, "--prompt", "sta", "--target", "ge")
    found = call(*words, "--json").json
    names = {"stage", "layers", "specialist", "rank", "logit", "probability", "sequence", "top"}
    assert found["stages"][0].keys() == names
    assert len(found["stages"]) == 2
    more = call(*words, "--specialist", spec, "--passage", "loss", "--json").json
    assert len(more["stages"]) == 3
    assert len(more["with_passage"]["stages"]) == 3
    assert more["with_passage"]["stages"][0]["logit"] != more["stages"][0]["logit"]
    assert more["stages"][2]["logit"] == more["stages"][1]["logit"], "inserted, it changes nothing"
    assert "path: spec" in call(*words, "--specialist", spec).out
    assert "with the passage in front" in call(*words, "--passage", "loss").out
    assert "--specialist" in call("probe", "--help").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "x", "--target", ""], "--target is empty"),
        (["--prompt", "x"], "target"),
        (
            ["--prompt", "", "--target", "d", "--specialist", "SPEC", "--chat"],
            "tokens; it must be at most 16",
        ),
        (["--prompt", "x", "--target", "d", "--specialist", "nowhere"], "is no specialist"),
    ],
)
def test_bad_input_is_one_line(straight: Run, call: Call, spec: Path, words: list[str], said: str) -> None:
    assert said in call("probe", straight.folder, *(str(spec) if w == "SPEC" else w for w in words)).refusal
