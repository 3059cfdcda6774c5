"""The study of bounded interfaces: its cases, going on after a kill, and its table."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from papers.latent_bounded_interfaces import interfaces as study
from papers.latent_bounded_interfaces.interfaces import (
    Case,
    headline,
    position_losses,
    region_sizes,
    run,
    sweeps,
    table,
    train_case,
    trained,
)
from topograd.exec.forward import stage_outputs
from topograd.interfaces.regions import Regions
from topograd.nn.config import Architecture
from topograd.nn.interface_config import parse_interface
from topograd.runs.config import OptimizerConfig

SMALL = "S=4,r=4,pool=tail"


pytestmark = pytest.mark.usefixtures("small_cases")

CASES = [
    case
    for kind in get_args(Architecture)
    for case in (*headline(kind, [0]), *region_sizes(kind, [0]), *sweeps(kind))
]


def test_no_two_cases_are_one_training() -> None:
    every = [
        case
        for kind in get_args(Architecture)
        for case in (*headline(kind), *region_sizes(kind), *sweeps(kind))
    ]
    assert len({case.key(5) for case in every}) == len(every)
    assert {case.seed for case in headline("mamba3")} == {0, 1, 2}
    assert {case.partition for case in region_sizes("mamba3")} == {"1,1,1,1,1,1,1,1", "3,3,2", "4,4"}


@pytest.mark.parametrize("architecture", get_args(Architecture))
def test_every_case_can_be_built_and_run(architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the study's own context, since S goes up to one segment for each position."""
    context = 128
    monkeypatch.setattr(study, "CONTEXT", context)
    inputs = torch.randint(257, (1, context), generator=torch.Generator().manual_seed(0))
    for case in (case for case in CASES if case.architecture == architecture):
        stack, plan = study.build(case, case.config())
        assert case.config().gpt.architecture == architecture
        parts = [len(planned.layers) for planned in plan.stages]
        if case.interface is None:
            assert parts == [{"dense": 8, "shallow": 2, "4 layers alone": 4}[case.name]]
        else:
            assert ",".join(map(str, parts)) == case.partition
            expected = parse_interface(case.config().topology.interface or "")
            settings = {relay.settings for relay in Regions.of(stack, plan).relays}
            assert settings == {expected}, case.name
        losses = position_losses(stack, plan, inputs, inputs)
        assert losses.shape == (1, context)
        assert losses.isfinite().all(), case.name


def test_the_loss_of_every_position() -> None:
    stack, plan, *_ = trained(Case("x", interface=SMALL, partition="1,1"), steps=1)
    inputs = torch.randint(257, (3, 16))
    targets = torch.randint(257, (3, 16))
    targets[0, 5] = -100
    losses = position_losses(stack, plan, inputs, targets)
    assert losses.isnan().nonzero().tolist() == [[0, 5]]
    with torch.no_grad():
        logits = stack.readout(stage_outputs(stack, plan, inputs, [1])[1], 1)
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # leaves -100 out
    torch.testing.assert_close(losses.nanmean(), mean)


def test_a_study_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case("dense", partition="1,1"), Case(SMALL, partition="1,1", interface=SMALL)]
    file = tmp_path / "out" / "rows.jsonl"
    first = run(file, cases[:1], steps=3)
    asked: list[Case] = []

    def counted(case: Case, steps: int) -> dict[str, Any]:
        asked.append(case)
        return train_case(case, steps)

    monkeypatch.setattr(study, "train_case", counted)
    found = run(file, cases, steps=3)
    assert asked == cases[1:]
    key = cases[0].key(3)
    assert found[key] == first[key]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["name"] for row in rows] == ["dense", SMALL]
    assert all(0 < row["ce"] < 6 and row["steps"] == 3 for row in rows)


def test_another_length_or_recipe_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def counted(case: Case, steps: int) -> dict[str, Any]:
        asked.append((case.optimizer.name, steps))
        return {"ce": 1.0 * steps, "early": 2.0, "seconds": 0.0, "parameters": 1, "steps": steps}

    monkeypatch.setattr(study, "train_case", counted)
    file, case = tmp_path / "rows.jsonl", Case("dense", partition="1,1")
    adam = replace(case, optimizer=OptimizerConfig(name="adamw"))
    slow = replace(case, optimizer=OptimizerConfig(lr_relay=1e-4))
    run(file, [case], steps=3)
    run(file, [case], steps=5)
    found = run(file, [case, adam, slow], steps=5)
    assert asked == [("muon+adamw", 3), ("muon+adamw", 5), ("adamw", 5), ("muon+adamw", 5)]
    assert {key[-1]: row["ce"] for key, row in found.items()} == {3: 3.0, 5: 5.0}
    assert [row["steps"] for row in found.values()] == [3, 5, 5, 5]


def test_the_parts_that_are_named_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def ran(file: Path, cases: Sequence[Case], steps: int) -> dict[Any, Any]:
        asked.append((file, steps, cases))
        return {}

    monkeypatch.setattr(study, "run", ran)
    file = str(tmp_path / "rows.jsonl")
    study.main([file, "mamba2", "--steps", "9", "--seeds", "1", "--optimizer", "adamw", "--relays", "0.5"])
    study.main([file, "hybrid", "sweeps"])
    study.main([file])
    (_, steps, first), (_, usual, second), (_, _, third) = asked
    assert (steps, usual) == (9, study.STEPS)
    assert [case.name for case in first] == [
        *("dense", "shallow", study.FINE, study.RESIDUAL),
        study.PUBLISHED[32],
    ]
    assert {case.architecture for case in first} == {"mamba2"}
    assert {case.optimizer for case in first} == {OptimizerConfig(name="adamw", lr_relay=0.5)}
    assert second == [*headline("hybrid"), *sweeps("hybrid")]
    assert len(third) == (2 * 7 + 2 * 5) * 3 + sum(len(sweeps(kind)) for kind in get_args(Architecture))
    for wrong in (["rnn"], ["--steps", "0"], ["--seeds", "0"], ["--steps", "many"]):
        with pytest.raises(SystemExit):
            study.main([file, *wrong])


def test_the_table_measures_from_dense_and_from_shallow() -> None:
    def rows(name: str, values: Sequence[float], steps: int = 3) -> list[dict[str, Any]]:
        shared = {"architecture": "mamba3", "name": name, "recipe": "adamw", "steps": steps, "early": 2.0}
        return [{**shared, "seed": seed, "ce": ce} for seed, ce in enumerate(values)]

    console = Console(width=120, record=True, file=io.StringIO())
    longer = [*rows("dense", [0.5], 9), *rows("S=8", [0.6], 9)]
    shorter = [*rows("dense", [1.0, 1.2]), *rows("shallow", [1.5]), *rows("S=8", [1.1, 1.3])]
    console.print(table([*shorter, *longer]))
    lines = [line.replace("│", " ").split() for line in console.export_text().splitlines() if "S=8" in line]
    assert lines == [
        ["mamba3", "S=8", "adamw", "3", "1.2000", "0.1414", "2.0000", "2", "+0.1000", "-0.3000"],
        ["mamba3", "S=8", "adamw", "9", "0.6000", "–", "2.0000", "1", "+0.1000", "–"],
    ]
