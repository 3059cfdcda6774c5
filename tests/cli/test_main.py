import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import topograd
from topograd.cli.main import ALIASES, VERBS
from topograd.errors import ConfigError


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_verb(flag: str, call: Any) -> None:
    answer = call(flag)
    assert answer.code == 0
    assert answer.err == ""
    for verb in VERBS:
        assert f"\n  {verb} " in answer.out
    assert set(VERBS) == {
        "chat",
        "completion",
        "config",
        "specialist",
        "demo",
        "import",
        "export",
        "train",
        "eval",
        "score",
        "compare",
        "generate",
        "calibrate",
        "retrofit",
        "bench",
        "report",
        "space",
        "probe",
        "inspect",
        "interfaces",
        "search",
        "doctor",
        "serve",
        "consolidate",
        "coefficient",
    }


def test_without_a_verb_the_overview_is_an_error(call: Any) -> None:
    answer = call()
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("usage: topograd COMMAND")


def test_an_unknown_verb_is_one_line(call: Any) -> None:
    assert call("trian").refusal == "topograd: 'trian' is not a command; did you mean train?\n"
    assert "'xyzzy' is not a command; choose one of chat, generate" in call("xyzzy").refusal
    assert "'--jsn' is not a command" in call("--jsn").refusal


@pytest.mark.parametrize("short", ALIASES)
def test_a_short_name_is_the_command(short: str, call: Any) -> None:
    answer = call(short, "--help")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == call(*ALIASES[short].split(), "--help").out
    assert answer.out.startswith(f"usage: topograd {ALIASES[short]}")


def test_the_version(call: Any) -> None:
    assert call("--version").out == f"topograd {topograd.__version__}\n"


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "demo"])
def test_every_verb_explains_itself(verb: str, call: Any) -> None:
    answer = call(verb, "--help")
    assert answer.code == 0
    assert answer.err == ""
    assert answer.out.startswith(f"usage: topograd {verb}")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("no\nsuch thing"), 2, "topograd: no such thing\n"),
        (KeyboardInterrupt(), 130, "topograd: interrupted\n"),
        (OSError(28, "No space left on device"), 2, "topograd: the system refused: [Errno 28] No space left"),
        (MemoryError(), 2, "topograd: there is not enough memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            2,
            "topograd: there is not enough memory",
        ),
    ],
)
def test_what_a_user_can_cause_is_one_line(
    error: BaseException, code: int, words: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(run=run))
    answer = call("train")
    assert (answer.code, answer.out) == (code, "")
    assert answer.err.startswith(words)
    assert answer.err.count("\n") == 1


def test_a_bug_is_not_hidden(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: list[str]) -> int:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(run=run))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        call("train")


def test_looking_around_does_not_load_torch() -> None:
    script = (
        "import sys; from topograd.cli.main import main;"
        "codes = main(['--help']), main(['space', 'show', '4,4,4', '--json']), main(['nonsense']);"
        "assert codes == (0, 0, 2), codes;"
        "heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_the_installed_command_and_the_module_exit_with_the_code() -> None:
    for command in (
        [sys.executable, "-m", "topograd"],
        [os.path.join(os.path.dirname(sys.executable), "topograd")],
    ):
        done = subprocess.run([*command, "space", "show", "0"], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("topograd: composition '0' does not exist")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "topograd", "space", "show", ",".join("1" * 400), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_a_cache_that_cannot_be_written_stops_no_verb(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "text.txt").write_text("a line of text that is long enough\n" * 100)
    size = "--model.layers 2 --model.width 16 --model.heads 2 --model.context 16 --eval-bytes 300 --batch 2"
    words = ["train", "--preset", "tiny", *size.split(), "--steps", "1", "--data", str(tmp_path / "text.txt")]
    done = subprocess.run(
        [sys.executable, "-m", "topograd", *words, "--out", str(tmp_path / "run"), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 1
    (said,) = [line for line in done.stderr.splitlines() if "cache" in line]
    assert said.startswith("topograd: the cache ")
    assert said.endswith("cannot be written (Not a directory); continuing without it")


@pytest.mark.parametrize("empty", ["", " "])
@pytest.mark.parametrize("words", ["train --preset tiny --data", "search soft --data", "eval . --data"])
def test_a_variable_that_is_not_set_is_no_folder(
    words: str, empty: str, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("whatever lies here\n" * 100)
    refusal = call(*words.split(), empty).refusal
    assert refusal == f"topograd: --data was given nothing ({empty!r}); leave the flag out, or give a value\n"
    assert not (tmp_path / "runs").exists()
