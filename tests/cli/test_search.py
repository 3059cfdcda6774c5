import json
import signal
from pathlib import Path
from typing import Any

import pytest

from topograd.cli.main import INTERRUPTED
from topograd.cli.search_tables import soft_table
from topograd.search import property_probes
from topograd.search.measured import Trained
from topograd.training.trainer import Trainer

SIZE = "--layers 4 --width 16 --heads 2 --context 16 --batch 2 --eval-bytes 300 --steps 12"


@pytest.fixture(autouse=True)
def _short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(property_probes, "STEPS", 2)


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
        ("--layers 13 --stages 2", 'costs has no "1,13" and 11 more'),
        ("--layers 4", '"a,b" with 0 <= a < b <= 4'),
        ("--layers 0", "--layers is 0"),
        ("--layers 99999999999999999999", "--layers is 99999999999999999999; it must be below 2^63"),
        ("--layers 999999", "--layers is 999999"),
        ("--layers inf", "--layers is 'inf'; it must be a whole number"),
        ("", "--costs needs --layers too"),
        ("--layers 12 --seed 3", "--seed was given with --costs, which need no probes"),
        ("--run runs/none", "give either --run, a trained run, or --costs, a JSON file"),
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
    assert "--costs is []; it must be one JSON object" in call(*words, bad).refusal


def test_dp_of_a_run_probes_its_own_costs(staged: Path, call: Any, tmp_path: Path) -> None:
    words = ("search", "dp", "--run", staged, "--batches", 2)
    answer = call(*words, "--stages", 2, "--json").json
    assert answer["partition"] == [1, 1]
    assert answer["cost"] == pytest.approx(answer["costs"]["0,1"] + answer["costs"]["1,2"])
    assert (answer["run"], answer["batches"], answer["seed"]) == (str(staged), 2, 0)
    assert call(*words, "--json").json == call(*words, "--json").json
    assert call(*words, "--seed", 2**63 - 1, "--json").json["costs"] != answer["costs"]
    again = tmp_path / "costs.json"
    again.write_text(json.dumps(answer["costs"]))
    kept = call("search", "dp", "--costs", again, "--layers", 2, "--stages", 2, "--json").json
    assert kept == {"partition": [1, 1], "cost": answer["cost"]}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "give either --run, a trained run, or --costs"),
        ("--run nowhere", "there is no run at nowhere"),
        ("--run nowhere --layers 3", "--layers was given with --run, which has its own"),
        ("--run nowhere --seed -1", "--seed is -1; it must be at least 0"),
        ("--run nowhere --batches 0", "--batches is 0; it must be at least 1"),
    ],
)
def test_dp_of_a_run_refuses(words: str, why: str, call: Any) -> None:
    assert why in call("search", "dp", *words.split()).refusal


def test_dp_of_a_run_asks_for_stages_that_can_be(staged: Path, call: Any) -> None:
    assert (
        "3 stages need 3 layers and there are 2"
        in call("search", "dp", "--run", staged, "--stages", 3).refusal
    )


def test_soft_is_a_run(corpus: Path, call: Any, tmp_path: Path) -> None:
    folder = tmp_path / "soft"
    words = ("search", "soft", *SIZE.split(), "--data", corpus, "--stages", 2, "--min-depth", 2)
    answer = call(*words, "--out", folder, "--json").json
    assert (answer["partition"], answer["run"], answer["finished"]) == ([2, 2], str(folder), True)
    assert len(answer["grad_scales"]) == 3
    assert all(0 < lam < 1 for lam in answer["grad_scales"])
    assert call("search", "soft", "--resume", folder, "--json").json == answer
    assert call("train", "--resume", folder, "--json").json["bpb"] == answer["bpb"]
    assert call("eval", folder, "--json").json["bpb"] == answer["bpb"]
    row = call("compare", folder, "--json").json["runs"][0]
    assert (row["partition"], row["bpb"]) == ([2, 2], answer["bpb"])
    assert call("generate", folder, "--prompt", "stage", "--tokens", 3).code == 0
    assert call("report", folder).code == 0
    assert "2,2" in call("search", "soft", "--resume", folder).out
    assert "is no run of search surgery" in call("search", "surgery", "--resume", folder).refusal
    assert "already holds a run" in call(*words, "--out", folder).refusal
    with_size = call("search", "soft", "--resume", folder, "--steps", 9)
    assert "--steps cannot be given with --resume" in with_size.refusal


