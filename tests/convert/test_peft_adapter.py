"""Adapters of peft's: what we write it reads with equal logits, and what it writes we read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import topograd as tg
from calls import Call, caller
from raising import refused
from topograd.cli.main import main
from topograd.convert.export import export_model
from topograd.convert.huggingface import PEFT as CONFIG
from topograd.convert.importing import import_model
from topograd.convert.model_argument import resolve_model
from topograd.convert.peft_adapter import TENSORS, read_peft
from topograd.errors import CheckpointError, ConfigError

peft = pytest.importorskip("peft")
Source = Callable[[str], tuple[Path, Any]]
TOKENS = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(1))
WORDS = [
    "--steps",
    "3",
    "--batch",
    "2",
    "--seq-len",
    "16",
    "--eval-bytes",
    "300",
    "--optimizer.lr-matrix",
    "0.05",
]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    return caller(main, capfd)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS, use_cache=False).logits
    return found


def fresh(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.covers("imported", "export", feature="lora")
@pytest.mark.parametrize(
    ("family", "directions"),
    [("llama", "plain"), ("llama", "safe"), ("qwen3", "pissa"), ("gpt2", "pissa"), ("gpt2", "dead")],
)
def test_peft_reads_a_run_of_lora_with_equal_logits(
    source: Source, corpus: Path, tmp_path: Path, call: Call, family: str, directions: str
) -> None:
    folder, model = source(family)
    flags = ["--init", folder, "--lora-rank", 3, "--lora-directions", directions, "--data", corpus, *WORDS]
    assert call("train", *flags, "--old-text", corpus, "--out", tmp_path / "run", "--json").code == 0
    found = call("export", tmp_path / "run", "--format", "peft", "--out", tmp_path / "out", "--json").json
    assert found["rank"] == (6 if directions == "pissa" else 3)
    assert {"README.md", CONFIG, TENSORS} == set(found["files"])
    ours = tg.load(tmp_path / "run").logits(TOKENS)
    theirs = logits(peft.PeftModel.from_pretrained(fresh(folder), tmp_path / "out"))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=2e-5)
    assert (theirs - logits(model)).abs().max() > 1e-3, "the adapter does something"
    again = tg.load(tmp_path / "out").logits(TOKENS)
    torch.testing.assert_close(again, ours, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 2},
        {"r": 4, "use_rslora": True},
        {"r": 2, "use_dora": True},
        {"r": 2, "alpha_pattern": {"q_proj": 7}, "rank_pattern": {"up_proj": 3}},
    ],
    ids=["lora", "rslora", "dora", "patterns"],
)
def test_an_adapter_of_pefts_is_read(source: Source, tmp_path: Path, settings: dict[str, Any]) -> None:
    folder, _ = source("llama")
    adapter = made_by_peft(folder, tmp_path / "adapter", settings)
    run = tg.load(adapter)
    torch.testing.assert_close(run.logits(TOKENS), logits(read_by_peft(folder, adapter)), rtol=0, atol=2e-5)
    export_model(resolve_model(adapter), tmp_path / "merged", "hf")
    assert torch.equal(logits(fresh(tmp_path / "merged")), run.logits(TOKENS))


def made_by_peft(folder: Path, adapter: Path, settings: dict[str, Any]) -> Path:
    """An adapter with random numbers."""
    targets = ["q_proj", "v_proj", "up_proj"]
    config = peft.LoraConfig(target_modules=targets, lora_alpha=5, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(fresh(folder), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
            if "magnitude" in name:
                parameter.mul_(1 + torch.rand(parameter.shape, generator=generator))
    model.save_pretrained(adapter)
    return adapter


def read_by_peft(folder: Path, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(fresh(folder), adapter)


def test_an_adapter_stands_on_a_run_too(source: Source, tmp_path: Path, call: Call) -> None:
    folder, _ = source("llama")
    adapter = made_by_peft(folder, tmp_path / "adapter", {"r": 2})
    import_model(folder, tmp_path / "base")
    flags = ["--base", tmp_path / "base", "--partition", "2,2", "--out", tmp_path / "run", "--json"]
    assert call("import", adapter, *flags).json["weights"] == "copied"
    wanted = logits(read_by_peft(folder, adapter))
    torch.testing.assert_close(tg.load(tmp_path / "run").logits(TOKENS), wanted, rtol=0, atol=2e-5)
    assert call("generate", adapter, "--prompt", "def", "--tokens", 3, "--json").json["tokens"] == 3
    assert call("score", adapter, "--context", "def ", "--continuation", "read", "--json").code == 0
    wrong = call("import", folder, *flags[:2], "--out", tmp_path / "no")
    assert wrong.code == 2
    assert "given with an adapter" in wrong.err


def test_what_is_no_lora_is_refused(source: Source, tmp_path: Path) -> None:
    adapter = made_by_peft(source("llama")[0], tmp_path / "adapter", {"r": 2})
    settings = json.loads((adapter / CONFIG).read_text())
    tensors = load_file(adapter / TENSORS)
    for changes in ({"peft_type": "IA3"}, {"layer_replication": [[0, 2]]}, {"alora_invocation_tokens": [1]}):
        (adapter / CONFIG).write_text(json.dumps(settings | changes))
        with refused(CheckpointError, setting="adapter"):
            read_peft(adapter)
    (adapter / CONFIG).write_text(json.dumps(settings))
    (adapter / TENSORS).rename(adapter / "adapter_model.bin")
    with refused(CheckpointError, setting="adapter"):
        read_peft(adapter)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, adapter / TENSORS)
    with refused(CheckpointError, setting="adapter"):
        read_peft(adapter)
    save_file(tensors, adapter / TENSORS)
    with refused(CheckpointError, setting="base"):
        import_model(adapter, tmp_path / "run", base=source("gpt2")[0])
    (adapter / CONFIG).write_text(json.dumps(settings | {"base_model_name_or_path": None}))
    with refused(CheckpointError, setting="base"):
        resolve_model(adapter)


@pytest.mark.parametrize("begun", ["pissa", "olora"])
def test_a_correction_that_changed_its_base_is_refused(source: Source, tmp_path: Path, begun: str) -> None:
    """peft takes the beginning out of the base's matrix when it opens such an adapter."""
    folder, _ = source("llama")
    adapter = made_by_peft(folder, tmp_path / "adapter", {"r": 2, "init_lora_weights": begun})
    with refused(CheckpointError, setting="adapter"):
        read_peft(adapter)


