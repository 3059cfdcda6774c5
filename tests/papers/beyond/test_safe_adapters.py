"""Safe adapters against their peers in miniature: every arm begins at the model and leaves it as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from papers.beyond import safe_adapters as study
from papers.beyond.safe_adapter_tables import at_end, at_level, claims, learnable
from papers.outcome import asked
from papers.run import run_study
from papers.verdicts import HELD
from topograd.nn.lora import corrected_maps, has_lora
from topograd.runs.folder import Run
from topograd.runs.session import open_session

SMALL = study.Size(
    length=8, old=6, judged=2, prose=1, new=4, tested=2, rank=2, rates=(3e-3,), held_rates=(3e-2,),
    arms=tuple(arm.name for arm in study.ARMS),
)  # fmt: skip
ARMS = {arm.name: arm for arm in study.ARMS}


@pytest.fixture(scope="module")
def small(straight: Run) -> study.Study:
    return study.Study("own", open_session(straight.folder), SMALL, asked("safe-adapters", "tiny", steps=2))


def test_the_study_in_miniature(straight: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "folders", lambda asked: {"reference": straight.folder})
    monkeypatch.setattr(study, "TINY", SMALL)
    monkeypatch.setattr(study, "TEXTS", {"facts": study.facts})
    found = run_study(asked("safe-adapters", "tiny", steps=2))
    assert [row["arm"] for row in found["rows"]] == list(ARMS)
    assert all(len(row["new"]) == len(row["old"]) == 3 for row in found["rows"])


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_leaves_the_model_as_it_was(small: study.Study, name: str) -> None:
    before = {n: p.clone() for n, p in small.model.named_parameters()}
    row = small.learn(ARMS[name], "facts", 0, 1e-2)
    assert row["new"][-1] != row["new"][0]
    assert not any(has_lora(module) for module in small.model.modules())
    assert all(torch.equal(p, before[n]) for n, p in small.model.named_parameters())


def test_oplora_leaves_the_leading_directions_alone(
    small: study.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    spare = small._spare

    def watch(leading: Any) -> None:
        spare(leading)
        for name, (U, V) in leading.items():
            module = corrected_maps(small.model)[name]
            a, b = (module.get_parameter(part).detach() for part in ("lora_a", "lora_b"))
            seen.extend([float((a @ V).abs().max()), float((U.T @ b).abs().max())])

    monkeypatch.setattr(small, "_spare", watch)
    small.learn(ARMS["oplora"], "facts", 0, 1e-2)
    assert seen
    assert max(seen) < 1e-5


def row(text: str, arm: str, seed: int, new: list[float], old: list[float]) -> dict[str, Any]:
    more = {"rate": 0.1, "parameters": 3, "prose": 1.0}
    return {"base": text, "arm": arm, "seed": seed, "new": new, "old": [[x] for x in old], **more}


def test_claims_are_over_texts_and_seeds_where_something_is_learned() -> None:
    rows = []
    for seed in range(3):
        for text in ("a", "b"):
            for arm in ("lora", "safe", "dead", "oplora", "replay"):
                lost = 0.01 if arm == "safe" else 0.4 + 0.01 * seed
                rows.append(row(text, arm, seed, [4.0, 3.0, 2.0], [1.0, 1.0 + lost / 2, 1.0 + lost]))
        rows += [row("flat", arm, seed, [4.0, 4.0, 3.99], [1.0, 1.0, 1.0]) for arm in ("lora", "safe")]
    assert learnable(["a", "b", "flat"], rows) == ["a", "b"]
    assert at_end(rows, ["a"], "safe") == pytest.approx([0.01] * 3)
    assert at_level(rows, ["a"], "lora") == pytest.approx([0.2, 0.205, 0.21])
    judged = {claim.name: claim.verdict for claim in claims("own", ["a", "b", "flat"], rows)}
    assert len(judged) == 6
    assert set(judged.values()) == {HELD}


def test_a_rate_is_chosen_between_two_others() -> None:
    tried: list[float] = []

    def loss(rate: float) -> float:
        tried.append(rate)
        return abs(rate - 0.9)

    assert study.best_between((4.0, 8.0, 16.0), loss) == 1.0
    assert sorted(tried) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert study.best_between((0.5, 1.0, 2.0), loss) == 1.0
