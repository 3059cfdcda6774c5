import json
from pathlib import Path
from typing import Any

import pytest

from topograd.cli import main

SIZE = "--layers 4 --width 16 --heads 2 --context 16 --batch 2 --eval-bytes 300 --steps 12"


@pytest.fixture(autouse=True)
def _verb(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb is there, whether or not the list of verbs has it yet."""
    monkeypatch.setitem(main.VERBS, "search", "choose where gradients stop")


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    """Stages cost their squared depth, so that even ones are cheapest."""
    path = tmp_path / "costs.json"
    intervals = ((a, b) for a in range(12) for b in range(a + 1, 13))
    path.write_text(json.dumps({f"{a},{b}": (b - a) ** 2 for a, b in intervals}))
    return path


def test_dp(costs: Path, call: Any) -> None:
    words = ("search", "dp", "--layers", 12, "--costs", costs)
    assert call(*words, "--stages", 3, "--json").json == {"partition": [4, 4, 4], "cost": 48}
    assert call(*words, "--json").json == {"partition": [1] * 12, "cost": 12}
    answer = call(*words, "--max-stages", 4, "--min-depth", 4, "--json").json
    assert answer["partition"] == [4, 4, 4]
    assert "4,4,4" in call(*words, "--stages", 3).out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--layers 12 --stages 13", "13 stages need 13 layers and there are 12; ask for at most 12 stages"),
        ("--layers 12 --stages 3 --min-depth 5", "3 stages of at least 5 layers each need 15 layers"),
        ("--layers 13 --stages 2", 'the cost of "1,13" is missing and of 11 more'),
        ("--layers 4", '"a,b" with 0 <= a < b <= 4'),
        ("--layers 0", "the number of layers is 0"),
    ],
)
def test_dp_refuses(words: str, why: str, costs: Path, call: Any) -> None:
    assert why in call("search", "dp", *words.split(), "--costs", costs).refusal


def test_dp_refuses_files(tmp_path: Path, call: Any) -> None:
    words = ("search", "dp", "--layers", 2, "--costs")
    assert "cannot be read" in call(*words, tmp_path / "none.json").refusal
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    assert "is not JSON" in call(*words, bad).refusal
    bad.write_text("[]")
    assert "give one JSON object" in call(*words, bad).refusal


def test_soft(corpus: Path, call: Any) -> None:
    words = ("search", "soft", *SIZE.split(), "--data", corpus, "--stages", 2, "--min-depth", 2)
    answer = call(*words, "--json").json
    assert answer["partition"] == [2, 2]
    assert len(answer["transmissivities"]) == 3
    assert all(0 < lam < 1 for lam in answer["transmissivities"])
    assert "2,2" in call(*words).out
    assert "5 stages need 5 layers" in call(*words[:-4], "--stages", 5).refusal


def test_surgery(corpus: Path, call: Any) -> None:
    words = ("search", "surgery", *SIZE.split(), "--data", corpus, "--every", 4, "--deployment", "modular")
    answer = call(*words, "--json").json
    assert [done["step"] for done in answer["operations"]] == [4, 8]
    assert answer["operations"][0]["before"] == [4]
    assert answer["partition"] == answer["operations"][-1]["after"]
    assert "before" in call(*words).out
    assert "'moon' is unknown" in call(*words[:-1], "moon").refusal


def test_pareto_goes_on(corpus: Path, tmp_path: Path, call: Any) -> None:
    size = SIZE.replace(" --steps 12", "").split()
    words = ("search", "pareto", "--out", tmp_path / "study", *size, "--data", corpus, "--rungs", 2, 4)
    first = call(*words, "--trials", 2, "--json").json
    second = call(*words, "--trials", 4, "--json").json
    assert len(first["trials"]) == 2
    assert [row["partition"] for row in second["trials"][:2]] == [row["partition"] for row in first["trials"]]
    assert second["space"] == 16
    assert second["objectives"] == {"bpb": "minimize", "gradient_depth": "minimize"}
    done = [row for row in second["trials"] if row["state"] == "complete"]
    assert any(row["on_front"] for row in done)
    assert all(row["values"]["gradient_depth"] == max(row["partition"]) for row in done)
    assert "front" in call(*words, "--trials", 4).out
    assert "not the last of the rungs" in call(*words, "--steps", 9).refusal
    assert "objective 'speed' is unknown" in call(*words, "--objectives", "speed").refusal


def test_it_must_be_told_how(call: Any) -> None:
    assert "choose one of dp, soft, surgery, pareto" in call("search").refusal
