"""Tables 2, 6 and 7: every claim by hand, both ways; what a row of the published interface has."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from papers.latent_bounded_interfaces import interface_quality as study
from papers.latent_bounded_interfaces import interfaces
from papers.latent_bounded_interfaces.interfaces import (
    FINE,
    PUBLISHED,
    RESIDUAL,
    Case,
    position_losses,
    prefix_losses,
    train_case,
    trained,
)
from papers.outcome import asked
from papers.verdicts import FAILED, HELD, UNDECIDED
from topograd.data import windows
from topograd.runs.config import OptimizerConfig

GOOD: Mapping[str, float] = {
    "dense": 1.5,
    "shallow": 1.7,
    FINE: 1.6,
    RESIDUAL: 1.55,
    **dict.fromkeys(PUBLISHED.values(), 1.58),
}


def made_up(
    ce: Mapping[str, float] = GOOD,
    *,
    honest: float = 0.05,
    one_layer: float = 0.1,
    local: float = 1.5,
    suffix: float = 0.7,
    shuffled: float = 0.2,
) -> list[dict[str, Any]]:
    """Every row, a little different for each of three seeds."""
    rows = []
    for case in study.cases(range(3)):
        noise = 0.0001 * case.seed * (1 + len(case.name))
        value = ce.get(case.name, ce[study.MIDDLE] + (one_layer if case.partition.count(",") == 7 else 0.0))
        published = case.interface in PUBLISHED.values()
        look = {"local_norm": [local + noise] * 2, "suffix_norm": [suffix + noise] * 2}
        rows.append(
            dict(zip(interfaces.KEY, case.key(400), strict=True))
            | {"ce": value + noise, "sample": value + noise, "honest": value + noise + honest * published}
            | {"shuffled": value + noise + shuffled * (1 + 0.01 * case.seed)}
            | ({"looks": [{}, {**look, "rms": [0.5], "message_spread": [0.3]}]} if published else {})
        )
    return rows


def verdicts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in study._claims(rows)}


def test_all_as_published() -> None:
    found = verdicts(made_up())
    assert set(found.values()) == {HELD}, found


def test_one_seed_decides_nothing() -> None:
    assert set(verdicts([row for row in made_up() if row["seed"] == 0]).values()) == {UNDECIDED}


@pytest.mark.parametrize(
    ("claim", "changed"),
    [
        ("depth is worth something", {"ce": {**GOOD, "dense": 1.8}}),
        ("positive control", {"ce": {**GOOD, RESIDUAL: 1.65}}),
        ("near the dense model", {"ce": {**GOOD, study.MIDDLE: 1.69}}),
        ("better than the control", {"ce": {**GOOD, study.MIDDLE: 1.75}}),
        ("better, honestly", {"honest": 0.3}),
        ("flattered", {"honest": -0.1}),
        ("causal", {"ce": {**GOOD, FINE: 1.8}}),
        ("messages are used", {"shuffled": -0.1}),
        ("rank does not matter", {"ce": {**GOOD, PUBLISHED[16]: 1.9}}),
        ("one layer a region is worst", {"one_layer": -0.1}),
        ("suffixes contract", {"suffix": 1.2}),
        ("regions amplify", {"local": 0.8}),
    ],
)
def test_each_claim_can_fail(claim: str, changed: dict[str, Any]) -> None:
    assert verdicts(made_up(**changed))[claim] == FAILED


def test_tables_have_every_model_and_seeds_of_one_architecture() -> None:
    rows = made_up()
    quality, sizes, norms = study.quality_table(rows), study.size_table(rows), study.norm_table(rows)
    assert len(quality.rows) == 2 * 7 + 2 * 5
    assert quality.rows[0][:4] == ("transformer", "dense", "1.5006 ± 0.0006", "+0.0000")
    assert [row[0] for row in sizes.rows] == ["transformer", "mamba3"]
    assert len(sizes.rows[0]) == 5
    assert norms.rows[0][0] == "16"
    assert norms.rows[0][1].startswith("1.50")
    half = next(row for row in quality.rows if row[:2] == ("transformer", RESIDUAL))
    assert half[6] == "74 % [73, 75]", "kept of depth: 1.7 - 1.55 of 1.7 - 1.5"
    published = next(row for row in quality.rows if row[:2] == ("transformer", study.MIDDLE))
    assert published[6].startswith("35 % ["), "read from prefixes, 0.05 worse"


def test_what_is_there_of_a_study_is_judged() -> None:
    """Tables, and the claims whose models are there; a seed without a control counts nowhere."""
    rows = made_up()
    whole = verdicts(rows)
    some = [
        row for row in rows if row["name"] not in (FINE, PUBLISHED[64]) and ", regions " not in row["name"]
    ]
    missing = {"causal", "rank does not matter", "one layer a region is worst"}
    missing |= {"suffixes contract", "regions amplify"}
    assert verdicts(some) == {name: verdict for name, verdict in whole.items() if name not in missing}
    study.size_table(some), study.norm_table(some)
    alone = [row for row in rows if (row["name"], row["seed"]) != ("shallow", 2)]
    assert len(study.kept(alone, "transformer", RESIDUAL)) == 2


def test_models_come_in_the_order_of_what_they_decide() -> None:
    names = [(case.name, case.seed) for case in study.cases(range(3))]
    assert {name for name, _ in names[:48]} == {"dense", "shallow", RESIDUAL, study.MIDDLE}
    assert [seed for _, seed in names[:48]] == [0] * 16 + [1] * 16 + [2] * 16


def test_a_row_of_the_published_interface(small_cases: None) -> None:
    """It is read from prefixes too, and its Jacobians along the way; a causal one is the same either way."""
    words = PUBLISHED[16]
    fast = OptimizerConfig(lr_relay=0.3)
    row = train_case(Case(words, interface=words, partition="1,1,1", optimizer=fast), steps=6)
    assert [look["step"] for look in row["looks"]] == [0, 1, 2, 3, 4, 5]
    assert all(len(look["local_norm"]) == 1 for look in row["looks"])
    assert row["honest"] != row["sample"], "the future was in sight"
    causal = "S=4,r=4,pool=tail"
    case = Case(causal, interface=causal, partition="1,1,1", optimizer=fast)
    stack, plan, data, _ = trained(case, steps=6)
    inputs, targets, _ = windows(data.heldout, data.tokenizer, 16, 100)
    alone, forced = (read(stack, plan, inputs, targets) for read in (prefix_losses, position_losses))
    torch.testing.assert_close(alone, forced, equal_nan=True)
    found = train_case(case, steps=6)
    assert found["honest"] == found["sample"]
    assert "looks" not in found
    assert found["shuffled"] != found["ce"]


def test_the_study_in_miniature(small_cases: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "FINE", "S=16,r=4,pool=tail")
    found = study.run(asked("interfaces", "tiny"))
    assert [row["name"] for row in found.rows] == ["dense", "S=16,r=4,pool=tail"]
    assert found.claims == ()
    assert len(found.tables) == 1
    assert found.verdict is None
