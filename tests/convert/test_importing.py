"""Models from outside as runs: the same logits, every verb, and nothing written where something is wrong."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import topograd as tg
from raising import refused
from topograd.cli.main import main
from topograd.convert.export import export_model
from topograd.convert.importing import import_model
from topograd.data.hf_tokenizer import HFTokenizer
from topograd.errors import CheckpointError, ConfigError, TopogradError
from topograd.runs.session import open_session

Source = Callable[[str], tuple[Path, Any]]
TOKENS = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("copy", [False, True], ids=["referred to", "copied"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_logits_are_the_models_own(source: Source, tmp_path: Path, family: str, copy: bool) -> None:
    folder, theirs = source(family)
    found = import_model(folder, tmp_path / "run", partition="2,2", copy=copy)
    assert (found["architecture"], found["layers"], found["vocab"]) == (family, 4, 320)
    assert found["parameters"] == sum(p.numel() for p in theirs.parameters())
    model = tg.load(tmp_path / "run")
    with torch.no_grad():
        assert torch.equal(model.logits(TOKENS), theirs(TOKENS, use_cache=False).logits)
    assert (tmp_path / "run" / "weights.json").exists() != copy


@pytest.fixture(scope="module")
def imported(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("imported") / "run"
    import_model(source("llama")[0], run, partition="2,2")
    return run


@pytest.mark.covers("imported", "decode")
def test_greedy_text_is_the_models_own(source: Source, imported: Path) -> None:
    theirs, model = source("llama")[1], tg.load(imported)
    prompt = model.encode("def read")
    written = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    ours = [e.token for _, e in tg.generate_tokens(tg.FixedDepth(model.engine), [prompt], 12)]
    assert ours == written
    text = model.generate("def read", tokens=12)
    assert model.generate("def read", tokens=12, depth="speculate:3") == text
    assert model.generate("def read", tokens=12, depth="speculate:lookup") == text
    assert model.generate("def read", tokens=12, depth="prefix:1").deepest == 1


def test_weights_are_the_same_wherever_they_lie(source: Source, imported: Path, tmp_path: Path) -> None:
    """What a calibration or a adapter names does not depend on a path."""
    moved = shutil.copytree(source("llama")[0], tmp_path / "moved")
    import_model(moved, tmp_path / "run", partition="4")
    assert open_session(tmp_path / "run").weights == open_session(imported).weights


def test_loading_takes_no_second_copy(source: Source, imported: Path) -> None:
    weights = load_file(source("llama")[0] / "model.safetensors")
    stack = open_session(imported).stack
    ours = stack.get_parameter("embedding.weight")
    assert torch.equal(ours, weights["model.embed_tokens.weight"])
    assert stack.get_parameter("head.weight") is ours, "tied weights are one tensor"
    assert not any(parameter.is_meta for parameter in stack.parameters())


def test_a_partition_that_is_none_is_named_by_its_flag(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    for given in ("x", "2,0,2"):
        flags = ["--out", str(out), "--partition", given]
        assert main(["import", str(source("llama")[0]), *flags]) == 2
        assert f"topograd: --partition '{given}' does not exist: " in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.covers("imported", "decode", feature="early exit")
@pytest.mark.parametrize("verb", ["eval", "compare", "report", "calibrate"])
def test_verbs_work_on_it(
    imported: Path, verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(imported, run)
    more = {"eval": ["--bytes", "800"], "calibrate": ["--bytes", "3000"]}
    assert main([verb, str(run), *more.get(verb, []), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert not (verb == "eval" and (run / "results.json").exists()), "some bytes are not its results"


@pytest.mark.covers("imported", "decode", feature="chat")
def test_a_conversation(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "read", "--tokens", "4", "--json"]
    assert main(["chat", str(imported), *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [message["role"] for message in answer["messages"]] == ["user", "assistant"]
    assert answer["text"] == answer["messages"][-1]["content"]
    assert {"tokens", "depth", "runtime", "seconds"} <= set(answer)
    assert main(["chat", str(imported), *flags, "--system", "read read read"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["messages"][0] == {"role": "system", "content": "read read read"}


def test_commands_of_a_conversation(
    imported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["/system be short", "read", "/reset", "/nonsense", "/help", "again", "/system", "/quit", "never"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", str(imported), "--tokens", "2", "--json"]) == 0
    said = capsys.readouterr()
    (answer, *rest) = said.out.splitlines()
    assert not rest
    messages = json.loads(answer)["messages"]
    assert [message["content"] for message in messages if message["role"] != "assistant"] == ["again"]
    assert "topograd: /nonsense is no command; /help lists them\n" in said.err
    assert "/system TEXT" in said.err


def test_exits_that_were_never_trained_are_named(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for depth, warned in (("prefix:1", True), ("full", False), ("speculate:2", False)):
        assert main(["generate", str(imported), "--prompt", "read", "--tokens", "9", "--depth", depth]) == 0
        assert ("never trained" in capsys.readouterr().err) == warned, depth


def test_a_piped_conversation_is_one_object(
    imported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("read\nagain\n"))
    assert main(["chat", str(imported), "--tokens", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [message["role"] for message in answer["messages"]] == ["user", "assistant"] * 2
    assert {"runtime", "weights", "seconds"} <= set(answer)
    assert main(["chat", str(imported), "--prompt", "read", "--tokens", "-1"]) == 2
    assert capsys.readouterr().err.startswith("topograd: --tokens is -1; it must be a whole number")


def test_what_transformers_keeps_beside_a_tokenizer(source: Source, tmp_path: Path) -> None:
    """Since version 5 the chat template is a file of its own; where texts end is in the model's settings."""
    folder = shutil.copytree(source("llama")[0], tmp_path / "folder")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!", encoding="utf-8")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9, 100000]}')
    import_model(folder, tmp_path / "run")
    tokenizer = tg.load(tmp_path / "run").session.tokenizer
    assert isinstance(tokenizer, HFTokenizer)
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}!"
    assert tokenizer.stop_tokens >= {7, 9, tokenizer.special_ids["eos"]}
    export_model(tmp_path / "run", tmp_path / "out", "hf")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [7, 9]


