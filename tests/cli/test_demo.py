"""The demo on small data. Both trainings run in this process, but in the tests of processes at the end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raising import refused
from topograd.cli import demo_parts
from topograd.cli.demo import Demo
from topograd.cli.main import main
from topograd.cli.results import stored_results
from topograd.decode.calibration import measure
from topograd.decode.settings import DecodeSettings
from topograd.errors import RunError
from topograd.nn.config import GPTConfig
from topograd.report.depth_text import stage_colour
from topograd.runs.config import PRESETS, TrainConfig, preset
from topograd.runs.folder import Run
from waiting import LIMIT, wait_until

SIDE_BY_SIDE = demo_parts.side_by_side  # before a fixture replaces it
FLAGS = ("--preset", "tiny", "--steps", "3", "--seed", "4")
BENCH = DecodeSettings(prompts=2, prompt_tokens=4, tokens=4, rounds=1, bytes=300, rows=2)


def small(corpus: Path) -> TrainConfig:
    """The preset tiny, smaller."""
    model = GPTConfig(layers=4, width=16, heads=2, vocab=257, context=16, head_std=0.0)
    return replace(PRESETS["tiny"](), batch=2, eval_bytes=300, data=str(corpus), model=model)


@pytest.fixture(scope="module", autouse=True)
def reference(staged: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A calibrated run of two stages in place of the packaged model, small data, and short measurements."""
    folder = shutil.copytree(staged, tmp_path_factory.mktemp("packaged") / "reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "ROUNDS", 1)
        assert main(["calibrate", str(folder), "--bytes", "600", "--json"]) == 0
        patch.setattr(demo_parts, "REFERENCE", folder)
        patch.setattr(demo_parts, "BENCH", BENCH)
        patch.setattr(demo_parts, "LOOK", DecodeSettings(tokens=12, rounds=1))
        patch.setattr(demo_parts, "preset", lambda name, **changes: small(corpus).changed(**changes))
        patch.setattr(demo_parts, "side_by_side", one_after_the_other)
        yield folder


def one_after_the_other(folder: Path, commands: Mapping[str, list[str]]) -> None:
    for flags in commands.values():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert main(["train", *flags, "--json"]) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "out"
    assert main(["demo", *FLAGS, "--out", str(folder), "--full", "--json"]) == 0
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
    ways = value["decoding"]["ways"]
    assert [way["way"] for way in ways] == ["full", "speculate", demo_parts.EARLY_EXIT]
    assert ways[0]["speedup"] == ways[0]["identical"] == 1
    assert all(f'<th scope="row">{way["way"]}</th>' in page for way in ways)
    assert page.count('<a href="#decoding">') == page.count('<section id="decoding"') == 1
    picture = value["decoding"]["picture"]
    assert len(picture["pieces"]) == len(value["decoding"]["speculated"]) == 12
    assert all(f'title="left after stage {exit_ + 1} of 2"' in page for _, exit_ in picture["pieces"])
    assert value["playground"] == f"topograd serve {made / 'staged'}"
    assert value["seconds"] > 0


def test_the_full_demo_measures_every_strategy(made: Path, call: Callable[..., Any]) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.glob("*/checkpoints/*/*")}
    stored = [(made / name).read_bytes() for name in ("comparison.json", "decoding.json")]
    answer = call("demo", *FLAGS, "--out", made, "--full")
    assert answer.code == 0
    assert answer.err.count("is trained already") == 2
    assert "measuring" not in answer.err
    assert {path: path.stat().st_mtime_ns for path in made.glob("*/checkpoints/*/*")} == before
    assert [(made / name).read_bytes() for name in ("comparison.json", "decoding.json")] == stored
    for row in ("backprop", "stages 1 to 2", "mean of all stages", "peak activation memory", "Report: "):
        assert row in answer.out
    for row in ("reference: ways of running it", "│ full ", "│ prefix:1 ", "│ wand:", "│ speculate, 2 rows "):
        assert row in answer.out
    ways = [way["way"] for way in json.loads(stored[1])["ways"]]
    page = (made / "report.html").read_text()
    assert all(f'<th scope="row">{way}</th>' in page for way in ways)
    assert f"Playground: topograd serve {made / 'staged'}" in answer.out.replace("\n", "")
    assert answer.out.splitlines()[-1].startswith("done in ")


def test_an_unfinished_demo_continues(made: Path, tmp_path: Path, call: Callable[..., Any]) -> None:
    folder = tmp_path / "out"
    shutil.copytree(made, folder)
    for leftover in ("results.json", "checkpoints"):
        target = folder / "staged" / leftover
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    value = call("demo", *FLAGS, "--out", folder, "--json").json
    again = json.loads((made / "staged" / "results.json").read_text())
    assert value["staged"]["bpb"] == again["bpb"], "the same training gives the same result"


def test_other_settings_in_the_same_folder_are_refused(made: Path) -> None:
    with refused(RunError, remedy="pass another --out, or delete it"):
        demo_parts.trained(Demo(preset="tiny", steps=5, seed=4, out=made))


