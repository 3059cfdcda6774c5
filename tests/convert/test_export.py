"""Out again: transformers loads what was written with equal logits, and a GGUF comes back the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import topograd as tg
from raising import refused
from topograd.cli.main import main
from topograd.convert.export import export_model
from topograd.convert.importing import import_model
from topograd.decode.lookup import NGramTable
from topograd.decode.retrofitted import retrofit_tensors
from topograd.errors import ConfigError, RunError
from topograd.nn.draft_stage import DraftStage
from topograd.nn.translator import Translator
from topograd.runs.adapter import BaseIdentity, create_adapter, open_adapter
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, open_session

Source = Callable[[str], tuple[Path, Any]]
TOKENS = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.covers("imported", "export")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_transformers_loads_it_with_equal_logits(source: Source, tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder, model = source(family)
    import_model(folder, tmp_path / "run", partition="2,2")
    flags = ["export", str(tmp_path / "run"), "--format", "hf", "--out", str(tmp_path / "out"), "--json"]
    assert main(flags) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(back(TOKENS, use_cache=False).logits, model(TOKENS, use_cache=False).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("def réad")["input_ids"] == tg.load(tmp_path / "run").encode("def réad")
    assert "licence" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.covers("adapted", "export")
def test_what_a_model_learned_that_transformers_runs_goes_back_to_it(
    adapted: LoadedTextRun, corpus: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    words = ["train", "--init", adapted.run.folder, "--data", corpus, "--lora-rank", 2, "--steps", 2]
    size = ["--batch", 2, "--eval-every", 0, "--eval-bytes", 300, "--out", tmp_path / "run"]
    assert main([str(word) for word in (*words, *size)]) == 0
    export_model(tmp_path / "run", tmp_path / "out", "hf")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = tg.load(tmp_path / "run").logits(TOKENS)
    assert not torch.equal(ours, tg.load(adapted.run.folder).logits(TOKENS)), "it learned"
    with torch.no_grad():
        torch.testing.assert_close(back(TOKENS, use_cache=False).logits, ours, rtol=0, atol=1e-5)
    with refused(ConfigError) as caught:
        export_model(tmp_path / "run", tmp_path / "gguf", "gguf")
    assert "use format hf" in str(caught.value)


@pytest.mark.covers("imported", "export")
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_a_gguf_comes_back(source: Source, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("gguf")
    import_model(source("llama")[0], tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out", "gguf", kind)
    import_model(tmp_path / "out" / "model.gguf", tmp_path / "again")
    first, second = tg.load(tmp_path / "run"), tg.load(tmp_path / "again")
    assert second.encode("def read 12 é") == first.encode("def read 12 é")
    a, b = first.logits(TOKENS), second.logits(TOKENS)
    if kind == "F32":
        assert torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=0, atol=0.05)
    config = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == first.session.tokenizer.chat_template


def test_a_gguf_keeps_the_token_before_a_text(source: Source, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = shutil.copytree(source("llama")[0], tmp_path / "folder")
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    import_model(folder, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out", "gguf")
    import_model(tmp_path / "out" / "model.gguf", tmp_path / "again")
    first, second = (tg.load(tmp_path / name) for name in ("run", "again"))
    assert first.encode("def") == second.encode("def")
    assert len(first.encode("def")) == len(first.session.tokenizer.encode("def")) + 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 5},
            "a sliding",
        ),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": None}, "rope scaling"),
        ({"add_prefix_space": True}, "the tokenizer splits texts in a way"),
        ({"merges": []}, "the tokenizer has no merges"),
    ],
)
def test_what_a_gguf_would_lose_is_refused(
    source: Source, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    """Its readers would compute something else, and nobody would know."""
    pytest.importorskip("gguf")
    folder = shutil.copytree(source("llama")[0], tmp_path / "folder")
    part = {"add_prefix_space": "pre_tokenizer", "merges": "model"}.get(next(iter(changes)))
    file = folder / ("config.json" if part is None else "tokenizer.json")
    content = json.loads(file.read_text())
    (content if part is None else content[part]).update(changes)
    file.write_text(json.dumps(content))
    import_model(folder, tmp_path / "run")
    with pytest.raises(ConfigError, match=why):
        export_model(tmp_path / "run", tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_what_no_format_can_say_is_refused(source: Source, straight: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model of our own kind"):
        export_model(straight.folder, tmp_path / "out", "hf")
    import_model(source("llama")[0], tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--weights", "Q8_0"]) == 2
    with refused(ConfigError, setting="format", given="tflite"):
        export_model(tmp_path / "run", tmp_path / "out", "tflite")
    (tmp_path / "out").mkdir()
    with pytest.raises(RunError, match="exists already"):
        export_model(tmp_path / "run", tmp_path / "out", "hf")


@pytest.mark.covers("imported", "train", "export", feature="lora")
@pytest.mark.covers("imported", "train", "export", feature="frozen")
@pytest.mark.parametrize("how", [["--lora-rank", "2"], ["--frozen"]], ids=["lora", "frozen"])
def test_a_tuned_model_is_plain_with_a_adapter_beside_it(
    source: Source, corpus: Path, tmp_path: Path, how: list[str]
) -> None:
    """LoRA is merged, the heads of exits stay outside; a frozen model is the one that came in."""
    transformers = pytest.importorskip("transformers")
    import_model(source("llama")[0], tmp_path / "run", partition="2,2", context=32)
    flags = ["train", "--init", str(tmp_path / "run"), "--out", str(tmp_path / "tuned"), *how]
    more = ["--data", str(corpus), "--partition", "2,2", "--steps", "2", "--seq-len", "16"]
    assert main([*flags, *more, "--eval-bytes", "400"]) == 0
    export_model(tmp_path / "tuned", tmp_path / "out", "hf")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = back(TOKENS, use_cache=False).logits
    assert torch.equal(logits, tg.load(tmp_path / "tuned").logits(TOKENS))
    assert torch.equal(logits, tg.load(tmp_path / "run").logits(TOKENS)) == (how == ["--frozen"])
    adapter = open_adapter(tmp_path / "out" / "topograd")
    assert adapter.settings["stages"] == [[0, 2], [2, 4]]
    ends = {name.rpartition(".")[2] for name in adapter.tensors}
    assert ends == ({"up", "down"} if how == ["--frozen"] else {"lora_a", "lora_b"})
    names = {path.name for path in (tmp_path / "out" / "topograd").iterdir()}
    assert "README.md" in names
    assert not {"adapter_config.json", "adapter_model.safetensors"} & names, (
        "peft would load them, and nothing"
    )


@pytest.mark.covers("imported", "export", feature="retrofit")
def test_exits_of_a_retrofit_go_into_the_adapter(source: Source, tmp_path: Path) -> None:
    run = tmp_path / "run"
    import_model(source("llama")[0], run, partition="2,2", context=32)
    session = open_session(run)
    stage = DraftStage(session.stack, torch.arange(20))
    exits = {0: Translator(session.stack.width)}
    tensors = retrofit_tensors(stage, NGramTable.of(np.array([[1, 2]]), least=1), exits)
    base = BaseIdentity.of(session)
    create_adapter(run / "draft", kind="draft", base=base, tensors=tensors, settings={}, card="")
    export_model(run, tmp_path / "out", "hf")
    found = open_adapter(tmp_path / "out" / "topograd").tensors
    assert set(found) == {"exit.0.affine.weight", "exit.0.affine.bias"}
