"""Every flag of every command with hostile values: one line and exit code 2, or nothing to complain about."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from calls import Call
from damages import files_of
from topograd.cli.main import VERBS
from topograd.runs.folder import Run

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


READERS = ("inspect", "coefficient")
SEARCHES = ("search soft", "search surgery", "search pareto --out study")
DEVICES = ("abacus", "cuda:99", "meta", "hpu", "mkldnn", "cuda:-1", *HOSTILE)


@pytest.mark.parametrize(
    "name",
    ["train", "train --task images --data digits", *READERS, *SEARCHES],
)
def test_devices_that_cannot_be_used(
    name: str,
    straight: Run,
    call: Call,
    count: Callable[[str, str], None],
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are refused by commands that would begin real work with a device that is there."""
    monkeypatch.chdir(tmp_path)
    place = [str(straight.folder)] if name in READERS else []
    for device in random.Random(name).sample(DEVICES, min(8 * times, len(DEVICES))):
        answer = call(*name.split(), *place, f"--device={device}")
        assert answer.code == 2, (device, answer)
        assert "Traceback" not in answer.err, (device, answer.err)
        assert answer.err.splitlines()[-1].startswith("topograd: --device"), (device, answer.err)
        count("devices", "refused")
    assert not files_of(tmp_path), "a study of these settings would refuse others"


def test_every_device_flag_is_tried(call: Call) -> None:
    """A new command with a device belongs in the test above."""
    names = [name for verb in VERBS for name in commands(call, verb)]
    found = {name for name in names if "--device" in call(*name.split(), "--help-all").out}
    assert found == {"train", *READERS, *(" ".join(name.split()[:2]) for name in SEARCHES)}
