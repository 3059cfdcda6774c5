"""docs/specialists.md, executed as a reader would, with a small base and few steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from topograd.cli.main import main
from topograd.runs.session import LoadedTextRun

PAGE = Path(__file__).parents[2] / "docs" / "specialists.md"


def test_the_tutorial_runs(
    imported: LoadedTextRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    tutorial = text[text.index("## From a base") : text.index("## In Python")]
    monkeypatch.chdir(tmp_path)
    ran = []
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", tutorial, re.MULTILINE | re.DOTALL):
        if kind == "python":
            exec(compile(block, PAGE.name, "exec"), {"folder": tmp_path})
            continue
        for line in block.splitlines():
            words = shlex.split(line)[1:]
            words = [str(imported.run.folder) if word == "runs/smollm2" else word for word in words]
            words = [
                "2" if before == "--steps" else word
                for before, word in zip(["", *words], words, strict=False)
            ]
            small = {"finetune": ["--context", "32"], "compose": ["--context", "32"]}.get(words[0], [])
            small = ["--context", "32"] if words[0] == "route" and "--data" in words else small
            assert main([*words, *small]) == 0, capsys.readouterr().err
            ran.append(words[0])
    assert ran == ["attach"] * 2 + ["finetune"] * 2 + ["generate"] * 3 + [
        "probe",
        "compose",
        "route",
        "route",
        "generate",
        "report",
    ]
    assert "0.0000" in capsys.readouterr().out
