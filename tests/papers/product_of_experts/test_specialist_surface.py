"""The surface of depth and text in miniature: the kept states are the base's, less text is part of more."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from papers.kept import Kept
from papers.outcome import asked
from papers.product_of_experts import specialist_surface as study
from papers.run import run_study
from topograd.exec.forward import Predictor
from topograd.runs.folder import Run
from topograd.runs.session import open_session
from topograd.specialists.attach import attach

SMALL = study.Size({32: 2, 64: 1}, context=8, batch=2, heldout=2, depths=(0, 1, 2))


@pytest.fixture
def made(straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> study.Surface:
    monkeypatch.setattr(study, "headers", lambda: (["int first = 1;\n" * 80], ["int second = 2;\n" * 80]))
    return study.Surface(
        "reference", open_session(straight.folder), SMALL, asked("specialist-surface", "tiny"), tmp_path
    )


def test_the_study_in_miniature(straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "folders", lambda asked: {"reference": straight.folder})
    monkeypatch.setattr(study, "SIZES", {"tiny": {"reference": SMALL}})
    found = run_study(asked("specialist-surface", "tiny", kept=Kept(tmp_path / "kept.jsonl")))
    cells = {(row["layers"], row["tokens"]) for row in found["rows"]}
    assert len(cells) == len(found["rows"]) == 6
    assert len(found["claims"]) == 4


def test_what_is_read_from_kept_states_is_what_the_base_says(made: study.Surface) -> None:
    model = Predictor(made.session.stack, made.session.plan).eval()
    text, found = made.judges, made.base_bpb()
    with torch.no_grad():
        logits = model(text.inputs)
    nats = F.cross_entropy(logits.mT, text.targets, reduction="none").sum(1)
    expected = (nats / math.log(2) / text.nbytes)[::2]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0)


def test_a_specialist_that_has_not_learned_reads_as_its_base(made: study.Surface) -> None:
    row = made.cell(1, 32, 0, factor=0.0)
    assert row["bpb"] == made.base_bpb()
    assert made.cell(1, 32, 0, factor=1.0)["bpb"] != row["bpb"]


def test_less_text_is_part_of_more(made: study.Surface) -> None:
    few = study.First(made.states(made.learned, "learned"), 4)
    assert len(few) == 4
    assert torch.equal(few.rows(range(4)).inputs, made.learned.inputs[:4])


def test_the_base_stays(made: study.Surface) -> None:
    before = {name: tensor.clone() for name, tensor in made.session.stack.state_dict().items()}
    made.cell(2, 64, 0, factor=3.0)
    assert all(torch.equal(before[name], t) for name, t in made.session.stack.state_dict().items())
    assert not attach(made.session, []).stages


def test_claims_judge_the_gains() -> None:
    """Gains of depth and text that are made up; one of them turned around fails its claim."""

    def rows(sign: float) -> list[dict[str, object]]:
        return [
            {
                "base": "b",
                "layers": layers,
                "tokens": tokens,
                "before": [3.0, 3.0, 3.0],
                "bpb": [3.0 - gain - 0.001 * i for i in range(3)],
            }
            for layers in SMALL.depths
            for tokens in SMALL.passes
            for gain in [0.1 + 0.001 * tokens * (1 + sign * layers)]
        ]

    size = replace(SMALL)
    assert [claim.verdict for claim in study.claims("b", size, rows(1.0))] == ["held"] * 4
    assert [claim.verdict for claim in study.claims("b", size, rows(-0.4))][2:] == ["failed"] * 2
