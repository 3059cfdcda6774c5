"""The demo, on its smallest settings. Both trainings run here; test_demo_pair.py has them in processes."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from topograd.cli import demo_depth, demo_pair
from topograd.cli.main import main
from topograd.decode.calibration import measure
from topograd.decode.settings import DecodeSettings
from topograd.report.depth_text import stage_colour

FLAGS = ("--preset", "tiny", "--steps", "3", "--seed", "4")


@pytest.fixture(scope="module", autouse=True)
def reference(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A calibrated run of two stages in place of the model that comes with the package, measured briefly."""
    folder = shutil.copytree(staged, tmp_path_factory.mktemp("shipped") / "reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "ROUNDS", 1)
        assert main(["calibrate", str(folder), "--bytes", "600", "--json"]) == 0
        patch.setattr(demo_depth, "REFERENCE", folder)
        patch.setattr(
            demo_depth,
            "SHORT",
            DecodeSettings(prompts=2, prompt_tokens=4, tokens=4, rounds=1, bytes=300, rows=2),
        )
        patch.setattr(demo_depth, "TOKENS", 12)
        patch.setattr(demo_pair, "side_by_side", one_after_the_other)
        yield folder


def one_after_the_other(folder: Path, flags: Mapping[str, list[str]]) -> None:
    for words in flags.values():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert main(["train", *words, "--json"]) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "out"
    assert main(["demo", *FLAGS, "--out", str(folder), "--json"]) == 0
    return folder


def test_the_demo_trains_both_compares_and_reports(made: Path, call: Callable[..., Any]) -> None:
    value = call("demo", *FLAGS, "--out", made, "--json").json
    assert value["backprop"]["steps"] == value["staged"]["steps"] == 3
    assert [len(value[name]["bpb"]["prefix"]) for name in ("backprop", "staged")] == [1, 2]
    gap = 100 * (value["staged"]["bpb"]["last"] / value["backprop"]["bpb"]["last"] - 1)
    assert value["comparison"]["gap"] == pytest.approx(gap)
    memory = value["comparison"]["memory"]
    assert memory["by_stages"].keys() == {"1", "2", "4"}
    assert memory["staged"] == memory["by_stages"]["2"] < memory["backprop"] == memory["by_stages"]["1"]
    titles = [sample["title"] for sample in value["comparison"]["samples"]]
    assert titles == ["first 1 of 2 stages, 2 layers", "first 2 of 2 stages, 4 layers", "backprop, 4 layers"]
    page = Path(value["report"]).read_text()
    assert page.count("<svg") >= 4
    assert all(title in page for title in titles)
    kept = json.loads((made / "decoding.json").read_text())
    assert value["decoding"] == kept["bench"]
    ways = [row["way"] for row in kept["bench"]["ways"]]
    assert ways[:2] == ["full", "prefix:1"]
    assert all(f'<th scope="row">{way}</th>' in page for way in ways)
    assert page.count('<a href="#decoding">') == page.count('<section id="decoding"') == 1
    assert "def read(self, size=-1):" in page
    left = {stage for _, stage in kept["picture"]["pieces"]}
    assert all(f'title="left after stage {stage + 1} of 2"' in page for stage in left)


def test_a_second_demo_reuses_everything(made: Path, call: Callable[..., Any]) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.glob("*/checkpoints/*/*")}
    kept = (made / "comparison.json").read_bytes()
    answer = call("demo", *FLAGS, "--out", made)
    assert answer.code == 0
    assert answer.err.count("is trained already") == 2
    assert "measuring" not in answer.err
    assert {path: path.stat().st_mtime_ns for path in made.glob("*/checkpoints/*/*")} == before
    assert (made / "comparison.json").read_bytes() == kept
    for words in ("backprop", "stages 1 to 2", "mean of all stages", "peak activation memory", "Report: "):
        assert words in answer.out
    for words in (
        "reference: ways of running it",
        "│ full ",
        "│ prefix:1 ",
        "│ wand:",
        "│ speculate, 2 rows ",
    ):
        assert words in answer.out
    assert "each token has the colour of the stage where it left" in answer.out
    assert "def read(self, size=-1):" in answer.out


def test_an_unfinished_demo_goes_on(made: Path, tmp_path: Path, call: Callable[..., Any]) -> None:
    folder = tmp_path / "out"
    shutil.copytree(made, folder)
    for leftover in ("results.json", "checkpoints"):
        target = folder / "staged" / leftover
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    value = call("demo", *FLAGS, "--out", folder, "--json").json
    again = json.loads((made / "staged" / "results.json").read_text())
    assert value["staged"]["bpb"] == again["bpb"], "the same training gives the same result"


def test_other_settings_in_the_same_folder_are_refused(made: Path, call: Callable[..., Any]) -> None:
    refusal = call("demo", "--preset", "tiny", "--steps", "5", "--seed", "4", "--out", made).refusal
    assert "holds a run with other settings; pass another --out" in refusal


def test_ways_of_decoding_are_measured_once(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = demo_depth.decoding(tmp_path)
    assert first["bench"]["run"] == str(reference)
    picture = first["picture"]
    assert (picture["prompt"], picture["depth"]) == (demo_depth.PROMPT, demo_depth.DEPTH)
    assert (picture["stages"], len(picture["pieces"])) == (2, 12)
    assert {stage for _, stage in picture["pieces"]} <= {0, 1}
    with monkeypatch.context() as patch:
        patch.setattr(demo_depth, "bench_decode", lambda *_: pytest.fail("it was measured again"))
        assert demo_depth.decoding(tmp_path) == json.loads(json.dumps(first))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"bench": {}}'], ids=["torn", "list", "empty", "half"])
def test_what_is_damaged_is_measured_again(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: dict[str, Any] = {"ways": []}
    monkeypatch.setattr(demo_depth, "bench_decode", lambda session, settings: measured)
    (tmp_path / "decoding.json").write_text(text)
    found = demo_depth.decoding(tmp_path)
    assert found["bench"] == measured
    assert json.loads((tmp_path / "decoding.json").read_text()) == json.loads(json.dumps(found))


def shown(width: int) -> str:
    """A text of three stages on a terminal with colours."""
    way = {"way": "full", "tokens_per_second": 1234.5, "speedup": 1.0, "agreement": 1.0, "identical": 1.0}
    bench = {"run": "some/run", "threads": 2, "ways": [way | {"mean_stage": 3, "acceptance": None}]}
    pieces = [("early", 0), ("[red]late[/red]", 2)]
    picture = {"prompt": "start ", "depth": "wand:flip-rate:0.01", "stages": 3, "pieces": pieces}
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=width, highlight=False)
    demo_depth.show(console, {"bench": bench, "picture": picture})
    return file.getvalue()


def coloured(text: str, stage: int) -> str:
    red, green, blue = bytes.fromhex(stage_colour(stage, 3)[1:])
    return f"\x1b[38;2;{red};{green};{blue}m{text}"


def test_the_text_is_shown_in_the_colours_of_its_stages() -> None:
    found = shown(120)
    assert "1234" in found
    assert "\x1b[1mstart " in found
    for text, stage in (("early", 0), ("[red]late[/red]", 2)):
        assert coloured(text, stage) in found, "the prompt alone is bold"


def test_what_the_colours_mean_fits_a_terminal() -> None:
    found = shown(80)
    for stage in range(3):
        assert coloured(f"stage {stage + 1}", stage) in found
