"""The study of topologies on pictures in miniature: every arm builds, learns and is in the tables."""

from dataclasses import replace

import pytest

from papers.outcome import asked
from papers.product_of_experts import image_topologies
from papers.product_of_experts.image_topologies import groups
from papers.run import run_study


def test_every_arm_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    small = tuple(replace(group, steps=1) for group in groups(asked("image-topologies", "tiny")))
    monkeypatch.setattr(image_topologies, "groups", lambda preset: small)
    found = run_study(asked("image-topologies", "tiny", seeds=1))
    assert len(found["rows"]) == sum(len(group.arms) for group in small)
    assert len(found["tables"]) == 6
    for table in found["tables"]:
        assert all(len(row) == len(table["header"]) for row in table["rows"])
    assert found["verdict"] == "undecided at this size"
    by_name = {(row["network"], row["arm"]): row for row in found["rows"]}
    assert by_name["mlp", "autoencoders"]["exit_depth"] is None
    assert len(by_name["vgg", "flat"]["prefix"]) == 2


def test_the_papers_arms_are_all_there() -> None:
    names = {arm.name for arm in groups(asked("image-topologies", "small"))[0].arms}
    assert names >= {
        "backprop",
        "flat",
        "clustered",
        "hierarchical",
        "forest",
        "diversity",
        "decoders",
        "log-odds backprop",
        "autoencoders",
        "target propagation",
        "byol",
        "ridge",
        "forward-forward",
    }
