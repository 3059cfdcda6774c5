"""`python -m papers` as a program: its overview, its errors, and what it does not import."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from papers.__main__ import VERBS
from papers.check import CHECKS

ROOT = Path(__file__).parents[2]
COMMANDS = [*([verb] for verb in VERBS), *(["check", name] for name in CHECKS)]


def test_help_lists_every_verb(call: Any) -> None:
    answer = call("--help")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("usage: python -m papers COMMAND ...")
    for verb in VERBS:
        assert f"\n  {verb} " in answer.out
    assert (
        "'study' is not a command; choose one of list, run, reproduce, pages, check" in call("study").refusal
    )


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(words: list[str], call: Any) -> None:
    answer = call(*words, "--help")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"usage: python -m papers {' '.join(words)}")
    said = call(*words, "--no-such-flag").refusal
    assert "--no-such-flag" in said
    assert words == ["check"] or said.endswith(f"; see python -m papers {' '.join(words)} --help\n")


def test_looking_around_imports_nothing_heavy() -> None:
    words = [[], ["--help"], ["list"], ["reproduce"], ["check", "costs"], *([*w, "--help"] for w in COMMANDS)]
    code = (
        f"import sys; from papers.__main__ import main; codes = [main(words) for words in {words!r}]\n"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "assert codes == [2] + [0] * (len(codes) - 1), codes\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_the_module_exits_with_the_code_and_a_reader_may_leave_early() -> None:
    command = [sys.executable, "-m", "papers", "reproduce"]
    done = subprocess.run([*command, "--paper", "x"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("topograd: --paper is 'x'; it must be one of")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


NUMBERS = ["0", "-1", str(10**30), "nan", "inf", "", "1e400", "0x10"]


@pytest.mark.parametrize(
    "line",
    [
        "check catalogue --seed",
        "check ladder --depth --width --seed",
        "check equivariance --steps --lr --seed",
        "check cells --steps --seeds",
        "check kernel --depth --width --examples --seed",
        "check simulate --depth --width --examples --steps --eta --seed",
        "run experiment-a --steps --width --seeds",
    ],
)
def test_no_number_makes_a_traceback(
    line: str, call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every numeric flag with every hostile number: refused in one line, before any work."""
    words = [word for word in line.split() if not word.startswith("--")]
    for kind in CHECKS.values():
        monkeypatch.setattr(kind, "answer", lambda self: {"cells": []})
    monkeypatch.setattr("papers.run.run_study", lambda study: pytest.fail("it worked"))
    out = ("--out", tmp_path) if words[0] == "run" else ()
    for flag in (word for word in line.split() if word.startswith("--")):
        for number in NUMBERS:
            answer = call(*words, *out, flag, number, "--json")
            if answer.code != 0:
                assert flag in answer.refusal
            else:
                assert number in ("0", "-1") or flag == "--eta", f"{flag} {number} was taken"
