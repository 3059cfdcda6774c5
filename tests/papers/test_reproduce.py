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
        assert one["state"] in ("reproduced", "corrected", "failed", "undecided", "not run")
        assert one["command"]
    assert sum(answer["counts"].values()) == len(answer["claims"])


def test_for_people(call: Any) -> None:
    said = call("reproduce", "--paper", "gram-metrics", "--state", "undecided").out
    assert "heavy-tailed" in said
    assert "0 reproduced, 0 corrected, 0 failed, 1 undecided, 0 not run" in said


def test_the_pages_of_the_site(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from papers import pages
    from papers.reproduction import site_pages

    monkeypatch.setattr(pages, "DOCS", tmp_path)
    written = call("pages", "--json").json["pages"]
    assert {Path(name).relative_to(tmp_path).as_posix() for name in written} == site_pages().keys()
    assert (tmp_path / "papers/gram-metrics.md").read_text(encoding="utf-8") == site_pages()[
        "papers/gram-metrics.md"
    ]


def test_the_page(call: Any, tmp_path: Path) -> None:
    answer = call("reproduce", "--out", tmp_path / "a", "--json").json
    text = Path(answer["page"]).read_text(encoding="utf-8")
    assert "<script" not in text
    for words in ("Dead Directions", "corrected", "python -m papers run stage0-depth"):
        assert words in text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--paper", "x"), "--paper is 'x'; it must be one of product-of-experts"),
        (("--state", "maybe"), " is 'maybe'; it must be one of"),
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
