"""Tokenizers of other models, against transformers' own on hostile Unicode."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from hf_files import (
    CONFIG,
    CORPUS,
    KINDS,
    SPECIALS,
    byte_level,
    fallback,
    normalised_byte_level,
)
from raising import refused
from topograd.data.hf_tokenizer import MAX_TOKENS, HFTokenizer
from topograd.data.shards import Shards, write_shards
from topograd.data.tokenizer_file import load_tokenizer
from topograd.decode.text import TextStream
from topograd.errors import DataError

FRAGMENTS = [
    "<s>", "</s>", "<|im_start|>", "<|im_", "<tool>", "▁", "▁▁", " ", "   ", "\n\n", "\r\n", "\t", "\0",
    "e\u0301", "\u200d", "\u202e", "\ufeff", "\ufffd", "<0x41>", "<0xE2>", "Ġ", "🙂", "１２", "'RE", "'s",
    "The capital", " of France", "1234",
]  # fmt: skip
HOSTILE = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(FRAGMENTS),
    ),
    max_size=8,
).map("".join)


@cache
def _pair(kind: str) -> tuple[HFTokenizer, PreTrainedTokenizerFast]:
    text = KINDS[kind]().to_str()
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(text), bos_token="<s>", eos_token="</s>"
    )
    return HFTokenizer(text, CONFIG), theirs


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=HOSTILE)
def test_encodes_and_decodes_as_transformers(kind: str, text: str) -> None:
    ours, theirs = _pair(kind)
    ids = ours.encode(text, "prompt")
    assert ids == theirs.encode(text)
    assert ours.encode(text, "chat") == theirs.encode(text, add_special_tokens=False)
    document = ours.encode(text)
    assert document == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    theirs.backend_tokenizer.encode_special_tokens = False
    assert ours.encode_batch([text, ""])[0].tolist() == document
    for tokens in (ids, document):
        plain = theirs.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(tokens) == plain


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


@cache
def _qwen2() -> tuple[HFTokenizer, Any]:
    tokenizer = normalised_byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    content = json.loads(tokenizer.to_str())["model"]
    merges: Any = [tuple(pair) for pair in content["merges"]]  # its annotation lacks pairs
    return HFTokenizer(tokenizer.to_str(), CONFIG), Qwen2Tokenizer(content["vocab"], merges)


@settings(max_examples=150, deadline=None)
@given(text=HOSTILE)
def test_qwen2_is_split_as_its_class_in_transformers_does(text: str) -> None:
    """That class brings its own pattern and NFC, whatever tokenizer.json says; ours reads tokenizer.json.

    They agree where the file says what Qwen2's own does. A folder that calls itself qwen2 and has another
    tokenizer is read by its file here.
    """
    ours, theirs = _qwen2()
    text = text.replace("<tool>", " ")  # a token that was added to the file, and not to the class
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte-level", "nfc", "no prefix"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_stream_of_any_tokens_gives_what_decode_gives(kind: str, data: st.DataObject) -> None:
    ours, theirs = _pair(kind)
    tokens = data.draw(st.lists(st.integers(0, ours.vocab - 1), max_size=20))
    stream = TextStream(ours)
    text = "".join(stream.feed(token) for token in tokens) + stream.finish()
    assert text == ours.decode(tokens)
    if kind != "no prefix":  # there, transformers replaces every byte of a run that is not UTF-8
        assert text == theirs.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["prepend", "metaspace", "metaspace decoder"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_stream_keeps_the_space_that_decode_drops_before_a_text(kind: str, data: st.DataObject) -> None:
    ours, _ = _pair(kind)
    tokens = data.draw(st.lists(st.integers(0, ours.vocab - 1), max_size=20))
    before = ours.encode("The capital")
    stream = TextStream(ours)
    text = "".join(stream.feed(token) for token in tokens) + stream.finish()
    assert ours.decode([*before, *tokens]) == "The capital" + text


@settings(max_examples=100, deadline=None)
@given(text=HOSTILE)
def test_byte_lengths_are_those_of_the_text(text: str) -> None:
    ours, _ = _pair("byte-level")
    ids = ours.encode(text)
    assert ours.byte_lengths[ids].sum() == len(text.encode())
    assert ours.decode(ids) == text
    assert not set(ids) & {ours.separator, *ours.stop_tokens}, "a document cannot spell a special token"


def test_what_the_rest_of_the_program_reads(tmp_path: Path) -> None:
    text = json.dumps(json.loads(byte_level().to_str()), indent=3).replace("\n", "\r\n")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(text.encode())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    ours = load_tokenizer(path)
    assert isinstance(ours, HFTokenizer)
    ids = {name: i for i, name in enumerate(SPECIALS, ours.vocab - 5)}
    assert ours.kind == "bpe"
    assert ours.special_ids["bos"] == ids["<s>"]
    assert ours.special_ids["eos"] == ids["</s>"]
    assert ours.special_ids.get("pad") is None
    assert ours.stop_tokens == {ids["</s>"], ids["<|im_end|>"]}
    assert ours.separator == ids["</s>"]
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert len(ours.pieces) == len(ours.byte_lengths) == ours.vocab
    assert ours.pieces[ids["<s>"]] == b""
    assert ours.pieces[-1] == b"<tool>"
    other = tmp_path / "copy"
    other.mkdir()
    ours.save(other / "tokenizer.json")
    assert (other / "tokenizer.json").read_bytes() == text.encode()
    again = load_tokenizer(other / "tokenizer.json")
    assert isinstance(again, HFTokenizer)
    assert (again.digest, again.config, again.files()) == (ours.digest, ours.config, ours.files())
    assert again.digest != HFTokenizer(text).digest


def test_the_separator_is_what_the_tokenizer_puts_before_a_text() -> None:
    llama, _ = _pair("prepend")
    assert llama.separator == llama.special_ids["bos"] == llama.encode("", "prompt")[0]
    without = json.loads(byte_level().to_str())
    without["added_tokens"] = [token for token in without["added_tokens"] if not token["special"]]
    with refused(DataError, setting="tokenizer"):
        HFTokenizer(json.dumps(without))


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_the_config_decides_on_bos_and_eos(bos: bool, eos: bool) -> None:
    text = fallback("prepend").to_str()
    config = CONFIG | {"add_bos_token": bos, "add_eos_token": eos}
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(text),
        bos_token="<s>", eos_token="</s>", add_bos_token=bos, add_eos_token=eos,
    )  # fmt: skip
    ours = HFTokenizer(text, config)
    assert ours.encode("The capital", "prompt") == theirs.encode("The capital")
    assert ours.separator == ours.special_ids["bos" if bos else "eos"]


def test_the_template_may_be_one_of_several() -> None:
    text = byte_level().to_str()
    several = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "c"}]
    for config, template in (
        ({"chat_template": "a"}, "a"),
        ({"chat_template": several}, "c"),
        ({"chat_template": several[:1]}, None),
        ({"chat_template": 3}, None),
        ({}, None),
    ):
        assert HFTokenizer(text, config).chat_template == template


def test_cutting_and_padding_in_the_file_are_ignored() -> None:
    tokenizer = byte_level()
    whole = tokenizer.encode(CORPUS[0]).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=500)
    assert HFTokenizer(tokenizer.to_str()).encode(CORPUS[0]) == whole


def _refusals() -> dict[str, Callable[[dict[str, Any]], Any]]:
    def decoder(kind: str) -> Callable[[dict[str, Any]], Any]:
        return lambda content: content | {"decoder": {"type": kind, "prefix": "##", "cleanup": True}}

    def far(content: dict[str, Any]) -> Any:
        content["model"]["vocab"]["far"] = MAX_TOKENS
        return content

    return {
        "words": decoder("WordPiece"),
        "no decoder": lambda content: content | {"decoder": None},
        "model": lambda content: content | {"model": {"type": "New"}},
        "merges": lambda c: c | {"model": c["model"] | {"merges": [["a", "zzz"]]}},
        "ids": far,
    }


@pytest.mark.parametrize("case", _refusals())
def test_what_cannot_be_used_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    change = _refusals()[case]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(change(json.loads(byte_level().to_str()))))
    with refused(DataError, setting="tokenizer"):
        load_tokenizer(path)


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    result = []
    for key, value in items:
        result.append((content, key))
        if isinstance(value, dict | list) and len(value) < 50:
            result += _places(value)
    return result


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_files_are_refused_or_work(data: st.DataObject) -> None:
    content = json.loads(_pair(data.draw(st.sampled_from(sorted(KINDS))))[0].files()["tokenizer.json"])
    junk: st.SearchStrategy[Any] = st.sampled_from(
        [None, "", "▁", -1, 2**40, 1e300, [], {}, True, "ByteLevel", "Sequence", "Strip"]
    )
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(_places(content)))
        if data.draw(st.booleans()):
            container[key] = data.draw(junk)
        else:
            del container[key]
    try:
        ours = HFTokenizer(json.dumps(content), CONFIG)
        ours.decode([*ours.encode("The é 日 <s>"), *ours.encode("The é 日 <s>", "prompt")])
    except DataError as error:
        lines = str(error).splitlines()
    else:
        lines = ["it works"]
    assert len(lines) == 1


def test_shards_hold_vocabularies_of_more_than_65536_ids(tmp_path: Path) -> None:
    documents = [np.array([0, 151_935, 65_536]), np.array([70_000], dtype=np.uint32)]
    write_shards(tmp_path / "shards", documents, 151_936, separator=151_643)
    shards = Shards.open(tmp_path / "shards")
    assert [document.tolist() for document in shards] == [[0, 151_935, 65_536], [70_000]]