def test_a_soft_run_that_is_interrupted_goes_on(
    corpus: Path, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("search", "soft", *SIZE.split(), "--data", corpus)
    whole = call(*words, "--out", tmp_path / "whole", "--json").json
    step = Trainer._one_step

    def interrupted(self: Trainer) -> list[float]:
        if self.step == 5:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_one_step", interrupted)
        stopped = call(*words, "--out", tmp_path / "parts", "--json")
    assert stopped.code == INTERRUPTED
    assert json.loads(stopped.out)["partition"] is None
    assert "topograd search soft --resume" in stopped.err
    assert "not hardened yet" in str(soft_table(json.loads(stopped.out)).columns[1]._cells)
    answer = call("search", "soft", "--resume", tmp_path / "parts", "--json").json
    assert answer == whole | {"run": str(tmp_path / "parts")}


def test_surgery_is_a_run(corpus: Path, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("search", "surgery", *SIZE.split(), "--data", corpus, "--every", 4, "--deployment", "modular")
    answer = call(*words, "--json").json
    assert answer["run"] == "runs/tiny-surgery-4-s0", "by default a new folder in runs/"
    assert [done["step"] for done in answer["operations"]] == [4, 8]
    assert answer["operations"][0]["before"] == [4]
    assert answer["partition"] == answer["operations"][-1]["after"]
    assert call("eval", answer["run"], "--json").json["bpb"] == answer["bpb"]
    assert "before" in call("search", "surgery", "--resume", answer["run"]).out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("soft --stages 5", "5 stages need 5 layers"),
        ("soft --layers 4 --heads 3", "it must be a multiple of twice the 3 heads"),
        ("soft --seed 9223372036854775808", "--seed is 9223372036854775808; it must be below 2^63"),
        ("soft --seed -1", "--seed is -1; it must be at least 0"),
        ("soft --eval-bytes 0", "--eval-bytes is 0; it must be at least 1"),
        ("soft --travel inf", "--travel is 'inf'; it must be a finite number"),
        ("soft --batch 99999999999", "--batch is 99999999999; it must be at most"),
        ("soft --data nowhere", "nowhere"),
        ("surgery --deployment moon", "--deployment is 'moon'; it must be one of"),
        ("surgery --partition 1,3", "--partition is '1,3'; it must be of stages of at least 2 layers"),
        (
            "surgery --partition 2,2 --stages 3",
            "--stages is 3, which surgery keeps, and partition is 2,2, of 2",
        ),
        ("surgery --partition 3,3", "partition 3,3 has 6 layers and the model has 4"),
        ("soft --resume nowhere", "there is no run at nowhere"),
        ("pareto --out x --rungs 4 2", "--rungs is [4, 2]; it must be rising numbers of steps"),
        ("pareto --out x --objectives speed", "property 'speed' is unknown; choose one of bpb"),
        ("pareto --out x --objectives wand", "--objectives is 'wand'; it must be a number, not a table"),
        ("pareto --out x --relay rubber", "--relay 'rubber' is unknown; choose one of identity"),
        ("pareto --out x --source layer:9", "source is 'layer:9'; early layers here are layer:1 to layer:3"),
        ("pareto --out x --source nowhere", "source is 'nowhere'; it must be embedding"),
        ("pareto --out x --objective love", "objective 'love' is unknown"),
        ("pareto --out x --objective distillation", "needs a teacher"),
        ("pareto --out x --decoder -1", "decoder is -1"),
        ("pareto --out x --grad-bits 5", "--grad-bits may be 5, which nothing uses in this space; let what"),
        ("pareto --out x --grad-scale 0 1 --grad-bits 5", "--grad-bits is 5; it must be 32, 16, 8, 4 or 3"),
        ("pareto --out x --grad-delay 0 1", "--grad-delay may be 1, which nothing uses"),
        ("pareto --out x --join gate", "--join may be gate, which nothing uses"),
        ("pareto --out x --steps 9", "--steps 9 is not the last of the rungs, 80"),
        ("pareto --out /dev/null/x", "cannot be a folder"),
        ("choose --deployment modular", "there is no run to choose"),
        ("choose nowhere --deployment modular", "there is no run at nowhere"),
        ("choose nowhere --deployment modular --properties speed", "property 'speed' is unknown"),
        ("choose nowhere", "--deployment"),
    ],
)
def test_what_cannot_be_is_one_line(
    words: str, why: str, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert why in call("search", *words.split()).refusal
    assert not list(tmp_path.glob("runs/*/config.toml"))


def test_pareto_goes_on(corpus: Path, tmp_path: Path, call: Any) -> None:
    size = SIZE.replace(" --steps 12", "").split()
    words = ("search", "pareto", "--out", tmp_path / "study", *size, "--data", corpus, "--rungs", 2, 4)
    first = call(*words, "--trials", 1, "--json").json
    second = call(*words, "--trials", 3, "--json").json
    assert len(first["trials"]) == 1
    assert [row["partition"] for row in second["trials"][:1]] == [row["partition"] for row in first["trials"]]
    assert second["space"] == 16
    assert second["objectives"] == {"bpb": "minimize", "gradient_depth": "minimize"}
    done = [row for row in second["trials"] if row["state"] == "complete"]
    assert any(row["on_front"] for row in done)
    assert all(row["values"]["gradient_depth"] == max(row["partition"]) for row in done)
    assert "front" in call(*words, "--trials", 3).out
    other = call(*words, "--trials", 3, "--seed", 3)
    assert "study 'pareto' has trainings with other settings" in other.refusal
    assert "has other space" in call(*words, "--stage-heads", "shared").refusal


def test_pareto_ranges_over_topologies_with_measured_terms(corpus: Path, tmp_path: Path, call: Any) -> None:
    size = SIZE.replace(" --steps 12", "").split()
    space = "--graph chain forest --stage-heads shared low-rank --relay identity gate --min-depth 2 "
    space += "--source none embedding --join identity low-rank --decoder 0 1 "
    space += "--objective cross-entropy residual z-loss"
    six = ["bpb", "coupling", "head", "capability", "bandwidth", "calibration", f"max:{__name__}:rows"]
    words = ("search", "pareto", "--out", tmp_path / "study", *size, "--data", corpus, *space.split())
    found = call(*words, "--objectives", *six, "--rungs", 1, "--trials", 2, "--json").json
    assert found["space"] == 2 * 2 * 2 + 3 * 2 * 2 * (2 * 3 + 1)
    assert found["objectives"][f"{__name__}:rows"] == "maximize"
    assert len(found["trials"]) == 2
    for row in found["trials"]:
        assert set(row["settings"]) == {"graph", "heads", "objective", "relay", "source", "join", "decoder"}
        assert 0 <= row["values"]["capability"] <= 1
        assert row["values"][f"{__name__}:rows"] > 1
    assert "graph" in (tmp_path / "study" / "pareto.html").read_text(encoding="utf-8")


def rows(trained: Trained) -> int:
    """A property of somebody else."""
    return len(trained.text.inputs)


def test_choose_ranks_runs_by_their_measured_utility(staged: Path, backprop: Path, call: Any) -> None:
    words = ("search", "choose", staged, backprop, "--deployment")
    answer = call(*words, "on-device", "--properties", "wand", f"{__name__}:rows", "--json").json
    runs = answer["runs"]
    assert [row["utility"] for row in runs] == sorted(row["utility"] for row in runs)
    assert {row["run"]: row["partition"] for row in runs} == {str(staged): [1, 1], str(backprop): [2]}
    for row in runs:
        terms, weights = row["terms"], answer["weights"]
        signs = {name: -1 if name == "capability" else 1 for name in terms}
        parts = [signs[n] * weights.get(n, 1.0) * value for n, value in terms.items()]
        assert row["utility"] == pytest.approx(sum(parts))
        assert terms["bpb"] == call("eval", row["run"], "--json").json["bpb"]["prediction"]
        assert set(row["properties"]) == {"wand", f"{__name__}:rows"}
    bits = call(*words, "datacenter", "--json").json["runs"]
    assert [row["utility"] for row in bits] == sorted(row["terms"]["bpb"] for row in bits)
    said = call(*words, "serving").out
    for term in ("bpb", "coupling", "head", "capability", "bandwidth", "calibration"):
        assert term in said


def test_it_must_be_told_how(call: Any) -> None:
    assert "choose one of dp, soft, surgery, pareto, choose" in call("search").refusal
