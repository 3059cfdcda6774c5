"""`inspect --series` on a run with several checkpoints."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from topograd.cli.inspect_series import _show


def test_checkpoints_on_one_axis(
    staged: Path, call: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(staged, tmp_path / "run")
    text = tmp_path / "probe.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 12)
    found = call("inspect", "--series", folder, "--text", text, "--json").json
    steps = [point["step"] for point in found["points"]]
    assert steps == sorted(steps)
    assert steps[-1] == 12
    assert len(steps) > 1
    assert found["phase"] == "undecided"
    assert found["random"]["loss"] > found["points"][-1]["loss"]
    assert 0 <= found["random"]["schur"] <= 1
    for point in found["points"]:
        assert point["coefficient"] is not None
        assert point["interval"][0] <= point["coefficient"] <= point["interval"][1]
        assert point["calibrated"] == (point["reason"] is None)
    assert any("a phase needs 5" in why for why in found["refused"])
    assert found["page"] == str(folder / "geometry-series.html")
    assert "<svg" in (folder / "geometry-series.html").read_text()
    _show(found)
    assert "phase undecided" in capfd.readouterr().out


def test_what_is_no_run_is_one_line(call: Any, tmp_path: Path) -> None:
    assert "is not a run (config.toml)" in call("inspect", "--series", tmp_path).refusal
