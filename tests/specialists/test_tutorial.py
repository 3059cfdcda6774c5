"""docs/tutorials/two-specialists.md, executed as a reader would, with a small base and few steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from topograd.cli.main import main
from topograd.runs.session import LoadedTextRun

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "two-specialists.md"


def test_the_tutorial_runs(
    imported: LoadedTextRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    ran = []
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
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
            verb = words[words[0] == "specialist"]
            trains = verb in ("finetune", "compose") or (verb == "route" and "--data" in words)
            small = ["--context", "32"] if trains else []
            assert main([*words, *small]) == 0, capsys.readouterr().err
            ran.append(verb)
    assert ran == ["attach"] * 2 + ["finetune"] * 2 + ["chat"] * 2 + [
        "generate",
        "probe",
        "compose",
        "route",
        "route",
        "chat",
        "report",
    ]
    assert "0.0000" in capsys.readouterr().out
