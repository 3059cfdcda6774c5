"""`train --interface` and other architectures: trained, stopped, resumed, measured, written with, refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from topograd.runs.folder import Run

WORDS = ["--partition", "1,1,2", "--model.layers", "4", "--interface", "S=4,r=4,pool=mean"]
WORDS += ["--steps", "4", "--seed", "1"]


@pytest.mark.covers("gpt", "train", "resume", "decode", feature="interfaces")
@pytest.mark.covers("mamba", "train", "resume", "decode", feature="interfaces")
@pytest.mark.parametrize("architecture", ["transformer", "hybrid"])
def test_regions_train_stop_resume_and_write(
    size: list[str], call: Any, tmp_path: Path, architecture: str
) -> None:
    kind = ["--model.architecture", architecture, "--model.ssm-state", "4"]
    whole = call("train", *size, *WORDS, *kind, "--out", tmp_path / "whole", "--json").json
    assert whole["finished"]
    assert len(whole["bpb"]["prefix"]) == 1, "one region predicts"
    call("train", *size, *WORDS, *kind, "--out", tmp_path / "run", "--stop-after", 2, "--json")
    resumed = call("train", "--resume", tmp_path / "run", "--json").json
    assert resumed["bpb"] == whole["bpb"]
    records = [r["loss"] for r in Run.open(tmp_path / "run").metrics() if r["kind"] == "train"]
    assert [len(losses) for losses in records] == [1] * 4
    assert call("eval", tmp_path / "run", "--json").json["bpb"]["last"] == whole["bpb"]["last"]
    text = call("generate", tmp_path / "run", "--prompt", "loss", "--tokens", "20")
    assert text.code == 0
    assert text.out.startswith("loss")
    only = call("generate", tmp_path / "run", "--prompt", "loss", "--tokens", "20", "--depth", "prefix:1")
    assert only.out == text.out, "one region predicts, and it is the whole model"
    refusal = call("generate", tmp_path / "run", "--prompt", "loss", "--depth", "wand").refusal
    assert "of regions the last alone has a loss; use depth full or speculate:lookup" in refusal
    refusal = call("generate", tmp_path / "run", "--prompt", "loss", "--depth", "prefix:2").refusal
    assert "exit 2 does not exist; the model has 1 stage" in refusal


SCAN = ["--partition", "1,1,1,1", "--model.layers", "4", "--interface", "S=4,r=4", "--steps", "6"]


@pytest.mark.covers("gpt", "train", "resume", feature="recompute")
@pytest.mark.parametrize(
    "words",
    [
        "--backward scan --jacobian pullback --jacobian-chunk 2",
        "--backward hybrid --jacobian batched",
        "--backward hybrid --carried 1",
        "--backward scan --jacobian forward --recompute",
        "--recompute",
    ],
)
def test_every_backward_has_autograds_losses_and_resumes(
    size: list[str], call: Any, tmp_path: Path, words: str
) -> None:
    def losses(name: str) -> list[float]:
        return [r["loss"][0] for r in Run.open(tmp_path / name).metrics() if r["kind"] == "train"]

    call("train", *size, *SCAN, "--out", tmp_path / "plain", "--json")
    call("train", *size, *SCAN, *words.split(), "--out", tmp_path / "whole", "--json")
    call("train", *size, *SCAN, *words.split(), "--out", tmp_path / "run", "--stop-after", 2, "--json")
    call("train", "--resume", tmp_path / "run", "--json")
    assert len(losses("whole")) == 6
    assert losses("run") == losses("whole"), "bit for bit"
    rounding = 0 if words == "--recompute" else 1e-4  # float32, six steps
    assert losses("whole") == pytest.approx(losses("plain"), abs=rounding)


OWN = "tests.nn.test_interface_config:Half:"


@pytest.mark.parametrize(
    "form", ["residual:r=2/4", "residual:r=2,basis=learned", "attention:S=4,r=4", "S=4,r=4,maps=monarch", OWN]
)
def test_another_form_trains_by_a_scan_resumes_and_writes(
    size: list[str], call: Any, tmp_path: Path, form: str
) -> None:
    words = ["--partition", "1,1,2", "--model.layers", "4", "--interface", form, "--steps", "4"]
    plain = call("train", *size, *words, "--out", tmp_path / "plain", "--json").json
    words += ["--backward", "scan"]
    whole = call("train", *size, *words, "--out", tmp_path / "whole", "--json").json
    assert whole["bpb"]["last"] == pytest.approx(plain["bpb"]["last"], abs=1e-4)
    call("train", *size, *words, "--out", tmp_path / "run", "--stop-after", 2, "--json")
    resumed = call("train", "--resume", tmp_path / "run", "--json").json
    assert resumed["bpb"] == whole["bpb"]
    assert call("generate", tmp_path / "run", "--prompt", "loss", "--tokens", "8").code == 0


def test_the_table_names_the_regions(size: list[str], call: Any, tmp_path: Path) -> None:
    shown = call("train", *size, *WORDS, "--out", tmp_path / "run")
    assert shown.code == 0
    assert "regions 1,1,2" in shown.out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["steps"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--interface S=3,r=4", "S is 3 and the context 16; S must divide the context"),
        ("--interface S=32,r=4", "S is 32 and the context 16; S must divide the context"),
        ("--interface S=4,r=0", "rank is 0; it must be at least 3"),
        ("--interface S=4,r=2000000", "gradient, and at most 1048576"),
        ("--task masked --interface published:r=10000000000", "gradient, and at most 1048576"),
        ("--interface S=4,r=x", "r is 'x'; it must be a whole number"),
        ("--interface S=1,r=4", "segments is 1; it must be at least 2"),
        ("--interface S=4,r=4,pool=max", "pool is 'max'; it must be one of tail, mean, cumulative"),
        ("--interface segments=4", "write it as S=8,r=8,pool=tail"),
        ("--interface butterfly:r=4", "interface 'butterfly' is unknown; choose one of segments, residual"),
        ("--partition 1,1,2 --interface residual:r=2/3/4", "one for each boundary: 2"),
        ("--partition 1,1,2 --interface S=2/4,r=4/5/6", "must be one value, or one for each boundary"),
        ("--interface residual:r=2,bypass=2", "it must be in 0 to 1"),
        ("--carried 1", "--carried is 1, which nothing uses; give backward hybrid"),
        ("--interface S=1,r=4,pool=mean,causal=false", "sees the future; use a causal form"),
        ("--interface published:r=4", "sees the future; use a causal form"),
        (
            "--partition 1,1,2 --model.context 128 --interface S=128,r=32 --backward scan",
            "takes 3810 vector-Jacobian products a step",
        ),
        (
            "--partition 1,1,2 --model.context 128 --interface residual:r=16 --backward scan",
            "takes 2048 vector-Jacobian products a step",
        ),
        ("--interface residual:r=64", "at most 16, the model's width"),
        ("--interface S=4,r=4 --partition 4", "it must be at least two parts, for an interface to join"),
        ("--interface S=4,r=4 --stage-heads per-stage", "with an interface it must be 'shared'"),
        ("--interface S=4,r=4 --objective residual", "with an interface it must be 'cross-entropy'"),
        ("--jacobian pullback", "--jacobian is 'pullback', which nothing uses; give backward scan"),
        (
            "--partition 1,1,2 --interface S=4,r=4 --backward scan --jacobian pullback "
            "--model.architecture mamba2",
            "has no hand-written pullback",
        ),
        (
            "--model.architecture mamba2 --model.ssm-state 6",
            "--model.ssm-state is 6; it must be a multiple of 4",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    size: list[str], call: Any, tmp_path: Path, words: str, said: str
) -> None:
    base = [] if "--partition" in words else ["--partition", "2,2"]
    given = call("train", *size, "--model.layers", 4, *base, *words.split(), "--out", tmp_path / "run")
    assert said in given.refusal
    assert not (tmp_path / "run").exists()
