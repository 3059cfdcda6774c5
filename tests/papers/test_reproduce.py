import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from papers.reproduction import claims


def test_the_contract(call: Any) -> None:
    answer = call("reproduce", "--json").json
    assert len(answer["claims"]) == len(claims()) > 80
    for one in answer["claims"]:
        assert {"paper", "where", "claim", "state", "command"} <= one.keys()
        assert one["state"] in ("reproduced", "corrected", "failed", "open")
        assert one["command"]
    assert sum(answer["counts"].values()) == len(answer["claims"])


def test_for_people(call: Any) -> None:
    said = call("reproduce", "--paper", "gram-metrics", "--state", "failed").out
    assert "heavy-tailed" in said
    assert "0 reproduced, 0 corrected, 1 failed, 0 open" in said
    assert call("reproduce", "--markdown").out.startswith("# The papers, claim by claim")


def test_the_page(call: Any, tmp_path: Path) -> None:
    answer = call("reproduce", "--out", tmp_path / "a", "--json").json
    text = Path(answer["page"]).read_text(encoding="utf-8")
    assert "<script" not in text
    for words in ("Dead Directions", "corrected", "python -m papers run stage0-depth"):
        assert words in text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--paper", "x"), "paper 'x' is unknown; choose one of product-of-experts"),
        (("--state", "maybe"), " is 'maybe'; it must be one of"),
        (("--markdown", "--json"), "--markdown and --json are both given; give one of them"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], why: str, call: Any) -> None:
    assert why.lower() in call("reproduce", *words).refusal.lower()


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, contextlib, io; from papers.__main__ import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): assert main(['reproduce', '--json']) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