def test_what_has_no_lora_is_not_exported(imported: Any, tmp_path: Path) -> None:
    with refused(ConfigError, setting="format"):
        export_model(imported.run.folder, tmp_path / "out", "peft")
    assert not (tmp_path / "out").exists()


def test_an_adapter_beside_an_export_is_not_taken_for_pefts(
    source: Source, corpus: Path, tmp_path: Path, call: Call
) -> None:
    folder, _ = source("llama")
    flags = [
        "--init",
        folder,
        "--lora-rank",
        2,
        "--data",
        corpus,
        *WORDS,
        "--out",
        tmp_path / "run",
        "--json",
    ]
    assert call("train", *flags).code == 0
    export_model(tmp_path / "run", tmp_path / "out", "hf")
    assert (tmp_path / "out" / "topograd").is_dir()
    with pytest.raises((ValueError, OSError), match=CONFIG):
        peft.PeftModel.from_pretrained(fresh(tmp_path / "out"), tmp_path / "out" / "topograd")


def test_a_model_that_transformers_runs(adapted: Any, corpus: Path, tmp_path: Path, call: Call) -> None:
    flags = ["--init", adapted.run.folder, "--lora-rank", 2, "--lora-directions", "safe", "--data", corpus]
    assert call("train", *flags, *WORDS, "--out", tmp_path / "run", "--json").json["finished"]
    found = call("export", tmp_path / "run", "--format", "peft", "--out", tmp_path / "out", "--json").json
    assert found["modules"] == 4 * 3
    theirs = peft.PeftModel.from_pretrained(fresh(adapted.run.folder.parent / "neox"), tmp_path / "out")
    torch.testing.assert_close(logits(theirs), tg.load(tmp_path / "run").logits(TOKENS), rtol=0, atol=2e-5)


def test_what_peft_would_not_read_is_not_written(
    source: Source, corpus: Path, tmp_path: Path, call: Call
) -> None:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 320}
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    folder = tmp_path / "mamba"
    transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, **ends)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source("llama")[0] / name, folder / name)
    import_model(folder, tmp_path / "base", context=64)
    flags = ["--init", tmp_path / "base", "--lora-rank", 1, "--data", corpus, *WORDS]
    assert call("train", *flags, "--out", tmp_path / "run", "--json").json["finished"]
    refusal = call("export", tmp_path / "run", "--format", "peft", "--out", tmp_path / "out").refusal
    assert "out_proj of a mamba, which peft refuses to read" in refusal
    assert not (tmp_path / "out").exists()
