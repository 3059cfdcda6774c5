"""`topograd simulate`: a table, one JSON object, a figure; no torch, and one line on bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulate import run
from topograd.errors import ConfigError


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--ranks", "1024", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 1024
    assert found["methods"]["staged"][-1]["ranks"] == 1024


def test_a_table_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--ranks", "8", "--figure", str(tmp_path / "scaling.svg")]) == 0
    assert "staged" in capsys.readouterr().out
    assert (tmp_path / "scaling.svg").read_text().lstrip().startswith("<?xml")


def test_times_come_from_a_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"embed": 0.25, "forward": 1.0, "backward": 2.0, "head": 0.5, "optimizer": 0.25}
    parts |= {"message": 0.01, "latency": 0.001, "rounding": 0.002, "copies": 0.003}
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"settings": {"ranks": 2, "layers": 4}, "parts": parts}))
    assert run(["--ranks", "1", "--bench", str(file), "--microbatches", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["methods"]["staged"][0]["seconds"] == pytest.approx(2 * 3.75 + 0.25)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--ranks", "0"], "ranks is 0"),
        (["--mbit", "0"], "--mbit is 0"),
        (["--bench", "nowhere.json"], "cannot be read"),
        (["--microbatches", "-1"], "microbatches is -1"),
        (["--ranks", "65536", "--microbatches", "1000000"], "ask for fewer --ranks or --microbatches"),
        (["--forward", "0"], "--forward is 0"),
        (["--figure", "x.bmp"], "ends in .svg or .png"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        run(flags)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not what `topograd bench pipeline --json` prints"):
        run(["--bench", str(tmp_path / "x.json")])


def test_it_needs_no_torch() -> None:
    code = "import sys; import simulate; sys.exit('torch' in sys.modules)"
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(benchmarks), *filter(None, sys.path)))}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
