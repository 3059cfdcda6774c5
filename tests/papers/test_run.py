import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from papers import run as module
from papers import staged_runs, study_page
from papers.run import asked_for
from papers.staged_runs import PRESETS
from papers.studies import STUDIES
from topograd.errors import ConfigError
from topograd.files import write_json


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is read at once."""
    (tmp_path / "corpus.txt").write_text(" ".join(random.Random(0).choices(["stage", "loss"], k=2000)))
    sizes = replace(PRESETS["tiny"], eval_bytes=200, data=str(tmp_path / "corpus.txt"))
    monkeypatch.setitem(PRESETS, "tiny", sizes)


def test_the_depth_sweep_as_json(call: Any, tmp_path: Path) -> None:
    words = ("run", "stage0-depth", "--preset", "tiny", "--out", tmp_path / "a" / "b", "--json")
    answer = call(*words).json
    assert len(answer["rows"]) == 12
    for row in answer["rows"]:
        assert sum(row["partition"]) == 6
        assert row["bpb"] > 0
        assert row["seed"] in (0, 1)
    assert answer["verdict"] == "undecided at this size"
    page = Path(answer["page"])
    assert page == tmp_path / "a" / "b" / "stage0-depth.html"
    text = page.read_text(encoding="utf-8")
    for claim in answer["claims"]:
        assert claim["name"] in text
    assert "<script" not in text
    assert text.count("<figure>") == 1
    assert (page.parent / "figures" / "stage0-depth.png").is_file()


def test_tables_for_people(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {
        "tables": [
            {"caption": "A caption", "header": ["arm", "BPB"], "rows": [["2,2,2 residual-gate", "2.5"]]},
            {"caption": "Another", "header": ["arm"], "rows": [["6"]]},
        ],
        "findings": ["What came out [of it]."],
        "claims": [{"name": "trend", "measured": "+0.1", "verdict": "held"}],
        "prediction": "It falls.",
        "verdict": "held",
    }
    asked: list[Any] = []

    def run_study(study: Any) -> dict[str, Any]:
        asked.append((study.study, study.preset, study.seeds, study.data))
        return record

    monkeypatch.setattr(module, "run_study", run_study)
    monkeypatch.setattr(study_page, "write_study", lambda folder, record: folder / "page.html")
    said = call("run", "experiment-a", "--seeds", 5, "--out", tmp_path).out
    assert asked == [("experiment-a", "small", 5, None)]
    said_of = ("A caption", "2,2,2 residual-gate", "Another", "trend", "- What came out [of it].")
    for words in (*said_of, "The paper: It falls.", "Verdict: held"):
        assert words in said
    assert f"Page: {tmp_path / 'page.html'}" in said


def test_a_study_without_claims_or_a_figure(call: Any, tmp_path: Path) -> None:
    words = ("run", "chain-rates", "--preset", "tiny", "--out", tmp_path)
    said = call(*words).out
    assert "The slope of G_1 along training" in said
    assert "Verdict" not in said
    text = (tmp_path / "chain-rates.html").read_text(encoding="utf-8")
    assert text.count("<figure>") == 0
    assert "The slope of G_1 along training" in text
    assert "<script" not in text
    assert not list((tmp_path / "figures").iterdir())


def test_seeds_where_there_is_no_choice(call: Any, tmp_path: Path) -> None:
    said = call("run", "leak", "--preset", "tiny", "--seeds", 2, "--out", tmp_path).refusal
    assert "--seeds is 2; study leak has no choice of seeds, it takes --steps" in said


def test_a_study_goes_on_where_it_was(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("--preset", "tiny", "--seeds", 1, "--steps", 3, "--width", 12)
    words = ("run", "stage0-depth", *sizes, "--out", tmp_path, "--json")
    first = call(*words).json
    assert first["sizes"]["width"] == 12
    assert first["rows"][0]["trajectory"][-1]["step"] == 3
    rows = (tmp_path / "stage0-depth.rows.jsonl").read_bytes().splitlines(keepends=True)
    assert len(rows) == 6
    (tmp_path / "stage0-depth.rows.jsonl").write_bytes(b"".join(rows[:4]) + rows[4][:30])
    trained: list[str] = []
    real = staged_runs.train_arm

    def watched(arm: Any, *rest: Any) -> Any:
        trained.append(arm.name)
        return real(arm, *rest)

    monkeypatch.setattr(staged_runs, "train_arm", watched)
    again = call(*words)
    assert again.json["rows"] == first["rows"], "bit for bit"
    assert trained == ["4,1,1", "6"]
    assert "4 measurements are of an earlier run" in again.err
    call(*words, "--fresh")
    assert len(trained) == 8


def test_what_was_kept_is_judged_at_any_moment(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("run", "stage0-depth", "--preset", "tiny", "--out", tmp_path)
    assert "without --judge" in call(*words, "--judge").refusal
    first = call(*words, "--json").json
    file = tmp_path / "stage0-depth.rows.jsonl"
    rows = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(rows[:9]))
    monkeypatch.setattr(staged_runs, "train_arm", lambda *given: pytest.fail("it measured"))
    judged = call(*words, "--judge", "--json").json
    assert judged["seeds"] == 1
    assert judged["rows"] == first["rows"][:6]
    assert judged["asked"] != first["asked"], "a whole run is still to come"
    file.write_bytes(b"".join(rows[:4]))
    said = call(*words, "--judge").refusal
    assert "is not measured" in said
    assert "one of them" in call(*words, "--judge", "--fresh").refusal


def test_all_of_them(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("stage0-depth", "leak", "minilm")
    monkeypatch.setattr(module, "STUDIES", {name: STUDIES[name] for name in names})
    ran: list[tuple[str, int | None]] = []

    def run_study(study: Any) -> dict[str, Any]:
        ran.append((study.study, study.size.seeds))
        if study.study == "minilm":
            raise ConfigError("its weights are not here")
        found = {"study": study.study, "verdict": "held", "seconds": 1.0, "asked": asked_for(study)}
        return found

    def write_study(folder: Path, record: dict[str, Any]) -> Path:
        write_json(folder / f"{record['study']}.json", record)
        return folder / "page.html"

    monkeypatch.setattr(module, "run_study", run_study)
    monkeypatch.setattr(study_page, "write_study", write_study)
    words = ("run", "--all", "--preset", "tiny", "--seeds", 2, "--out", tmp_path)
    states = [(one["study"], one["state"]) for one in call(*words, "--json").json["studies"]]
    assert states == [("stage0-depth", "done"), ("leak", "done"), ("minilm", "not run")]
    assert ran == [("stage0-depth", 2), ("leak", None), ("minilm", None)]
    said = call(*words).out
    assert "done before" in said
    assert "its weights are not here" in said
    assert len(ran) == 4, "only what could not be run is tried again"
    call(*words, "--steps", 6)
    assert len(ran) == 7, "other sizes are another run"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "missing from python -m papers run: NAME; give the name of a study, or --all"),
        ("leak --all", "--all is given and so is leak; give one of them"),
        ("leak --preset demo", "--preset is demo; study leak has the presets tiny, small"),
        ("experiment-z", "study is 'experiment-z'; it must be one of stage0-depth"),
        ("experiment-a --preset huge", " is 'huge'; it must be one of"),
        ("experiment-a --preset tiny --seeds 0", "--seeds is 0; it must be at least 1"),
    ],
)
def test_bad_input_is_one_line(words: str, why: str, call: Any, tmp_path: Path) -> None:
    assert why.lower() in call("run", *words.split(), "--out", tmp_path / "out").refusal.lower()


def test_a_folder_that_cannot_be(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "run_study", lambda *given: pytest.fail("it worked"))
    (tmp_path / "file").write_text("")
    assert "cannot be a folder" in call("run", "experiment-a", "--out", tmp_path / "file").refusal


def test_what_cannot_be_written(call: Any, tmp_path: Path) -> None:
    (tmp_path / "figures").write_text("in the way")
    said = call("run", "stage0-depth", "--preset", "tiny", "--seeds", 1, "--out", tmp_path).refusal
    assert "pass --out with a folder you can write" in said
