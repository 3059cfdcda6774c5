"""Completion: what the shells ask for, and bash itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from topograd.cli.main import VERBS


@pytest.mark.parametrize(
    ("typed", "there", "absent"),
    [
        ("", {"chat", "specialist", "train"}, {"attach", "--help"}),
        ("specialist", {"attach", "finetune", "compose", "route", "align"}, {"train"}),
        ("specialist attach", {"--layers", "--json", "--help"}, {"base"}),
        ("train --preset", {"tiny", "small", "base"}, {"--preset"}),
        ("train --bf16", {"--no-compile", "--model.layers"}, set()),
        ("train --resume x", {"--stop-after"}, set()),
        ("search", {"dp", "pareto"}, set()),
        ("bench decode", {"--rounds"}, set()),
        ("generate --prompt", set(), {"--tokens"}),
        ("completion", {"bash", "zsh", "fish"}, set()),
        ("nonsense", set(), {"chat"}),
        ("search --nonsense", set(), {"dp"}),
    ],
)
def test_what_may_come_next(typed: str, there: set[str], absent: set[str], call: Any) -> None:
    answer = call("completion", "words", *typed.split())
    assert (answer.code, answer.err) == (0, "")
    words = set(answer.out.split())
    assert there <= words
    assert not absent & words


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "replies"),
    [(["ch"], ["chat"]), (["serve", "--po"], ["--port"]), (["train", "--preset", "sm"], ["small"])],
)
def test_bash_completes(line: list[str], replies: list[str], call: Any) -> None:
    script = call("completion", "bash").out
    words = " ".join(["topograd", *line])
    asked = f"COMP_WORDS=({words}); COMP_CWORD={len(line)}; _topograd; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{asked}"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": path},
    )
    assert done.stdout.split() == replies


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_are_read_by_their_shell(shell: str, call: Any) -> None:
    script = call("completion", shell).out
    assert "topograd completion words" in script
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([program, "-n"], input=script, text=True, check=True)


def test_a_shell_that_is_not_known(call: Any) -> None:
    assert "choose one of bash, zsh, fish" in call("completion", "tcsh").refusal
    assert "completion" in VERBS
