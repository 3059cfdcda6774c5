"""Which runtime a command uses: it says so, and what is installed changes no text but at ties."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from topograd.decode.agreement import differences
from topograd.decode.depths import engine_of
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.pretrained import REFERENCE
from topograd.runs.session import open_session
from topograd.runtime.choice import preferred
from topograd.runtime.native import library

PROMPTS = ("def read(", "import os\n", "class Stack:\n    def ", "for i in range(", "x = [", "return ")
ONNX = importlib.util.find_spec("onnxruntime") is not None and importlib.util.find_spec("onnx") is not None
needs_onnx = pytest.mark.skipif(not ONNX, reason="the extra runtime is not installed")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """onnxruntime cannot be imported, and no kernels were built, until `undo`."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(library, "missing_reason", lambda: "no compiler")
    return monkeypatch


@needs_onnx
def test_the_text_is_the_same_in_torch_but_at_ties(call: Any, bare: pytest.MonkeyPatch) -> None:
    def texts() -> list[dict[str, Any]]:
        words = ("--tokens", 24, "--depth", "full", "--json")
        return [call("generate", "--prompt", prompt, *words).json for prompt in PROMPTS]

    without = texts()
    bare.undo()
    with_ = texts()
    assert {text["runtime"] for text in without} == {"torch"}
    assert {text["runtime"] for text in with_} == {preferred()}
    session = open_session(REFERENCE)
    prompts = [session.tokenizer.encode(prompt, "prompt") for prompt in PROMPTS]
    engines = [engine_of(session, name) for name in ("torch", preferred())]
    torch, faster = ([generate_batch(FixedDepth(engine), [p], 24)[0] for p in prompts] for engine in engines)
    for text, ids in zip((*without, *with_), (*torch, *faster), strict=True):
        assert text["text"] == session.tokenizer.decode(emitted.token for emitted in ids)
    found = differences(engines[0], prompts, faster, torch)
    assert found["mismatches"] == 0
    assert sum(a["text"] != b["text"] for a, b in zip(with_, without, strict=True)) == found["ties"]


def test_scores_are_the_same_without_onnxruntime(call: Any, staged: Path, bare: pytest.MonkeyPatch) -> None:
    words = ("score", staged, "--context", "stage", "--continuation", " loss", "--json")
    without = call(*words).json
    bare.undo()
    assert call(*words).json == without
    assert (without["runtime"], without["weights"]) == ("torch", "float32")


def test_a_person_is_told_once_beside_the_result(call: Any, staged: Path, bare: pytest.MonkeyPatch) -> None:
    told = "topograd: runtime torch, weights float32\n"
    words = ("generate", staged, "--prompt", "stage", "--tokens", 3)
    assert call(*words).err == told
    assert call("score", staged, "--context", "stage", "--continuation", " loss").err == told
    for quiet in ((*words, "--json"), (*words, "--depth", "deep")):
        assert "runtime torch" not in call(*quiet).err, "JSON says it, and an error is one line"
    if ONNX:
        bare.undo()
        assert call(*words).err == told.replace("torch", preferred())
        assert call(*words, "--runtime", "torch").err == told
        assert call(*words, "--weights", "int8").err == f"topograd: runtime {preferred()}, weights int8\n"


def test_the_doctor_says_which_one_is_the_default(call: Any, bare: pytest.MonkeyPatch) -> None:
    missing = call("doctor", "--json")
    assert missing.code == 2, "ONNX Runtime is part of the package"
    assert "onnxruntime" in missing.err
    found = json.loads(missing.out)
    assert (found["runtime"], found["native"]) == (
        "torch",
        {"instructions": None, "missing": "no compiler"},
    )
    bare.undo()
    assert call("doctor", "--json").json["runtime"] == preferred()
    assert "unless --runtime or the model says otherwise" in " ".join(call("doctor").out.split())


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
def test_native_in_every_precision(call: Any, staged: Path, weights: str) -> None:
    if reason := library.missing_reason():
        pytest.skip(reason)
    flags = ("--runtime", "native", "--weights", weights, "--json")
    written = call("generate", staged, "--prompt", "stage", "--tokens", 5, *flags).json
    scored = call("score", staged, "--context", "stage", "--continuation", " loss", *flags).json
    for answer in (written, scored):
        assert (answer["runtime"], answer["weights"]) == ("native", weights)


def test_kernels_that_are_missing_are_told_in_one_line(call: Any, bare: pytest.MonkeyPatch) -> None:
    said = call("generate", "--runtime", "native", "--prompt", "a").refusal
    assert "no compiler" in said