def test_the_short_demo_is_a_third_of_the_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_parts, "preset", preset)
    short, full = (demo_parts.contenders(Demo(full=full)) for full in (False, True))
    assert full == {
        "backprop": preset("small", partition="6"),
        "staged": preset("small", partition="2,2,2"),
    }
    assert {config.steps for config in short.values()} == {400}
    assert all(short[name].model == full[name].model for name in full)
    assert Demo().folder != Demo(full=True).folder


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"ways": []}'], ids=["torn", "list", "empty", "half"])
def test_what_is_damaged_is_measured_again(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: dict[str, Any] = {"ways": [{"way": "full"}]}
    monkeypatch.setattr(demo_parts, "bench_decode", lambda session, settings: measured)
    (tmp_path / "decoding.json").write_text(text)
    assert demo_parts.bench(tmp_path) == measured
    assert json.loads((tmp_path / "decoding.json").read_text()) == measured


def shown(width: int) -> str:
    """A look at a text of three stages, on a terminal with colours."""
    ways: list[dict[str, Any]] = [
        {"way": name, "tokens_per_second": speed, "speedup": speed / 1000, "identical": 1.0}
        for name, speed in (("full", 1000), ("speculate", 1234.4), ("wand", 1100))
    ]
    ways[1]["spread"] = {"median": 1.2344, "low": 1.1, "high": 1.3}
    pieces = [("early", 0), ("[red]late[/red]", 2)]
    picture = {"prompt": "start ", "depth": "wand", "stages": 3, "pieces": pieces}
    drafts = [("own", ""), (" drafted", "lookup")]
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=width, highlight=False)
    demo_parts.show_look(
        console, {"ways": ways, "picture": picture, "full": "own drafted", "speculated": drafts}
    )
    return file.getvalue()


def coloured(text: str, colour: str) -> str:
    red, green, blue = bytes.fromhex(colour[1:])
    return f"\x1b[38;2;{red};{green};{blue}m{text}"


@pytest.mark.parametrize("width", [80, 120])
def test_each_token_has_the_colour_of_its_exit_or_of_a_draft(width: int) -> None:
    text = shown(width)
    assert "\x1b[1mstart " in text
    for piece, stage in (("early", 0), ("[red]late[/red]", 2), ("exit 2 (0 tokens)", 1)):
        assert coloured(piece, stage_colour(stage, 3)) in text, "the prompt alone is bold"
    assert coloured(" drafted", demo_parts.DRAFTERS[0]) in text
    assert "full depth: 1,000 tokens/s" in text
    assert "speculation: 1,234 tokens/s" in text
    assert "the same text, 1.23 times as fast (quartiles 1.10 to 1.30); 1 of these 2" in text


def test_without_the_fast_runtime_one_line_says_what_it_adds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_parts, "installed", lambda: False)
    shown(80)
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "pip install onnx onnxruntime" in message


SMALL = "--model.layers 2 --model.width 16 --model.heads 2 --model.context 16 --batch 2 --eval-bytes 300"
STOPPED = """
import sys
from pathlib import Path
from topograd.cli import demo_parts
from topograd.cli.main import main

folder, training, *flags = sys.argv[1:]
train = demo_parts.side_by_side
demo_parts.TRAIN = [*demo_parts.TRAIN] if training == "topograd" else [sys.executable, "-c", training]
demo_parts.first_look = dict
demo_parts.show_look = lambda console, look: None
demo_parts.load_data = lambda config: None
demo_parts.side_by_side = lambda out, commands: train(
    out, {name: [*flags, "--out", str(out / name)] for name in commands}
)
sys.exit(main(["demo", "--out", folder]))
"""
"""The demo from its trainings on, which are small and have no end."""
STAND_IN = """
import pathlib, signal, sys

def save(number, frame):
    (out / "checkpoints" / "step-1").mkdir(parents=True)
    sys.exit(130)

signal.signal(signal.SIGTERM, save)
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True)
(out / "metrics.jsonl").write_text("{}")
signal.pause()
"""
"""A training that saves where it is terminated, and costs nothing until then."""


def test_a_training_that_fails_gives_its_reason_and_the_other_ends(corpus: Path, tmp_path: Path) -> None:
    flags = ["--preset", "tiny", *SMALL.split(), "--data", str(corpus), "--steps", "3"]
    commands = {
        "lost": ["--resume", str(tmp_path / "nowhere")],
        "good": [*flags, "--out", str(tmp_path / "good")],
    }
    with pytest.raises(RunError) as caught:
        SIDE_BY_SIDE(tmp_path, commands)
    assert (tmp_path / "lost.log").read_text().splitlines()[-1] in str(caught.value)
    assert str(tmp_path / "nowhere") in str(caught.value)
    results = stored_results(Run.open(tmp_path / "good"))
    assert results is not None
    assert (results["steps"], results["finished"]) == (3, True)
    assert "step 3/3" in (tmp_path / "good.log").read_text()


@pytest.mark.parametrize(
    ("number", "code", "training"),
    [(signal.SIGINT, 130, "topograd"), (signal.SIGTERM, 143, STAND_IN)],
    ids=["interrupt", "terminate"],
)
def test_a_demo_that_is_stopped_leaves_saved_runs_and_no_process(
    number: signal.Signals, code: int, training: str, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    flags = ["--preset", "tiny", *SMALL.split(), "--partition", "L", "--data", str(corpus)]
    command = [sys.executable, "-c", STOPPED, str(folder), training, *flags, "--steps", "100000"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    logs = [folder / name / "metrics.jsonl" for name in demo_parts.CONTENDERS]
    wait_until(lambda: all(log.exists() and log.stat().st_size for log in logs), "a step of each")
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does it
    else:
        process.send_signal(number)
    assert process.wait(LIMIT) == code
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # its group is empty
    assert all(any((log.parent / "checkpoints").glob("step-*")) for log in logs)
