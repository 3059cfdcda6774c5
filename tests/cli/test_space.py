import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def test_show_says_everything(call: Any) -> None:
    answer = call("space", "show", "4,4,4", "--json").json
    assert answer["composition"] == [4, 4, 4]
    assert (answer["layers"], answer["stages"], answer["heads"]) == (12, 3, "shared")
    assert answer["terminals"] == [4, 8, 12]
    assert answer["boundaries"] == [4, 8]
    assert answer["boundary_vector"] == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]
    neighbours = answer["neighbours"]
    assert len(neighbours["finer"]) == 9
    assert [4, 1, 3, 4] in neighbours["finer"]
    assert neighbours["coarser"] == [[8, 4], [4, 8]]
    assert neighbours["moved"] == [[3, 5, 4], [5, 3, 4], [4, 3, 5], [4, 5, 3]]
    assert all(sum(parts) == 12 for group in neighbours.values() for parts in group)
    assert answer["properties"] == {
        "gradient_depth": 4,
        "activation_layers": 4,
        "pipeline_granularity": 3,
        "gradient_bits": 0,
        "staleness": 0,
        "stashed_layers": 0,
        "waiting_stages": 0,
        "vocabulary_projections": 3,
        "capability_region": True,
        "bubble": {"microbatches": 8, "backprop": 4 / 20, "staged": 2 / 18, "speedup": 20 / 18},
    }


def test_show_at_the_ends_of_the_lattice(call: Any) -> None:
    backprop = call("space", "show", "3", "--heads", "per-stage", "--json").json
    assert (backprop["heads"], backprop["boundaries"]) == ("per-stage", [])
    assert backprop["neighbours"] == {"finer": [[1, 2], [2, 1]], "coarser": [], "moved": []}
    assert backprop["properties"]["gradient_depth"] == 3
    assert not backprop["properties"]["capability_region"]
    assert backprop["properties"]["bubble"] == {"microbatches": 8, "backprop": 0, "staged": 0, "speedup": 1}
    late = call(
        "space", "show", "1,2", *["--grad-scale", "1", "--grad-delay", "1", "--grad-bits", "4", "--json"]
    ).json
    said = late["properties"]
    assert [said["gradient_bits"], said["staleness"], said["stashed_layers"]] == [4, 1, 1]
    assert said["waiting_stages"] == 0
    assert said["bubble"]["speedup"] > 1
    waits = call("space", "show", "1,2", "--grad-scale", "1", "--json").json["properties"]
    assert waits["waiting_stages"] == 1
    assert (waits["bubble"]["staged"], waits["bubble"]["speedup"]) == (waits["bubble"]["backprop"], 1)
    local = call("space", "show", "1, 1,1", "--microbatches", "2", "--json").json
    assert local["neighbours"]["finer"] == []
    assert local["properties"]["activation_layers"] == 1
    assert local["properties"]["bubble"]["backprop"] == pytest.approx(1 / 2)


@pytest.mark.parametrize("flags", [("--grad-delay", "1"), ("--grad-bits", "4")])
def test_what_no_edge_uses_is_refused_as_in_training(flags: tuple[str, str], call: Any) -> None:
    name, value = flags
    said = f"{name} is {value}, which nothing uses; give a grad_scale above 0 too, or leave it out"
    assert said in call("space", "show", "2,2", *flags).refusal
    assert call("space", "show", "2,2", "--grad-scale", "0.5", *flags, "--json").json["stages"] == 2


def test_join_and_meet(call: Any) -> None:
    join = call("space", "join", "4,4,4", "6,6", "--json").json
    assert join == {"first": [4, 4, 4], "second": [6, 6], "join": [4, 2, 2, 4]}
    meet = call("space", "meet", "1,3,4", "4,4", "--json").json
    assert meet == {"first": [1, 3, 4], "second": [4, 4], "meet": [4, 4]}


def test_count(call: Any) -> None:
    every = call("space", "count", "12", "--json").json
    assert (every["compositions"], every["configurations"]) == (2**11, 2**12)
    some = call("space", "count", "12", "--stages", "3", "--min-depth", "2", "--json").json
    assert (some["layers"], some["stages"], some["min_depth"]) == (12, 3, 2)
    assert some["compositions"] == 28
    assert call("space", "count", "100", "--json").json["compositions"] == 2**99


