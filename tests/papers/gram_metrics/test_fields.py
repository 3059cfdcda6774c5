import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from papers import listing
from papers import study_page as study_page
from papers.gram_metrics import checks
from papers.gram_metrics.field_figures import drift_panel
from papers.gram_metrics.fields import kernel_table, simulation_table


def test_the_kernel_is_the_tangent_kernel(call: Any) -> None:
    answer = call(
        "fields", "kernel", "--depth", 3, "--width", 16, "--examples", 8, "--seed", 1, "--json"
    ).json
    assert answer.keys() == {"relative_error_vs_ntk", "layers", "seconds", "seconds_reference"}
    assert answer["relative_error_vs_ntk"] <= 1e-12
    assert [layer["layer"] for layer in answer["layers"]] == [1, 2, 3]
    assert all(layer["relative_error"] <= 1e-12 for layer in answer["layers"])
    assert sum(layer["share_of_trace"] for layer in answer["layers"]) == pytest.approx(1)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_in_fields_is_the_run_in_weights(depth: int, call: Any) -> None:
    words = ("--depth", depth, "--width", 16, "--examples", 8, "--steps", 40, "--json")
    answer = call("fields", "simulate", *words).json
    assert answer["max_abs_error_vs_weights"] <= 1e-12
    assert answer["mask_crossings"] > 0
    assert answer["frozen_max_abs_error"] > 1e-6
    assert answer["last_loss"] < answer["first_loss"]


def test_flags_arrive(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def compare(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return {}

    for name in ("compare_with_ntk", "compare_with_weights"):
        monkeypatch.setattr(checks, name, compare)
    words = "simulate --depth 2 --width 3 --examples 4 --steps 5 --eta 0.5 --seed 6"
    for line in ("kernel", "simulate", words):
        assert call("fields", *line.split(), "--json").json == {}
    assert asked == [(4, 128, 64, 0), (1, 64, 32, 500, 0, None), (2, 3, 4, 5, 6, 0.5)]


def shown(table: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=80).print(table)
    return file.getvalue()


def test_tables_for_people(call: Any) -> None:
    kernel = call("fields", "kernel", "--depth", 2, "--width", 8, "--examples", 4).out
    assert "K from fields against Jacobians" in kernel
    assert "│   all │              1.000 │" in kernel
    run = call("fields", "simulate", "--width", 8, "--examples", 4, "--steps", 5).out
    for words in ("largest error against the weights", "mask crossings", "the same of the frozen kernel"):
        assert f"│ {words} " in run


def test_tables_fit_a_terminal() -> None:
    layer = {"layer": 12, "share_of_trace": 0.25, "relative_error": 3e-15}
    answer = {"layers": [layer], "relative_error_vs_ntk": 2e-15, "seconds": 1.5, "seconds_reference": 100}
    assert "│    12 │              0.250 │        3.0e-15 │" in shown(kernel_table(answer))
    assert "1500.0 ms; Jacobians 100000.0 ms" in shown(kernel_table(answer))
    keys = [f"{name}_error" for name in ("frozen_max_abs", "relinearised_max_abs")]
    keys += ["max_abs_error_vs_weights", "eta", "first_loss", "last_loss", "seconds", "seconds_weights"]
    table = shown(simulation_table({**dict.fromkeys(keys, 1.5e-15), "mask_crossings": 12}))
    assert "│ 1.5e-15" in table
    assert "…" not in table


def test_a_study_writes_a_page_and_says_what_came_out(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_page, "study_panels", lambda record: (drift_panel(record),))  # one is fast
    words = ("fields", "study", "--preset", "tiny", "--out", tmp_path / "new" / "folder")
    told = call(*words)
    assert told.code == 0, told.err
    assert "The conjecture of section 10.3." in told.out
    assert "- From the first layer to the last, the layers carried" in told.out
    page = tmp_path / "new" / "folder" / "fields.html"
    assert page.is_file()
    assert {file.name for file in (page.parent / "figures").iterdir()} == {
        "fields-drift.svg",
        "fields-drift.png",
    }
    assert f"Page: {page}" in told.out


def test_a_study_as_json(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, str]] = []

    def write(folder: Path, record: dict[str, Any]) -> Path:
        asked.append((folder, record["data"]))
        return folder / "page.html"

    monkeypatch.setattr(study_page, "write_study", write)
    answer = call("fields", "study", "--data", "digits", "--preset", "tiny", "--out", tmp_path, "--json").json
    assert answer.keys() >= {"layers", "drift", "geometry", "staged", "findings", "verdict", "seconds"}
    assert (answer["data"], answer["preset"], answer["page"]) == (
        "digits",
        "tiny",
        str(tmp_path / "page.html"),
    )
    assert asked == [(tmp_path, "digits")]


def test_a_study_refuses_before_it_works(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "run_study", lambda *given: pytest.fail("it worked"))
    (tmp_path / "file").write_text("")
    said = call("fields", "study", "--out", tmp_path / "file").refusal
    assert "cannot be a folder" in said
    assert "pass --out" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "nothing was given to fields; choose one of kernel, simulate, study"),
        ("kernels", "'kernels' was given to fields; choose one of kernel, simulate, study"),
        ("kernel --depth 0", "topograd: --depth is 0; it must be at least 1"),
        ("kernel --examples 0", "topograd: --examples is 0; it must be at least 1"),
        ("kernel --width -3", "topograd: --width is -3; it must be at least 1"),
        ("kernel --steps 3", "Unrecognized options: --steps"),
        ("simulate --steps -1", "topograd: --steps is -1; it must be at least 0"),
        ("simulate --eta 0", "topograd: --eta is 0.0; it must be at least 1e-300"),
        ("simulate --width 8 --examples 4 --eta 1e308", "take a smaller eta"),
        ("kernel --width 100000 --examples 1000", "choose a smaller --examples, --depth or --width"),
        ("simulate --depth 2 --steps 1000000000", "choose a smaller --depth, --width, --examples or --steps"),
        ("simulate --eta nan", "--eta was given 'nan'; it must be a finite number"),
        ("study --data cats", "invalid choice 'cats' for argument '--data'"),
        ("study --preset large", "invalid choice 'large' for argument '--preset'"),
    ],
)
def test_bad_input_is_one_line(words: str, why: str, call: Any) -> None:
    assert why in call("fields", *words.split()).refusal


def test_each_question_explains_itself(call: Any) -> None:
    overview = call("fields", "--help").out
    assert "usage: topograd fields {kernel,simulate,study} ..." in overview
    assert "  simulate  Run gradient descent in the fields" in overview
    for question in ("kernel", "simulate", "study"):
        answer = call("fields", question, "--help")
        assert (answer.code, answer.err) == (0, "")
        assert answer.out.startswith(f"usage: topograd fields {question}")
