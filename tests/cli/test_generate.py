import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from topograd.cli import generate as module
from topograd.cli.main import main
from topograd.decode import model
from topograd.runs.folder import Run
from topograd.runtime.native.library import missing_reason

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def calibrated(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run with its calibration; who drafts is what `with_drafts` says, not the clock."""
    folder = shutil.copytree(staged, tmp_path_factory.mktemp("calibrated") / "run")
    assert main(["calibrate", str(folder), "--bytes", "600", "--json"]) == 0
    with_drafts(folder, True)
    return folder


def with_drafts(folder: Path, on: bool) -> None:
    """The first stage drafts, or nobody does."""
    run = Run.open(folder)
    values = json.loads(run.calibration_file.read_text())
    costs = {"verify": {"1": 1.0, "8": 1.1}, "draft": 0.0, "keep": 0.01, "uneven": 0.0}
    rates = {"stage 1": {"bounds": [0.0], "rates": [0.9], "shares": None}}
    pays = {"drafters": ["stage 1"], "predicted": 2.0, "speedup": 1.1, "costs": costs, "acceptance": rates}
    (entry,) = values["entries"].values()
    entry["tuning"] |= {"greedy": pays if on else None, "sampled": pays if on else None}
    run.manifest.bind(run.calibration_file.name, json.dumps(values))


def test_a_continuation_as_json(staged: Path, call: Any) -> None:
    answer = call("generate", staged, "--prompt", "def ", "--tokens", 32, "--stages", 1, "--json").json
    assert answer.keys() == {
        *("run", "prompt", "text", "stages", "tokens", "depth", "exits", "seconds", "tokens_per_second"),
        *("runtime", "weights"),
    }
    assert (answer["run"], answer["prompt"]) == (str(staged), "def ")
    assert (answer["stages"], answer["tokens"]) == (1, 32)
    assert (answer["depth"], answer["exits"]) == ("prefix:1", [32, 0])
    assert 0 < len(answer["text"]) <= 32
    assert answer["tokens_per_second"] == pytest.approx(32 / answer["seconds"])


PROGRAM = """
import sys
from topograd.cli.main import main
code = main(sys.argv[1:])
sys.stderr.write("torch" if "torch" in sys.modules else "alone")
sys.exit(code)
"""


@pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))
def test_kept_weights_write_the_same_without_torch(staged: Path, tmp_path: Path) -> None:
    def call(*words: str) -> tuple[dict[str, Any], str]:
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            "generate",
            str(staged),
            "--prompt",
            "def ",
            "--json",
            *words,
        ]
        settings = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout)
        return {key: value for key, value in answer.items() if "second" not in key}, done.stderr

    first = call("--tokens", "20")
    assert first[1] == "torch"
    assert call("--tokens", "20") == (first[0], "alone")
    assert call("--tokens", "20", "--depth", "prefix:1")[1] == "alone"
    assert call("--tokens", "20", "--depth", "speculate:lookup")[0]["text"] == first[0]["text"]


def test_all_stages_by_default_and_each_prefix_is_a_model(staged: Path, call: Any) -> None:
    words = ["generate", staged, "--prompt", "stack", "--tokens", 60, "--json", "--temperature", 1]
    whole = call(*words).json
    assert (whole["stages"], whole["depth"], whole["exits"]) == (2, "full", [0, 60])
    for other in (["--stages", 2], ["--depth", "prefix:2"], ["--depth", "path:1-2"]):
        assert whole["text"] == call(*words, *other).json["text"]
    assert whole["text"] != call(*words, "--stages", 1).json["text"]


@pytest.mark.parametrize(
    ("depth", "stages", "exits"),
    [
        ("full", 2, [0, 20]),
        ("path:1", 1, [20, 0]),
        ("branches:1*2+1-2", 2, [0, 20]),
        ("prefix:1", 1, [20, 0]),
    ],
)
def test_depths_that_are_the_same_for_every_token(
    depth: str, stages: int, exits: list[int], staged: Path, call: Any
) -> None:
    answer = call("generate", staged, "--depth", depth, "--tokens", 20, "--json").json
    assert (answer["depth"], answer["stages"], answer["exits"]) == (depth, stages, exits)
    assert "drafts" not in answer


def test_leaving_early(calibrated: Path, call: Any) -> None:
    def exits(depth: str) -> list[int]:
        answer = call("generate", calibrated, "--depth", depth, "--tokens", 40, "--json").json
        assert (answer["stages"], answer["tokens"]) == (2, 40)
        found: list[int] = answer["exits"]
        return found

    assert exits("wand:rival-gain:1e-9")[0] > 35, "all but ties"
    assert exits("wand:sum-of-bounds:1e9") == [0, 40]
    assert 0 < exits("wand")[0] < 40


def test_speculation_writes_what_full_depth_writes(calibrated: Path, call: Any) -> None:
    words = ["generate", calibrated, "--prompt", "loss", "--tokens", 40, "--json"]
    full, drafted, never = (
        call(*words, "--depth", depth).json for depth in ("full", "speculate:4", "speculate:4:1e9")
    )
    assert full["text"] == drafted["text"] == never["text"]
    assert drafted.keys() - full.keys() == {"acceptance", "drafts", "accepted", "by_drafter"}
    assert 0 < drafted["accepted"] <= drafted["drafts"]
    assert drafted["acceptance"] == drafted["accepted"] / drafted["drafts"]
    assert drafted["stages"] == 2
    assert drafted["accepted"] - 4 < drafted["exits"][0] <= drafted["accepted"], "the last round may be cut"
    assert (never["drafts"], never["acceptance"], never["exits"]) == (0, None, [0, 40])


def test_the_calibration_decides_the_default(
    staged: Path, calibrated: Path, call: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(calibrated, tmp_path / "run")
    words = ["generate", folder, "--prompt", "loss", "--tokens", 9, "--json"]
    answer = call(*words).json
    assert answer["depth"] == "speculate"
    assert answer["drafts"] >= 3
    with_drafts(folder, False)
    assert call(*words).json["depth"] == "full"
    off = call(*words, "--depth", "speculate")
    assert "drafts do not pay on this machine; this is full depth" in off.err
    assert (off.json["depth"], off.json["drafts"], off.json["acceptance"]) == ("speculate", 0, None)
    (folder / "calibration.json").write_text("{")
    assert call(*words).json["depth"] == "full"
    refusal = call(*words, "--depth", "wand").refusal
    assert "calibration.json is not the file that this run wrote; delete it" in refusal


def test_the_text_streams_to_a_terminal(staged: Path, call: Any) -> None:
    words = ["generate", staged, "--prompt", "loss é", "--tokens", 40, "--seed", 3, "--temperature", 1.5]
    answer = call(*words)
    assert answer.code == 0
    assert answer.out == "loss é" + call(*words, "--json").json["text"] + "\n"


def test_seeds_temperature_top_k_and_top_p(staged: Path, call: Any) -> None:
    def text(*words: object) -> str:
        written: str = call("generate", staged, "--prompt", "loss", "--tokens", 30, "--json", *words).json[
            "text"
        ]
        return written

    assert text() == text("--seed", 5), "the likeliest token needs no seed"
    assert text("--temperature", 1, "--seed", 1) == text("--temperature", 1, "--seed", 1)
    assert text("--temperature", 1, "--seed", 1) != text("--temperature", 1, "--seed", 2)
    assert text("--temperature", 1, "--top-k", 1) == text()
    assert text("--temperature", 1, "--top-p", 1e-9) == text()
    assert text("--temperature", 1, "--top-p", 1) == text("--temperature", 1)
    new = text("--prompt", "")
    assert new == text("--prompt", "", "--temperature", 0.8), "a new document is sampled"
    assert new != text("--prompt", "", "--temperature", 0)


def test_stop_strings_end_the_text(staged: Path, call: Any) -> None:
    words = ["generate", staged, "--tokens", 60, "--temperature", 1.2, "--seed", 2]
    text = call(*words, "--json").json["text"]
    first, second = text[8:10], text[20:23]
    assert text.find(first) > 0
    answer = call(*words, "--json", "--stop", second, "--stop", first).json
    assert answer["text"] == text[: min(text.find(first), text.find(second))]
    assert sum(answer["exits"]) == answer["tokens"] < 60
    assert call(*words, "--stop", first).out == text[: text.find(first)] + "\n"
    assert call(*words, "--json", "--stop", "never there").json["text"] == text


def test_an_empty_prompt_starts_a_document(staged: Path, call: Any) -> None:
    answer = call("generate", staged, "--tokens", 0, "--json").json
    assert (answer["prompt"], answer["text"], answer["tokens"]) == ("", "", 0)
    assert (answer["exits"], answer["tokens_per_second"]) == ([0, 0], 0)
    assert call("generate", staged, "--prompt", "", "--tokens", 5, "--json").json["tokens"] == 5


def test_of_a_long_prompt_the_end_is_read(staged: Path, call: Any) -> None:
    words = ["generate", staged, "--tokens", 20, "--json", "--prompt"]
    end = "gradient loss st"
    long = call(*words, "stack layer " + end)
    assert long.err == "topograd: the prompt has 28 tokens and the model reads 16; it sees the last of them\n"
    short = call(*words, end)
    assert short.err == ""
    assert long.json["text"] == short.json["text"]


def test_without_a_folder_the_reference_model_writes(
    staged: Path, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFERENCE", staged)
    words = ["generate", "--prompt", "loss", "--tokens", 3, "--json"]
    assert call(*words).json["run"] == str(staged)
    monkeypatch.setattr(module, "REFERENCE", tmp_path / "nowhere")
    assert "it does not exist" in call(*words).refusal


def test_colours_on_a_terminal(calibrated: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["generate", calibrated, "--prompt", "loss  ", "--tokens", 120, "--depth", "speculate:2"]
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, numbers = call(*words).out, call(*words, "--json").json
    first, last = numbers["exits"]
    assert first > 0
    legend = f"tokens that left after stage 1: {first}, stage 2: {last}\n"
    answer = call(*words, "--colour")
    assert answer.out == plain + legend, "no terminal, no colours"
    assert "--colour has no effect" in answer.err
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), ("COLORTERM", "truecolor")):
        monkeypatch.setenv(name, value)
    shown = call(*words, "--colour").out
    assert COLOUR.sub("", shown) == plain + legend
    # one for each token and one in the legend
    assert shown.count("\x1b[38;2;123;22;231m") == first + 1
    assert shown.count("\x1b[38;2;242;106;10m") == last + 1
    assert "\x1b" not in call(*words, "--colour", "--json").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert call(*words, "--colour").out == plain + legend


def test_coloured_text_is_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system="truecolor", width=20)
    monkeypatch.setattr(module, "out", lambda: console)
    monkeypatch.setattr(module, "note_runtime", lambda engine: None)
    plan = SimpleNamespace(predicting=lambda: [0, 1])
    opened: Any = SimpleNamespace(session=SimpleNamespace(plan=plan), engine=None)
    writer = module.Writer(module.Generate(colour=True), opened)
    pieces = ["def f(x):\n", "", "\n", "   ", "return [bold]x[/bold] :smile:  \n", "é" * 50, " ", "𝄞\n\n"]
    for place, piece in enumerate(pieces):
        writer.show(piece, ("stage 1", "lookup", "stage 2")[place % 3])
    assert COLOUR.sub("", screen.getvalue()) == "".join(pieces)
    assert writer.colours["lookup"] == module.DRAFTERS[0]


def test_tokens_of_drafters_have_a_colour_of_their_own(
    calibrated: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["generate", calibrated, "--prompt", "loss loss loss ", "--tokens", 60]
    words += ["--depth", "speculate:lookup"]
    numbers = call(*words, "--json").json
    kept = numbers["accepted"]
    assert kept > 0
    legend = f"tokens that left after stage 1: 0, stage 2: {60 - kept}; drafted by lookup: {kept}\n"
    plain = call(*words).out
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), ("COLORTERM", "truecolor")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = call(*words, "--colour").out
    assert COLOUR.sub("", shown) == plain + legend
    assert shown.count("\x1b[38;2;46;139;87m") == kept + 1


def test_a_page_of_the_text(calibrated: Path, call: Any, tmp_path: Path) -> None:
    page = tmp_path / "text.html"
    words = ["generate", calibrated, "--prompt", "<b>é", "--tokens", 40, "--depth", "speculate:2", "--json"]
    answer = call(*words, "--html", page)
    assert answer.err == f"topograd: the page is {page}\n"
    first, last = answer.json["exits"]
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "<b>&lt;b&gt;é</b>" in text
    assert f"stage 1</span></th><td>{first}</td>" in text
    assert f"stage 2</span></th><td>{last}</td>" in text
    written = re.findall(r'title="left after stage (\d) of 2">([^<]*)<', text.split("</pre>")[0])
    assert "".join(part for _, part in written) == answer.json["text"]
    assert {stage for stage, _ in written} == {"1", "2"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["text.html"]


def test_a_page_that_cannot_be_written_is_said_before_anything_else(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for file in (tmp_path, tmp_path / "nowhere" / "text.html", tmp_path / "file" / "text.html"):
        assert f"--html {file} cannot be written" in call("generate", "--html", file).refusal
    monkeypatch.setattr(os, "access", lambda path, how: False)
    assert "give a file in a folder you can write" in call("generate", "--html", tmp_path / "x").refusal


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--stages 3", "--stages is 3; it must be 1 to 2"),
        ("--stages 0", "--stages is 0"),
        ("--tokens -1", "--tokens is -1"),
        ("--tokens 100001", "--tokens is 100001; it must be a whole number, at least 0 and at most 100000"),
        ("--tokens some", "--tokens is 'some'; it must be a whole number"),
        ("--temperature -1", "--temperature is -1.0; it must be finite and at least 0"),
        ("--temperature nan", "--temperature is 'nan'; it must be a finite number"),
        ("--temperature inf", "--temperature is 'inf'; it must be a finite number"),
        ("--top-k 0", "--top-k is 0"),
        ("--top-p 0", "--top-p is 0.0; it must be above 0 and at most 1"),
        ("--seed -1", "--seed is -1"),
        ("--prompt", "--prompt has no value"),
        ("--stages 1 --depth full", "--depth and --stages are both given"),
        ("--depth deep", "--depth 'deep' is unknown; use full, prefix:J"),
        ("--depth prefix:3", "exit 3 does not exist; the model has 2 stages that predict: give 1 to 2"),
        ("--depth prefix:0", "exit 0 does not exist"),
        ("--depth path:2", "begins with stage 2, which was trained to read another stage"),
        ("--depth branches:1*0", "weight"),
        ("--depth wand", "is not calibrated; run: topograd calibrate"),
        ("--depth speculate:many", "names the drafter 'many', which is unknown; use lookup"),
        ("--stop=", "--stop is ''; it must be texts of 1 to 200 characters"),
    ],
)
def test_bad_questions_are_one_line(words: str, why: str, staged: Path, call: Any) -> None:
    assert why in call("generate", staged, *words.split()).refusal
    prompted = call("generate", staged, "--prompt", "a prompt longer than the context", *words.split())
    assert why in prompted.refusal, "nothing is shown, and nothing else is said"
    assert why in call("generate", staged, "--json", *words.split()).refusal


def test_rules_that_do_not_exist_and_runs_that_cannot_leave(
    calibrated: Path, backprop: Path, call: Any
) -> None:
    assert (
        "depth 'wand:hope' names the rule 'hope'; it must be"
        in call("generate", calibrated, "--depth", "wand:hope").refusal
    )
    assert (
        "eps is 0.3; it must be one of 0.0002,"
        in call("generate", calibrated, "--depth", "wand:flip-rate:.3").refusal
    )
    assert "early exits and drafts need at least 2" in call("generate", backprop, "--depth", "wand").refusal


def test_a_prompt_that_is_too_long_or_no_text(
    staged: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "MAX_PROMPT", 20)
    why = call("generate", staged, "--prompt", "x" * 21).refusal
    assert "the prompt has 21 characters; give at most 20" in why
    assert "half a surrogate pair" in call("generate", staged, "--prompt", "\udcff").refusal
    assert "it does not exist" in call("generate", staged / "nowhere").refusal
