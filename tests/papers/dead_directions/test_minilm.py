"""The study of MiniLM in miniature: a tiny random BERT, and a run of ours as the negative."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from papers.dead_directions import minilm as study
from papers.outcome import asked
from raising import refused
from topograd.errors import ConfigError
from topograd.nn.config import GPTConfig
from topograd.runs.config import TrainConfig
from topograd.runs.topology_config import TopologyConfig
from topograd.training.runs import start


def test_layernorms_pass_trained_or_fresh(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.BertConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=40
    )
    model = transformers.BertModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    models = study.trained_and_fresh(tmp_path)
    assert models["trained"].stream != models["fresh"].stream
    for reading in models.values():
        assert len(reading.norms) == 5
        assert all(found.exact and found.cosine >= 0.999 for found in reading.norms.values())
    streams = study.stream_table(models)
    assert [row[0] for row in streams.rows] == ["input", "encoder.layer.0", "encoder.layer.1"]
    assert all(len(row) == len(streams.header) for row in streams.rows)


def test_the_rmsnorm_of_our_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = tmp_path / "text.txt"
    words = random.Random(0).choices(["fish", "swim", "in", "rivers", "and", "seas"], k=900)
    text.write_text(" ".join(words), encoding="utf-8")
    model = GPTConfig(layers=2, width=16, heads=2, context=16)
    config = TrainConfig(
        model=model,
        data=str(text),
        tokenizer="bytes",
        topology=TopologyConfig(partition="2"),
        steps=3,
        batch=2,
    )
    start(config, tmp_path / "run").train()
    found = study.without_kernel(tmp_path / "run")
    assert list(found) == ["layers.0", "layers.1"]
    assert all(not reading.exact and reading.cosine < 0.5 for reading in found.values())
    table = study.kernel_table("ours", found)
    assert [row[:2] for row in table.rows] == [("layers.0", "none"), ("layers.1", "none")]


def test_the_study_joins_its_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = study.KernelReading(dimensions=1, cosine=1.0, share=0.0, samples=3, exact=True)
    stream = SimpleNamespace(
        names=("a",), sigma=(2.0, 1.0), effective_ranks=(3.0, 2.0), rank=2, verdict="kept"
    )
    models = {name: study.Reading({"norm": reading}, stream) for name in ("trained", "fresh")}  # type: ignore[arg-type]
    read: list[int] = []

    def without(run: Path, limit_bytes: int) -> dict[str, study.KernelReading]:
        read.append(limit_bytes)
        return {"layers.0": replace(reading, exact=False, cosine=0.1)}

    monkeypatch.setattr(study, "weights_folder", lambda: tmp_path)
    monkeypatch.setattr(study, "trained_and_fresh", lambda folder, rank: models)
    monkeypatch.setattr(study, "without_kernel", without)
    found = study.run(asked("minilm", "tiny"))
    assert read == [study.TEXT_BYTES // 10]
    assert [row["model"] for row in found.rows] == ["trained", "fresh", "RMSNorm GPT"]
    assert [len(table.rows) for table in found.tables] == [1, 1, 1, 2]
    assert found.tables[-1].rows[1] == ("a", "0.5", "2.0", "0.5", "2.0")


def test_without_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "PACKAGE", "a_package_that_nobody_has")
    with refused(ConfigError, setting="model"):
        study.run(asked("minilm", "tiny"))
