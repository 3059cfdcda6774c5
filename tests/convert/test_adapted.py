"""An architecture without a native stack is a run too: the same logits, every mode, and trained on."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import topograd as tg
from topograd.cli.main import main
from topograd.convert.importing import import_model
from topograd.errors import TopogradError
from topograd.nn.adapted.spec import AdaptedConfig
from topograd.runs.session import open_session

transformers: Any = pytest.importorskip("transformers")
TOKENS = torch.randint(300, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def theirs(source: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small GPT-NeoX, as Pythia is."""
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=320,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    model = transformers.GPTNeoXForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("neox") / "neox"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source("llama")[0] / name, folder / name)
    return folder, model


@pytest.fixture(scope="module")
def run(theirs: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted") / "run"
    found = import_model(theirs[0], folder, partition="2,2")
    assert (found["architecture"], found["layers"], found["native"]) == ("gpt_neox", 4, False)
    return folder


@pytest.mark.covers("adapted", "decode")
@pytest.mark.covers("adapted", "decode", feature="speculation")
def test_logits_and_greedy_text_are_the_models_own(theirs: tuple[Path, Any], run: Path) -> None:
    model = tg.load(run)
    with torch.no_grad():
        assert torch.equal(model.logits(TOKENS), theirs[1](TOKENS, use_cache=False).logits)
    prompt = model.encode("def read")
    written = (
        theirs[1]
        .generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :]
        .tolist()
    )
    ours = [e.token for _, e in tg.generate_tokens(tg.FixedDepth(model.engine), [prompt], 6)]
    assert ours == written
    text = model.generate("def read", tokens=6)
    assert model.generate("def read", tokens=6, depth="speculate:lookup") == text


@pytest.mark.covers("adapted", "train", feature="lora")
@pytest.mark.covers("adapted", "train", feature="topologies")
def test_verbs_work_on_it(
    run: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run), "--data", str(corpus), "--bytes", "400", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["bpb"]["prefix"]) == 2
    assert main(["generate", str(run), "--prompt", "def", "--tokens", "3", "--json"]) == 0
    flags = ["train", "--init", str(run), "--partition", "2,2", "--data", str(corpus), "--lora-rank", "2"]
    more = ["--steps", "2", "--seq-len", "16", "--eval-bytes", "400", "--out", str(tmp_path / "tuned")]
    assert main([*flags, *more]) == 0
    tuned, base = open_session(tmp_path / "tuned"), open_session(run)
    with torch.no_grad():
        assert not torch.equal(tuned.stack(TOKENS), base.stack(TOKENS))
    capsys.readouterr()
    assert main(["export", str(run), "--format", "hf", "--out", str(tmp_path / "out")]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.allclose(again(TOKENS).logits, base.stack(TOKENS), atol=1e-5)


def test_what_cannot_be_is_one_line_and_leaves_nothing(
    theirs: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(theirs[0], tmp_path / "neox"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "nothing-known"}))
    with pytest.raises(TopogradError, match="cannot be loaded"):
        import_model(folder, tmp_path / "run")
    (folder / "config.json").write_text(json.dumps(settings))
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "transformers" else real(name, *rest)
    )
    with pytest.raises(TopogradError, match=r"gpt_neox has no stack .* install topograd\[hf\]"):
        import_model(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_are_checked() -> None:
    sizes: dict[str, Any] = {"layers": 2, "width": 4, "vocab": 9, "context": 8}
    with pytest.raises(TopogradError, match="no JSON object"):
        AdaptedConfig(settings="[", list="a", head="b", **sizes)
    with pytest.raises(TopogradError, match=r"model\.width is 0"):
        AdaptedConfig(settings="{}", list="a", head="b", **{**sizes, "width": 0})
