"""`topograd train --task masked`: an encoder of hidden tokens, with interfaces; what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from topograd.runs.session import open_run

SMALL = ["--model.layers", "2", "--steps", "4"]


@pytest.fixture(scope="module")
def encoder(size: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from topograd.cli.main import main

    folder = tmp_path_factory.mktemp("runs") / "encoder"
    words = ["--partition", "1,1", "--interface", "published:r=4", "--backward", "scan"]
    assert main(["train", "--task", "masked", *size, *SMALL, *words, "--out", str(folder), "--json"]) == 0
    return folder


def test_its_interfaces_are_analysed(encoder: Path, call: Any) -> None:
    found = call("interfaces", "analyse", encoder, "--json").json
    assert found["path_past_interfaces"] is None
    assert len(found["ablation"]["shuffled"]) == 1
    ranks = call("interfaces", "rank", encoder, "--windows", 2, "--json").json["boundaries"]
    assert ranks[0]["rank_90"] >= 1


def test_a_position_reads_later_ones(encoder: Path) -> None:
    stack = open_run(encoder).stack
    assert stack.reads_ahead
    inputs = torch.zeros(1, 8, dtype=torch.long)
    other = inputs.clone()
    other[0, -1] = 1
    with torch.no_grad():
        one, two = (layer_out(stack, given)[0, 0] for given in (inputs, other))
    assert not torch.equal(one, two)


def layer_out(stack: Any, inputs: torch.Tensor) -> torch.Tensor:
    x0 = stack.embed(inputs)
    h: torch.Tensor = stack.layers[0](x0, stack.layer_context(x0, inputs))
    return h


def test_eval_reports_the_masked_cross_entropy_that_training_did(encoder: Path, call: Any) -> None:
    found = call("eval", encoder, "--json").json
    trained = open_run(encoder).run.read_results()
    assert trained is not None
    assert found["masked_ce"] == trained["masked_ce"]
    assert 0 < found["masked_ce"]["prediction"] < 7
    assert found["hidden"] > 0
    assert "bpb" not in found
    assert "accuracy" in call("eval", encoder).out


def test_the_geometry_of_its_stream_is_logged(size: list[str], tmp_path: Path, call: Any) -> None:
    folder = tmp_path / "watched"
    call("train", "--task", "masked", *size, *SMALL, "--geometry-every", 2, "--out", folder)
    records = [record for record in open_run(folder).run.metrics() if record["kind"] == "geometry"]
    assert [record["step"] for record in records] == [2, 4]


def test_a_run_begins_with_an_encoder_and_with_nothing_else(
    encoder: Path, backprop: Path, size: list[str], tmp_path: Path, call: Any
) -> None:
    words = ["--partition", "1,1", "--interface", "published:r=4", "--steps", "1", "--out", tmp_path / "run"]
    refusal = call("train", "--task", "masked", *size, *words, "--init", backprop).refusal
    assert "a run on text; give one on masked" in refusal
    found = call("train", "--task", "masked", *size, *words, "--init", encoder, "--json").json
    assert found["masked_ce"]["prediction"] < 7
    assert open_run(tmp_path / "run").config.model.task == "masked"


def test_it_is_compared_with_its_kind_alone(encoder: Path, backprop: Path, call: Any) -> None:
    assert len(call("compare", encoder, encoder, "--json").json["runs"]) == 2
    refusal = call("compare", encoder, backprop).refusal
    assert "some of these runs are on masked, some on text; compare runs of one kind" in refusal


def test_a_run_goes_on_exactly(size: list[str], tmp_path: Path, call: Any) -> None:
    words = ["train", "--task", "masked", *size, *SMALL, "--partition", "2"]
    whole = call(*words, "--out", tmp_path / "whole", "--json").json
    call(*words, "--out", tmp_path / "parts", "--stop-after", 2, "--json")
    parts = call("train", "--resume", tmp_path / "parts", "--json").json
    assert parts["masked_ce"] == whole["masked_ce"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "ENCODER", "--prompt", "a"], "was trained on hidden tokens, and predicts no next one"),
        (["eval", "ENCODER", "--weights", "int8"], "predicts no next token"),
        (["train", "--task", "masked", "--model.architecture", "mamba2"], "transformer for an encoder"),
        (
            ["train", "--task", "masked", "--preset", "tiny", "--partition", "2,2", "--interface", "S=4,r=4"],
            "segments are cut apart",
        ),
        (
            ["train", "--preset", "tiny", "--partition", "2,2", "--interface", "published:r=4"],
            "sees the future",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    words: list[str], said: str, encoder: Path, call: Any, tmp_path: Path
) -> None:
    given = [str(encoder) if word == "ENCODER" else word for word in words]
    if given[0] == "train":
        given += ["--steps", "1", "--out", str(tmp_path / "out")]
    assert said in call(*given).refusal


def test_a_whole_mean_is_an_interface_of_an_encoder(size: list[str], tmp_path: Path, call: Any) -> None:
    words = ["--partition", "1,1", "--interface", "S=1,r=4,pool=mean,causal=false", "--backward", "scan"]
    found = call("train", "--task", "masked", *size, *SMALL, *words, "--out", tmp_path / "out", "--json").json
    assert found["finished"]
