"""Agreement, margins and bits per byte of two models' logits, by the formula; llama.cpp on a file of ours."""

import argparse
import math

import pytest
import torch

from llama_library import library
from quantized_prompts import Text, measure, read, summary
from topograd.runs.session import LoadedTextRun

TEXT = Text(tokens=[2, 0, 1], given=1, bytes_=0)


def test_agreement_margins_and_their_change() -> None:
    plain = torch.tensor([[3.0, 1.0, 0.0], [1.0, 1.1, 0.0], [0.0, 0.0, 0.0]])
    other = torch.tensor([[3.5, 1.0, 0.0], [1.2, 1.1, 0.0], [9.0, 0.0, 0.0]])
    ours, pair = read(plain, TEXT, None)
    theirs, same_pair = read(other, TEXT, pair)
    assert pair.tolist() == same_pair.tolist() == [[0, 1], [1, 0]]
    text = Text(TEXT.tokens, TEXT.given, 1)
    result = summary([text, text], [ours, ours], [theirs, ours])
    assert (result["places"], result["agreement"], result["first_token_agreement"]) == (4, 0.75, 1.0)
    assert result["lost_margin_max"] == pytest.approx(0.1)
    assert result["change_p99"] == pytest.approx(0.5, abs=0.02)
    assert summary([text], [ours], [ours])["lost_margin_max"] == 0.0


def test_bits_per_byte_are_those_of_the_prompt() -> None:
    text = Text(tokens=[2, 0, 1, 1], given=3, bytes_=4)
    reading, _ = read(torch.zeros(4, 3), text, None)
    assert summary([text], [reading], [reading])["bpb"] == pytest.approx(2 * math.log2(3) / 4)


@pytest.mark.skipif(library() is None, reason="the wheel xllamacpp is not installed")
def test_llama_cpp_on_a_float32_file_says_what_we_say(imported: LoadedTextRun) -> None:
    """Its cache of keys and values is in float16."""
    args = argparse.Namespace(model=imported.run.folder, weights=[], gguf=["Q8_0"], prompts=3, tokens=4)
    found = measure(args)
    assert list(found) == ["llama.cpp F32", "llama.cpp Q8_0", "Q8_0 rounded"]
    control = found["llama.cpp F32"]
    assert control["change_p99"] < 0.01
    assert control["bpb"] == pytest.approx(control["bpb_float32"], abs=1e-3)
    assert control["lost_margin_max"] < 0.01
