"""`topograd coefficient` on a run and on a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from topograd.geometry.singular import parts
from topograd.geometry.singular.langevin import SEARCHED, TIMED, Target


def test_layers_of_a_run(staged: Path, call: Any, tmp_path: Path) -> None:
    text = tmp_path / "probe.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 12)
    answer = call("coefficient", staged, "--layers", 2, "--draws", 8, "--text", text, "--json")
    found = answer.json
    assert [part["name"] for part in found["parts"]] == ["layers.0", "layers.1"]
    for part in found["parts"]:
        assert part["interval"][0] <= part["value"] <= part["interval"][1]
        assert part["calibrated"] == (part["reason"] is None)
        assert part["weights"] > 0
    assert len({part["localization"] for part in found["parts"]}) == 1
    assert found["estimated_seconds"] > 0
    assert "2 parts: about" in answer.err
    assert found["text"] == str(text)


def test_the_estimate_counts_every_gradient_at_what_it_costs(
    call: Any, staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that a gradient alone moves, by as many seconds as layers are computed for it."""
    now, taken = 0.0, 0
    gradient = Target.gradient

    def counted(target: Target, weights: dict[str, torch.Tensor], batch: Any) -> Any:
        nonlocal now, taken
        now += 2.0 - int(next(iter(weights)).split(".")[1])  # layer 0 costs two, layer 1 one
        taken += 1
        return gradient(target, weights, batch)

    monkeypatch.setattr(Target, "gradient", counted)
    monkeypatch.setattr("topograd.geometry.singular.langevin.time.perf_counter", lambda: now)
    found = call("coefficient", staged, "--layers", 2, "--draws", 8, "--json").json
    timed = 2 * (1 + TIMED)
    assert taken == timed + 2 * (4 * (32 + 8 * 4) + SEARCHED), "burn-in, draws and the search for a step"
    assert found["estimated_seconds"] == now - 3 * timed / 2


def test_heads_of_a_hugging_face_folder(call: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        architectures=["LlamaForCausalLM"],
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    answer = call("coefficient", tmp_path / "model", "--layers", 1, "--heads", "--draws", 8)
    assert answer.code == 0
    assert "λ̂ by part" in answer.out
    assert "2 parts" in answer.err


def test_what_was_sampled_before_ctrl_c_is_shown(
    call: Any, staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of a large model were lost."""
    sampled = parts.sample

    def once(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(parts, "sample", interrupted)
        return sampled(*given, **named)

    def interrupted(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(parts, "sample", once)
    answer = call("coefficient", staged, "--layers", 2, "--draws", 8, "--json")
    assert answer.code == 130
    shown = json.loads(answer.out)
    assert [part["name"] for part in shown["parts"]] == ["layers.0"]
    assert shown["unfinished"] == ["layers.1"]
    assert "1 of 2 parts were sampled" in answer.err


def test_what_cannot_be_sampled_is_one_line(staged: Path, call: Any, tmp_path: Path) -> None:
    assert "--layers is 0" in call("coefficient", staged, "--layers", 0).refusal
    assert "--draws is 3" in call("coefficient", staged, "--draws", 3).refusal
    assert "it does not exist" in call("coefficient", tmp_path / "nowhere").refusal
