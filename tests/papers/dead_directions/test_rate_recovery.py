"""Table 9 in miniature, and both entries of a network that memorises against its own loss."""

import pytest
import torch
import torch.nn.functional as F

from papers.dead_directions import rate_recovery as study
from papers.dead_directions.catalogue.networks import trace_chain
from papers.outcome import asked
from papers.run import run_study
from topograd.geometry.rules.architectures import Chain


@pytest.fixture(scope="module")
def rows() -> list[study.Row]:
    return [row for seed in (0, 1) for row in study.memorised_rows(seed)]


def test_the_empirical_entry_is_that_of_the_loss() -> None:
    """Autograd through the softmax of the scaled logits, with the labels of t = 0."""
    t, s = torch.tensor([0.3, 0.1], dtype=torch.float64), 3.0
    found = study.dead_entries(t, torch.full_like(t, s), seed=1)
    trace = trace_chain(Chain(study.DEPTH, loss="cross-entropy"), torch.cat((t, t.new_zeros(1))), 300, 1)
    top = trace.outputs[-1].detach().topk(2)
    logits = s * trace.outputs / (top.values[:, :1] - top.values[:, 1:])
    labels = top.indices[:, 0].expand(3, -1)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    for layer, reading in enumerate(trace.backward.values()):
        (delta,) = torch.autograd.grad(loss, reading.at, retain_graph=True)
        unit = top.values[:, :1] - top.values[:, 1:]  # the input's scale, which the entry is not read with
        own = ((delta * unit / s) @ reading.along).square().mean(1)
        assert torch.allclose(found["empirical"][layer], own[:-1], rtol=1e-9)


def test_a_sure_network_keeps_the_ladder_in_both_entries(rows: list[study.Row]) -> None:
    sure = [row for row in rows if row["way"] == "confidence"]
    assert {row["s"] for row in sure} == set(study.SURE)
    for row in sure:
        assert row["slope"] == pytest.approx(row["ladder"], abs=0.01)
    least = {row["estimator"]: row["least"] for row in sure if row["s"] == 30 and row["layer"] == 4}
    assert least["empirical"] < 1e-25, "what the paper calls the numerical floor"


def test_memorising_along_the_approach_shifts_both_ladders(rows: list[study.Row]) -> None:
    for row in (row for row in rows if row["way"] == "growing"):
        gained = row["power"] * (2 if row["estimator"] == "empirical" else 1)
        assert row["ours"] == row["ladder"] + gained
        assert row["slope"] == pytest.approx(row["ours"], abs=0.05)
    said = {claim.name: claim.verdict for claim in study.memorised_claims(rows)}
    assert said["memorising along the approach: expected entry (Corollary 39)"] == "failed"
    assert said["memorising along the approach: empirical entry (Corollary 39)"] == "held"
    assert said["a sure network: empirical entry (B.2)"] == "failed"


def test_a_row_of_table_9_and_one_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "PRIMITIVES", {"plain": (Chain(2),), "turned": (Chain(2, rotation=0.3),)})
    found = [row for seed in (0, 1) for row in study.table_rows(seed)]
    assert [row["read"] for row in found] == [2] * 4
    assert all(claim.verdict == "held" for claim in study.table_claims(found))
    assert study.primitive_table(found).rows[0][:3] == ("plain", "1", "4")
    wrong = [{**row, "share": 1.5 + 0.01 * row["seed"]} for row in found]
    assert all(claim.verdict == "failed" for claim in study.table_claims(wrong))


def test_the_study_in_miniature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "PRIMITIVES", {"plain": (Chain(2),)})
    told: list[tuple[int, int]] = []
    record = run_study(asked("rate-recovery", "tiny", on_more=lambda *done: told.append(done)))
    assert told == [(1, 2), (2, 2)]
    assert record["verdict"] == "undecided at this size", "one seed"
    assert [table["header"][0] for table in record["tables"]] == ["primitive", "labels"]
    assert len(record["tables"][1]["rows"]) == 2 * (len(study.SURE) + len(study.GROWING))


def test_a_refused_slope_decides_nothing(rows: list[study.Row]) -> None:
    bare = [{**row, "slope": None} if row["layer"] == 1 else row for row in rows]
    assert {claim.verdict for claim in study.memorised_claims(bare)} == {"undecided at this size"}
    assert "refused" in study.slope_table(bare).rows[0]