def test_properties_of_a_partition_need_no_training(call: Any) -> None:
    assert call("space", "properties", "4,4,4", "--json").json == {
        "composition": [4, 4, 4],
        "layers": 12,
        "stages": 3,
        "heads": "shared",
        "vocabulary_projections": 3,
        "capability_region": True,
        "gradient_depth": 4,
        "activation_layers": 4,
        "pipeline_granularity": 3,
        "coupling_cost": 9,
        "coordination": 9 / 11,
        "head_matrices": 1,
        "exit_layers": [4, 8, 12],
        "gradient_bits": 0,
        "staleness": 0,
        "stashed_layers": 0,
        "waiting_stages": 0,
    }
    own = call("space", "properties", "1,1", "--heads", "per-stage", "--json").json
    assert (own["heads"], own["head_matrices"], own["capability_region"]) == ("per-stage", 3, False)


def test_properties_of_a_run_are_measured(call: Any, staged: Path, corpus: Path) -> None:
    answer = call("space", "properties", staged, "--json").json
    assert (answer["run"], answer["steps"], answer["composition"]) == (str(staged), 12, [1, 1])
    assert answer["bpb"] == call("eval", staged, "--json").json["bpb"]
    assert answer["update"]["others"] == 0 < answer["update"]["own"]
    assert answer["gradient_depth"] == 1
    other = call("space", "properties", staged, "--new", corpus, "--limit-bytes", 200, "--json").json
    assert other["specialist_capacity"] != answer["specialist_capacity"]


def test_properties_of_a_run_as_a_table(call: Any, backprop: Path) -> None:
    said = call("space", "properties", backprop)
    assert said.code == 0
    for piece in ("gradient depth", "update, forgetting", "bpb, last", "peak bytes"):
        assert piece in said.out


def test_properties_load_no_torch() -> None:
    code = "import sys; from topograd.cli.main import main; main(['space', 'properties', '4,4', '--json']); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ("show 4,4,4", ["4,4,4", "gradient depth", "one boundary more", "1,3,4,4"]),
        ("show 4,4,4", ["20.0 %", "11.1 %", "1.11"]),
        ("show 8", ["one less", "none"]),
        ("show 99", ["and 86 more"]),
        ("join 2,2 1,3", ["join", "1,1,2"]),
        ("meet 2,2 1,3", ["meet", "4"]),
        ("count 5", ["compositions", "16"]),
        ("properties 4,4", ["coupling cost", "exit layers", "4, 8"]),
    ],
)
def test_for_people_it_is_a_table(words: str, seen: list[str], call: Any) -> None:
    answer = call("space", *words.split())
    assert answer.code == 0
    for piece in seen:
        assert piece in answer.out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "nothing was given to space; choose one of show, join, meet, count, properties"),
        ("shw 4", "'shw' was given to space; choose one of show, join, meet, count, properties"),
        ("show", "PARTITION is missing"),
        ("show 4,x --json", "part 2 is 'x'"),
        ("show 4,,4", "part 2 is ''"),
        ("show 0", "part 1 is '0'"),
        ("show 4,-4", "part 2 is '-4'"),
        ("show 99999", "too many layers"),
        ("show 4 --heads both", "--heads is 'both'; it must be one of shared, per-stage"),
        ("show 4 --microbatches 0", "--microbatches is 0; it must be at least 1"),
        ("join 4,4", "PARTITION is missing"),
        ("meet 4,4 6,6", "compositions of 8 and of 12 layers do not compare"),
        ("count 0 --json", "layers is 0; it must be at least 1"),
        ("count many", "L is 'many'; it must be a whole number"),
        ("count 4 --stages 0", "--stages is 0; it must be at least 1"),
        ("properties", "PARTITION|DIR is missing"),
        ("properties 4,x --json", "part 2 is 'x'"),
        ("properties no/run", "there is no run at no/run"),
        ("properties 4,4 --limit-bytes 9", "--limit-bytes was given with '4,4', which is no folder"),
        ("properties 4,4 --new text.txt", "--new was given with '4,4', which is no folder"),
    ],
)
def test_bad_questions_are_one_line(words: str, why: str, call: Any) -> None:
    assert why in call("space", *words.split()).refusal
