"""Every study is listed, with its paper, in words and in JSON."""

from typing import Any

from papers.list import GROUPS
from papers.studies import STUDIES


def test_list(call: Any) -> None:
    listed = call("list", "--json").json["studies"]
    assert [study["name"] for study in listed] == list(STUDIES)
    assert all(study["prediction"].endswith(".") for study in listed)
    for study in listed:
        for size in study["presets"].values():
            assert size["minutes"] > 0
            assert size.keys() <= {"steps", "width", "seeds", "minutes"}
    assert listed[0]["presets"]["small"] == {"steps": 300, "width": 48, "seeds": 3, "minutes": 3}
    hidden = {
        "interfaces",
        "leak",
        "jacobians",
        "learning-coefficient",
        "minilm",
        "chain-rates",
        "optimizers",
    }
    assert {study["name"] for study in listed} >= {*hidden, "fields", "fields-digits"}
    assert "experiment-e" in call("list").out


def test_every_study_has_a_paper(call: Any) -> None:
    listed = call("list", "--json").json["studies"]
    assert {study["paper"] for study in listed} == GROUPS.keys()
    papers = {study["name"]: study["paper"] for study in listed}
    assert papers["gap"] == "product-of-experts"
    assert papers["pruning"] == "beyond"
    for study in listed:
        assert study.keys() == {"name", "paper", "title", "prediction", "presets"}
