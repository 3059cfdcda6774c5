"""The planted label: what the rows are, that only a message brings it, and that it is learned."""

import json
from typing import Any

import pytest
import torch

from papers.latent_bounded_interfaces import planted_message as study
from papers.outcome import asked
from papers.run import run_study
from papers.verdicts import FAILED, HELD, UNDECIDED


def test_the_last_tokens_tell_the_first() -> None:
    inputs, targets = study.planted(50, torch.Generator().manual_seed(0))
    assert (inputs[:, :1] < study.LABELS).all()
    assert (inputs[:, 1:] >= study.LABELS).all(), "the label stands nowhere else"
    shown = targets != -100
    assert torch.equal(shown, inputs == study.LABELS + study.FILLERS)
    assert torch.equal(targets[shown], inputs[:, :1].expand(-1, study.HIDDEN).flatten())


def test_the_published_interface_learns_what_only_a_message_can_tell() -> None:
    """A positive control of its training: Enc, α, LN and Dec all have to be connected."""
    row = study.measure_planted(0.001, width=16, steps=300, seed=0)
    assert row["ce"] < 0.1 * study.CHANCE
    assert row["shuffled"] > study.CHANCE
    assert min(row["spread"]) > 0.3


def test_without_a_message_the_label_is_out_of_sight() -> None:
    """No gradient of what the last positions say reaches the first position of a dense model."""
    torch.manual_seed(0)
    row = study.measure_planted(None, width=16, steps=60, seed=0)
    assert abs(row["ce"] - study.CHANCE) < 0.2
    assert "shuffled" not in row


def made_up(**changed: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    values = {"dense": 1.0, "shallow": 2.0, "slow": 1.5, "fast": 1.9, "learned": 0.01, "blind": study.CHANCE}
    values |= {"heard": 0.2, "planted_heard": 3.0, "live": 0.9, "dead": 0.01} | changed
    for seed in range(3):
        noise = 1e-3 * seed
        arms: list[tuple[str, str, float | None, float]] = [("planted", "dense", None, values["blind"])]
        arms += [("text", arm, study.SLOW, values[arm]) for arm in ("dense", "shallow")]
        rows += [
            {"task": task, "arm": arm, "rate": rate, "seed": seed, "ce": ce + noise}
            for task, arm, rate, ce in arms
        ]
        for task, slow, fast in (
            ("planted", values["learned"], study.CHANCE),
            ("text", values["slow"], values["fast"]),
        ):
            for rate, ce, spread in ((study.SLOW, slow, values["live"]), (study.FAST, fast, values["dead"])):
                heard = values["planted_heard"] if task == "planted" else values["heard"]
                rows.append(
                    {
                        "task": task,
                        "arm": "published",
                        "rate": rate,
                        "seed": seed,
                        "ce": ce + 1.1 * noise,
                        "shuffled": ce + heard + 2 * noise,
                        "spread": [0.5, spread + noise * rate],
                    }
                )
    return rows


def verdicts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in study._claims(rows)}


def test_all_claims_hold_or_fail_by_what_was_measured() -> None:
    assert set(verdicts(made_up()).values()) == {HELD}
    assert study._table(made_up()).rows[-1][-1].startswith("10 % [")


@pytest.mark.parametrize(
    ("claims", "changed"),
    [
        ({"only a message can tell"}, {"blind": 0.5}),
        ({"the published interface learns it"}, {"learned": 1.0}),
        ({"messages tell it"}, {"planted_heard": 0.1}),
        ({"a fast interface loses its messages", "on text too"}, {"live": 0.001}),
        ({"on text messages are used at the slow rate"}, {"heard": -0.1}),
        ({"the slow rate is better on text", "the slow rate beats shallow on text"}, {"slow": 2.1}),
    ],
)
def test_each_claim_can_fail(claims: set[str], changed: dict[str, float]) -> None:
    found = verdicts(made_up(**changed))
    assert {name for name, verdict in found.items() if verdict == FAILED} == claims


def test_the_study_in_miniature() -> None:
    record = run_study(asked("planted-message", "tiny", seeds=1))
    assert record["verdict"] == UNDECIDED, "one seed"
    assert len(record["rows"]) == 8
    json.dumps(record)
