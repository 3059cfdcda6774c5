"""A training and its readings in miniature."""

import pytest
import torch
from torch import nn

from papers.dead_directions import grokking as study
from papers.dead_directions.grokking_verdicts import SIGNALS
from papers.dead_directions.optimizer_tasks import modular
from topograd.geometry.factors import kfac_factors
from topograd.geometry.monitors.phase import weight_norm
from topograd.geometry.monitors.stream import find_layers


@pytest.fixture(scope="module")
def row() -> study.Row:
    return study.trained(study.ARMS[0], seed=1, steps=6, width=8, sampling=study.TINY)


def test_a_row_has_every_signal_at_every_reading(row: study.Row) -> None:
    steps = [point["step"] for point in row["points"]]
    assert steps == list(range(7))
    sampled = [point["step"] for point in row["points"] if point["coefficient"] is not None]
    assert sampled == [0, study.EVERY]
    names = {"train_accuracy", "test_accuracy", "test_loss", "expected", "schur", "phase"}
    assert all(point.keys() >= names | set(SIGNALS) - {"unexplained"} for point in row["points"])


def test_losses_are_of_their_own_pairs(row: study.Row) -> None:
    torch.manual_seed(1)
    model = study.SumStream(study.MODULUS, 8).double()
    task = modular(share=0.5, seed=1)
    first = row["points"][0]
    for kind, (pairs, sums) in (("train", task.learnt), ("test", task.unseen)):
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(pairs), sums)
        assert first[f"{kind}_loss"] == pytest.approx(float(loss), rel=1e-12)
    assert first["loss"] == pytest.approx(first["train_loss"], rel=1e-12), "the probe is what is learned"
    assert first["norm"] == pytest.approx(weight_norm(model), rel=1e-12)
    found = kfac_factors(model, task.learnt, "cross-entropy", "expected")["layers.0.up"].G.trace()
    assert first["expected"] == pytest.approx(float(found), rel=1e-12)


def test_the_controls_share_the_probe() -> None:
    """So that readings are comparable: the first is of the same weights on the same pairs."""
    rows = [study.trained(arm, 0, 0, 8, study.TINY) for arm in study.ARMS]
    firsts = [row["points"][0] for row in rows]
    for name in ("loss", "norm", "sigma", "schur", "empirical", "coefficient"):
        assert len({first[name] for first in firsts}) == 1, name
    assert firsts[2]["test_loss"] is None, "all pairs are learned"
    learnt, unseen = modular(share=0.5, seed=3).learnt[0], modular(share=0.5, seed=3).unseen[0]
    assert len({tuple(pair.tolist()) for pair in (*learnt, *unseen)}) == study.MODULUS**2


def test_the_network_has_one_stream() -> None:
    model = study.SumStream(5, 8)
    (layer,) = find_layers(model).values()
    assert layer(torch.zeros(2, 8)).shape == (2, 8)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    x = torch.randn(2, 8)
    assert torch.equal(layer(x), x), "a branch beside the identity"
