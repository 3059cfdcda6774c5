"""The rank that is read off a checkpoint: spectra at the right boundaries, arms of equal steps, claims."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from papers.latent_bounded_interfaces import interface_rank as study
from papers.outcome import asked
from papers.run import run_study
from papers.verdicts import FAILED, HELD, UNDECIDED
from topograd.interfaces.adjoint_rank import boundary_ranks


@pytest.fixture(scope="module")
def trainings() -> study.Trainings:
    return study.Trainings(study._config(asked("interface-rank", "tiny"), seed=0), rates=(0.01, 0.01))


def test_all_directions_make_the_dense_model(trainings: study.Trainings) -> None:
    """The positive control: interfaces of full rank change nothing, whatever their directions."""
    trained, width = trainings.dense(), trainings.config.model.width
    expected = trainings.loss(*trainings.continued(trained))
    for basis in ("adjoints", "fixed"):
        words = f"residual:r={width},basis={basis}"
        assert trainings.loss(*trainings.continued(trained, words)) == pytest.approx(expected, abs=1e-5)
    narrow = trainings.loss(*trainings.continued(trained, "residual:r=1"))
    assert abs(narrow - expected) > 1e-4


def test_a_checkpoint_is_left_as_it_was(trainings: study.Trainings) -> None:
    trained = trainings.dense()
    before = {name: value.clone() for name, value in trained[0].state_dict().items()}
    trainings.continued(trained, "residual:r=2,basis=hidden")
    assert all(torch.equal(before[name], value) for name, value in trained[0].state_dict().items())


def test_spectra_are_those_that_interfaces_rank_reads(trainings: study.Trainings) -> None:
    trained = trainings.dense()
    loader, batches = trainings.loader(0), []
    for _ in range(study.READ):
        batches.append(next(loader))
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    read = {row["layer"]: row["rank_90"] for row in boundary_ranks(*trained, inputs, targets)}
    spectra = study.boundary_spectra(trainings, *trained)
    assert [study.energy_rank(singular, 0.9) for singular in spectra] == [read[2], read[4]]
    for singular in spectra:
        needed = study.energy_rank(singular, 0.9)
        assert study.energy(singular, needed - 1) < 0.9 <= study.energy(singular, needed)
        assert study.energy(singular, 0) == 0


def made_up(**changed: float) -> list[dict[str, Any]]:
    values = {"dense": 1.0, "shallow": 2.0, "adjoints, r as read": 1.05, "hidden, r = 2/8 d": 1.6}
    values |= {"fixed, r = 2/8 d": 1.7, "from scratch, r = 2/8 d": 1.8}
    held = {1: 0.3, 2: 0.5, 4: 0.8, 6: 0.95}
    values |= {f"adjoints, r = {part}/8 d": 2 - share for part, share in held.items()}
    offset = changed.pop("offset", 0.0)
    values |= changed
    rows = []
    for seed in range(3):
        for arm, ce in values.items():
            part = next((part for part in held if arm == f"adjoints, r = {part}/8 d"), None)
            share = 0.9 if part is None else held[part] + offset
            noise = 1e-3 * seed * (1 + len(arm) / 100)
            rows.append({"seed": seed, "arm": arm, "r": part or 9, "energy": share, "ce": ce + noise})
    return rows


def verdicts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in study._claims(rows)}


def test_all_claims_hold_by_what_was_measured() -> None:
    assert set(verdicts(made_up()).values()) == {HELD}
    assert study._table(made_up()).rows[-4][-1].startswith("30 % [")


@pytest.mark.parametrize(
    ("claim", "changed"),
    [
        ("the rank that is read is enough", {"adjoints, r as read": 1.3}),
        ("energy says what is kept", {"offset": 0.3}),
        ("directions of adjoints beat random ones", {"fixed, r = 2/8 d": 1.4}),
        ("they beat those of hidden states", {"hidden, r = 2/8 d": 1.4}),
        ("a checkpoint is a good start", {"from scratch, r = 2/8 d": 1.5}),
    ],
)
def test_each_claim_can_fail(claim: str, changed: dict[str, float]) -> None:
    assert verdicts(made_up(**changed))[claim] == FAILED


def test_other_seeds_see_other_batches(trainings: study.Trainings) -> None:
    other = study.Trainings(replace(trainings.config, seed=1), rates=(0.01, 0.01))
    first = [next(one.loader(part))[0] for one in (trainings, other) for part in (0, 1)]
    assert len({tuple(batch.flatten().tolist()) for batch in first}) == 4


def test_the_study_in_miniature() -> None:
    record = run_study(asked("interface-rank", "tiny"))
    assert record["verdict"] == UNDECIDED, "one seed"
    assert [row["arm"] for row in record["rows"]][:2] == ["dense", "shallow"]
    json.dumps(record)
