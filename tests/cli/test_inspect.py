import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from topograd.cli.probe_model import batches_of
from topograd.data.windows import Text


def tiny(folder: Path, kind: str) -> Path:
    """A random model of Hugging Face in a folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, kind)
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model(model.config_class(**shape, vocab_size=40, max_position_embeddings=16)).save_pretrained(folder)
    return folder


def refusal(answer: Any) -> str:
    """The line that says what was wrong, after the one that says what is read."""
    assert (answer.code, answer.out) == (2, "")
    first, *_, last = answer.err.splitlines()  # on a busy machine, how far it is stands between
    assert first.startswith("topograd: reading ")
    return str(last)


@pytest.mark.covers("gpt", feature="inspect")
def test_a_run_of_ours(staged: Path, call: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(staged, tmp_path / "run")
    found = call("inspect", folder, "--json").json
    assert found["kind"] == "run"
    assert found["step"] == 12
    assert found["stream"]["names"] == ["layers.0", "layers.1"]
    assert {"layers.1.mlp.up", "head"} <= found["layers"].keys()
    assert found["fisher"] == "monte-carlo"
    assert "embedding.weight" in found["uncovered"]
    assert found["page"] == str(folder / "geometry.html")
    assert "<svg" in (folder / "geometry.html").read_text()
    kinds = {one["kind"] for one in found["directions"]}
    assert kinds <= {"symmetry", "dead", "live"}
    assert "symmetry" in kinds
    assert all({"layer", "order", "interval"} <= one.keys() for one in found["directions"])
    shares = [one["share"] for one in found["directions"]]
    assert all(0 <= share["interval"][0] <= share["value"] <= share["interval"][1] for share in shares)
    assert {share["n_beta"] for share in shares} == {found["terms"] / math.log(found["terms"])}
    assert any("At the scale of the text" in words for words in found["sentences"])
    assert found["refused"]
    again = call("inspect", folder, "--json").json
    assert {**again, "seconds": 0} == {**found, "seconds": 0}, "the same checkpoint reads the same"


def test_tables_for_people_and_a_page_elsewhere(backprop: Path, call: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    before = sorted(backprop.rglob("*"))
    answer = call("inspect", backprop, "--out", page)
    assert answer.code == 0
    for words in ("of the stream", "layers.0.mlp.up", "Factors (monte-carlo Fisher)", "page.html"):
        assert words in " ".join(answer.out.split())
    assert "no LayerNorm" in answer.err
    assert page.exists()
    assert sorted(backprop.rglob("*")) == before


def test_an_encoder_has_no_gradients(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tiny(tmp_path / "bert", "BertModel")
    before = sorted(folder.iterdir())
    found = call("inspect", folder, "--json").json
    assert found["kind"] == "bert"
    assert found["fisher"] is None
    assert all(layer["G"] is None for layer in found["layers"].values())
    assert len(found["norms"]) == 5
    assert all(norm["found"] for norm in found["norms"].values())
    assert found["text"].startswith("random ids")
    assert found["page"] == "bert-geometry.html"
    assert sorted(folder.iterdir()) == before, "nothing is written into somebody's checkpoint"
    assert "5 of 5" in (tmp_path / "bert-geometry.html").read_text()


@pytest.mark.covers("imported", feature="inspect")
def test_a_causal_model_has_and_rmsnorm_fails(call: Any, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "llama", "LlamaForCausalLM")
    found = call("inspect", folder, "--out", tmp_path / "page.html", "--json").json
    assert found["layers"]["lm_head"]["G"]["rank"] == 39, "all but the softmax's own direction"
    assert len(found["norms"]) == 5
    assert not any(norm["exact"] or norm["found"] for norm in found["norms"].values())


def test_what_cannot_be_read_is_one_line(staged: Path, call: Any, tmp_path: Path) -> None:
    assert "it does not exist; give a run's folder" in call("inspect", tmp_path / "nowhere").refusal
    assert "give either MODEL or --series" in call("inspect").refusal
    assert "give either" in call("inspect", staged, "--series", staged).refusal
    assert "--scans is 0" in call("inspect", staged, "--scans", "0").refusal
    assert "nonsense" in call("inspect", staged, "--device", "nonsense").refusal
    assert "no-such.txt" in call("inspect", staged, "--text", tmp_path / "no-such.txt").refusal
    nowhere = call("inspect", staged, "--out", tmp_path / "no" / "page.html").refusal
    assert "give a file in a folder you can write" in nowhere
    (tmp_path / "config.json").write_text("{}")
    assert "has no weights" in refusal(call("inspect", tmp_path, "--json"))


def test_text_of_ones_own_and_fewer_digits(staged: Path, call: Any, tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("Nothing that anybody has trained on. " * 40)
    page = tmp_path / "page.html"
    flags = ("--text", text, "--dtype", "float32", "--scans", "2", "--out", page, "--json")
    found = call("inspect", staged, *flags).json
    assert found["text"] == str(text)
    assert found["resolution"] == 1024 * torch.finfo(torch.float32).eps ** 2
    assert any("layers were not scanned, the flattest 2 were: --scans" in why for why in found["refused"])
    assert 'id="advice"' in page.read_text()


def test_rows_hold_no_padding_and_are_spread_over_the_text() -> None:
    inputs = torch.arange(900).view(3, 300)
    targets = inputs + 1
    targets[0, 200:], targets[1, 90:] = -100, -100
    batches = batches_of(Text(inputs, targets, 1), torch.device("cpu"), 256)
    assert [batch[0].shape for batch in batches] == [(2, 128)], "of the three whole rows two"
    assert all((one + 1 == other).all() for one, other in batches)
    assert batches[0][0][:, 0].tolist() == [0, 600]
    short = batches_of(Text(inputs[1:2], targets[1:2], 1), torch.device("cpu"), 256)
    assert [batch[0].shape for batch in short] == [(1, 90)], "a text shorter than a row is one"


def test_nan_weights_are_named(call: Any, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "bert", "BertModel")
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.1.output.dense.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    said = refusal(call("inspect", folder, "--out", tmp_path / "page.html"))
    assert "encoder.layer.1.output.dense.weight has a value that is not finite" in said
    assert not (tmp_path / "page.html").exists()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "bert"


def test_a_folder_is_loaded_in_the_type_that_is_read(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from topograd.convert import huggingface

    seen: list[torch.dtype] = []
    load = huggingface.load

    def loading(folder: Path, kind: torch.dtype) -> huggingface.Loaded:
        seen.append(kind)
        return load(folder, kind)

    monkeypatch.setattr(huggingface, "load", loading)
    folder = tiny(tmp_path / "model", "LlamaForCausalLM")
    for flags in ((), ("--dtype", "float32")):
        answer = call("inspect", folder, "--scans", 1, "--out", tmp_path / "page.html", "--json", *flags)
        assert answer.code == 0
    assert seen == [torch.float64, torch.float32]
