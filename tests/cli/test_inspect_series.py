"""`inspect --series` on a run with several checkpoints."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from topograd.cli.inspect_series import show_series


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
    show_series(found)
    assert "phase undecided" in capfd.readouterr().out


def test_checkpoints_of_transformers(call: Any, tmp_path: Path) -> None:
    """The folders that transformers' Trainer leaves, by their steps and not by their names."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 19}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    for step in (9, 10, 100):
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        model.save_pretrained(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text('{"global_step": 11}')
    (tmp_path / "logs").mkdir()
    found = call("inspect", "--series", tmp_path, "--json").json
    assert [point["step"] for point in found["points"]] == [9, 10, 11]
    norms = [point["norm"] for point in found["points"]]
    assert norms == sorted(norms)
    assert found["random"]["step"] == 0
    assert found["text"].startswith("random ids")
    assert Path(found["page"]).is_file()
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text("[]")
    assert "has no global_step" in call("inspect", "--series", tmp_path).refusal


def test_what_is_no_run_is_one_line(call: Any, tmp_path: Path) -> None:
    assert "is not a run (config.toml)" in call("inspect", "--series", tmp_path).refusal
