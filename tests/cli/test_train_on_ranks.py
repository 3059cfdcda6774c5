"""`train --parallel` says in one line what it lacks; the ranks themselves are in tests/parallel."""

import pytest

from topograd.cli.train import run
from topograd.errors import ConfigError, ParallelError


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--parallel", "stages=2"], "--parallel needs --out DIR"),
        (["--parallel", "stages=x", "--out", "run"], "stages is 'x'; it must be a number"),
        (["--parallel", "2", "--out", "run"], "give stages=P"),
    ],
)
def test_bad_words_are_refused(flags: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        run(["--preset", "tiny", *flags])


def test_without_torchrun_it_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ParallelError, match="start it with: torchrun --nproc-per-node 2"):
        run(["--preset", "tiny", "--parallel", "stages=2", "--out", "run"])
