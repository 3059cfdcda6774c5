"""Every flag of every command with hostile values: one line and exit code 2, or nothing to complain about."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from calls import Call
from topograd.cli.main import VERBS

HOSTILE = (
    "", " ", "nan", "-inf", "-1", "0", "1e999", "99999999999999999999", "None", "--", "-", "../../etc/passwd",
    "/dev/zero", "é\u202e\x1b[2J", "x" * 5000, "\udcff", "a,b,,c", "1,0,-3", "{}", "[1", "'\"`$(id)", "http://x",
)  # fmt: skip
WORK = {"demo": ["--steps", "-1"], "train": ["--data", "/nowhere/x"], "doctor": ["--nothing"]}
"""What keeps a command from beginning real work; the others are given a model that does not exist."""
NOWHERE = "/nowhere/model"


def commands(call: Call, verb: str) -> dict[str, list[str]]:
    """A command, or each command of a group, with the flags that its help names."""
    text = call(*verb.split(), "--help").out
    group = re.match(r"usage: topograd [a-z ]+ \{([a-z,-]+)\}", text)
    if group is None:
        return {verb: sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*", text)))}
    return {
        name: flags for sub in group[1].split(",") for name, flags in commands(call, f"{verb} {sub}").items()
    }


@pytest.mark.parametrize("verb", VERBS)
def test_no_value_makes_a_traceback(
    verb: str,
    call: Call,
    count: Callable[[str, str], None],
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(verb)
    for name, flags in commands(call, verb).items():
        for _ in range(12 * times if flags else 0):
            words = [word for flag in chance.choices(flags, k=2) for word in (flag, chance.choice(HOSTILE))]
            answer = call(*name.split(), *WORK.get(verb, [NOWHERE]), *words)
            assert answer.code in (0, 2), (words, answer)
            assert "Traceback" not in answer.err, (words, answer.err)
            if answer.code == 2:
                assert answer.err.splitlines()[-1].startswith("topograd: "), (words, answer.err)
            count("flags", {0: "answered", 2: "refused"}[answer.code])
    assert not any(tmp_path.iterdir()), "nothing is left behind"
