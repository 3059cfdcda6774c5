"""`topograd interfaces rank|analyse MODEL`: a run's numbers in one object, in tables, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from topograd.interfaces.adjoint_rank import boundary_ranks
from topograd.runs.session import heldout_text, open_session


@pytest.fixture(scope="module")
def regions(size: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from topograd.cli.main import main

    folder = tmp_path_factory.mktemp("runs") / "regions"
    words = ["--partition", "1,1,1,1", "--model.layers", "4", "--interface", "S=4,r=4", "--steps", "4"]
    assert main(["train", *size, *words, "--out", str(folder), "--json"]) == 0
    return folder


def test_rank_of_a_dense_run(backprop: Path, call: Any) -> None:
    found = call("interfaces", "rank", backprop, "--windows", 3, "--json").json
    session = open_session(backprop)
    text = heldout_text(session)
    expected = boundary_ranks(session.stack, session.plan, text.inputs[:3], text.targets[:3])
    assert found["boundaries"] == expected
    assert [set(one) >= {"layer", "rank_90", "rank_99"} for one in expected] == [True]
    assert "behind layer" in call("interfaces", "rank", backprop).out


def test_analyse(regions: Path, call: Any) -> None:
    found = call("interfaces", "analyse", regions, "--json").json
    assert len(found["local_norm"]) == 2
    assert len(found["spectrum"][0]) == 12
    assert {how: len(costs) for how, costs in found["ablation"].items()} == {
        "zero": 3,
        "shuffled": 3,
        "mean": 3,
    }
    assert found["path_past_interfaces"] is None
    plan = found["plan"]
    assert plan["workers"] == 4
    assert plan["seconds"]["hybrid"] <= plan["seconds"]["scan"]
    assert plan["seconds"]["dense"] >= plan["seconds"]["handed"]
    assert plan["seconds"][plan["best"]] == min(plan["seconds"][way] for way in ("handed", "scan", "hybrid"))
    shown = call("interfaces", "analyse", regions).out
    assert "Jacobians of inner regions" in shown
    assert "no path leads past the interfaces" in shown
    assert "shortest with these interfaces" in shown


def test_analyse_leaves_the_run_as_it_is(regions: Path, call: Any) -> None:
    before = open_session(regions).stack.state_dict()
    call("interfaces", "analyse", regions, "--json")
    after = open_session(regions).stack.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def trained(folder: Path, *words: str) -> Path:
    from topograd.cli.main import main

    assert main(["train", *words, "--steps", "2", "--out", str(folder), "--json"]) == 0
    return folder


def test_without_jacobians_where_they_would_take_too_many_products(
    size: list[str], tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positive control has a message for every position; all but its Jacobians is told."""
    words = ["--partition", "1,1,1", "--model.layers", "3", "--interface", "residual:r=8"]
    folder = trained(tmp_path / "run", *size, *words)
    monkeypatch.setattr("topograd.interfaces.jacobian.MAX_ROWS", 100)
    found = call("interfaces", "analyse", folder, "--json").json
    assert found["local_norm"] == found["spectrum"] == []
    assert len(found["adjoint_norm"]) == len(found["message_spread"]) == 2
    assert min(found["adjoint_norm"]) > 0
    assert found["plan"]["seconds"]["scan"] is None
    assert found["plan"]["best"] == "handed"
    assert "more than a thousand products each" in call("interfaces", "analyse", folder).out


def test_a_rank_of_its_own_for_every_boundary(size: list[str], tmp_path: Path, call: Any) -> None:
    words = ["--partition", "1,1,1", "--model.layers", "3", "--interface", "residual:r=3/2"]
    found = call("interfaces", "analyse", trained(tmp_path / "run", *size, *words), "--json").json
    assert len(found["local_norm"]) == 1
    assert found["plan"]["seconds"]["scan"] > 0
    assert found["plan"]["best"] == "handed", "ranks scan alike interfaces only"


def test_a_run_on_images(tmp_path: Path, call: Any) -> None:
    words = "--task images --data digits --model vit --depth 3 --heads 2 --widths 16 --partition 1,1,1"
    folder = trained(tmp_path / "run", *words.split(), "--interface", "published:r=4")
    found = call("interfaces", "analyse", folder, "--json").json
    assert len(found["local_norm"]) == 1
    assert len(found["ablation"]["shuffled"]) == 2
    assert found["plan"]["train"] == "--backward autograd", "images are trained in one process"
    refusal = call("interfaces", "analyse", folder, "--workers", 2).refusal
    assert "--workers is 2; it must be 1, for images are trained in one process" in refusal
    ranks = call("interfaces", "rank", folder, "--windows", 64, "--json").json
    assert [(one["layer"], one["width"]) for one in ranks["boundaries"]] == [(1, 16), (2, 16)]
    assert all(0 < one["rank_90"] <= one["rank_99"] <= 16 for one in ranks["boundaries"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["analyse", "BACKPROP"], "it must be a chain of at least two regions"),
        (["rank", "BACKPROP", "--windows", "0"], "--windows is 0; it must be at least 1"),
        (["analyse", "BACKPROP", "--windows", "1"], "--windows is 1; it must be at least 2"),
        (["analyse", "BACKPROP", "--microbatches", "0"], "--microbatches is 0"),
    ],
)
def test_what_does_not_fit_is_one_line(words: list[str], said: str, backprop: Path, call: Any) -> None:
    given = [str(backprop) if word == "BACKPROP" else word for word in words]
    assert said in call("interfaces", *given).refusal


def test_a_plan_is_for_as_many_workers_as_are_asked_for(regions: Path, call: Any) -> None:
    plan = call("interfaces", "analyse", regions, "--workers", 2, "--latency", 50, "--json").json["plan"]
    assert plan["workers"] == 2
    assert plan["seconds"]["handed"] > 0.1
    assert "--parallel stages=2" in plan["train"]
    assert "it must be in 1..4" in call("interfaces", "analyse", regions, "--workers", 5).refusal