@pytest.mark.covers("imported", "train", feature="topologies")
def test_it_is_trained_on_in_stages(imported: Path, corpus: Path, tmp_path: Path) -> None:
    base = open_session(imported)
    config = base.config.changed(partition="1,3", steps=3, batch=2, init=str(imported), data=str(corpus))
    config = config.changed(heads="low-rank", head_rank=2, eval_bytes=300)
    result = tg.start(config, tmp_path / "tuned").train()
    assert len(result["bpb"]["prefix"]) == 2
    tuned = open_session(tmp_path / "tuned")
    assert tuned.tokenizer.files() == base.tokenizer.files()
    before, after = (s.stack.get_parameter("layers.0.mlp.up.weight") for s in (base, tuned))
    assert not torch.equal(before, after)
    assert tg.resume(tmp_path / "tuned").step == 3
    assert tg.load(tmp_path / "tuned").generate("def ", tokens=4, depth="prefix:1") is not None


def spoil(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "spoilt")
    return tmp_path / "spoilt"


def test_weights_that_move_or_change_are_refused(source: Source, tmp_path: Path) -> None:
    folder = spoil(source("llama")[0], tmp_path)
    import_model(folder, tmp_path / "run")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="have changed since"):
        open_session(tmp_path / "run")
    file.unlink()
    with pytest.raises(CheckpointError, match="are gone; put them back, or import with --copy"):
        open_session(tmp_path / "run")


def missing_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")


def wrong_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(31)
    save_file(weights, folder / "model.safetensors")


def not_finite(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors")


def two_tokens_of_one_id(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    one, other = list(vocabulary)[5:7]
    vocabulary[one] = vocabulary[other]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def endless_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/dev/zero")


def settings(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def escaping_index(folder: Path) -> None:
    table = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (missing_tensor, "'model.layers.1.mlp.up_proj.weight' is missing"),
        (wrong_shape, r"'model.norm.weight' has shape \(31,\)"),
        (
            settings(model_type="mamba", architectures=["MambaForCausalLM"]),
            "'backbone.embeddings.weight' is",
        ),
        (settings(model_type="unheard", architectures=["UnheardForCausalLM"]), "model type `unheard`"),
        (settings(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}), "yarn"),
        (settings(hidden_size=10**12), "width is 1000000000000"),
        (lambda f: (f / "config.json").write_text("["), "config.json"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "cannot be read"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "a pickle"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer"),
        (settings(vocab_size=100), "shape"),
        (escaping_index, "missing"),
        (not_finite, "'model.norm.weight' has values that are not finite"),
        (two_tokens_of_one_id, "one id"),
        (endless_tokenizer, "it is not a regular file"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(
    source: Source, tmp_path: Path, harm: Callable[[Path], Any], why: str
) -> None:
    folder = spoil(source("llama")[0], tmp_path)
    harm(folder)
    with pytest.raises(TopogradError, match=why) as caught:
        import_model(folder, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_source_that_is_not_there_and_a_context_too_long(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag, given in (("--context", "65"), ("--partition", "2,3")):
        assert main(["import", str(source("llama")[0]), "--out", str(tmp_path / "run"), flag, given]) == 2
        assert f"topograd: {flag} " in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="there is no model at"):
        import_model(tmp_path / "nothing", tmp_path / "run")
    with refused(ConfigError, setting="context", given=65):
        import_model(source("llama")[0], tmp_path / "run", context=65)
    with pytest.raises(ConfigError, match="add up to 4"):
        import_model(source("llama")[0], tmp_path / "run", partition="2,3")
    assert not (tmp_path / "run").exists()
