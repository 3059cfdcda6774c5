"""What every tokenizer does, whoever made it."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_files import CONFIG, CORPUS, KINDS
from raising import refused
from topograd.data.bpe import BPETokenizer
from topograd.data.hf_tokenizer import HFTokenizer
from topograd.data.tokenizer import TextKind, Tokenizer
from topograd.data.tokenizer_file import load_tokenizer
from topograd.decode.text import TextStream
from topograd.errors import ConfigError, DataError
from topograd.pretrained import REFERENCE

TEXT_KINDS: tuple[TextKind, ...] = ("document", "prompt", "chat")
SPELLED = "a<|doc|>b</s>c<s><|im_end|>d"
"""Text that spells special tokens."""
TEXTS = st.lists(
    st.sampled_from(
        ["The capital", " of", "\n\n", "  ", "é", "日", "🙂", "12", "'s", "</s>", "<|doc|>", "x"]
    ),
    max_size=12,
).map("".join)


@cache
def made(name: str) -> Tokenizer:
    if name == "ours: bytes":
        return BPETokenizer.bytes()
    if name == "ours: bpe":
        return BPETokenizer.train(CORPUS, 300)
    if name == "with a template":
        config = {**CONFIG, "chat_template": "{{ messages[0].content }}", "stop_token_ids": [7]}
        return HFTokenizer(KINDS["byte-level"]().to_str(), config)
    return HFTokenizer(KINDS[name]().to_str(), CONFIG)


NAMES = ["ours: bytes", "ours: bpe", "with a template", *KINDS]


@pytest.fixture(params=NAMES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return made(request.param)


def test_sizes_fit_together(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab == len(tokenizer.pieces) == len(tokenizer.byte_lengths)
    assert tokenizer.byte_lengths.tolist() == [len(piece) for piece in tokenizer.pieces]
    special = {tokenizer.separator, *tokenizer.start_tokens, *tokenizer.special_ids.values()}
    assert all(0 <= i < tokenizer.vocab and tokenizer.pieces[i] == b"" for i in special)
    assert {f"{role}_token" for role in tokenizer.special_ids} == set(tokenizer.special_tokens)
    for role, i in tokenizer.special_ids.items():
        assert tokenizer.encode(tokenizer.special_tokens[f"{role}_token"], "chat") == [i]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
def test_a_document_comes_back_and_has_no_special_token(name: str, text: str) -> None:
    tokenizer = made(name)
    ids = tokenizer.encode(text)
    if tokenizer.decode(ids) != text:  # only a space before a text may be dropped, as transformers does
        assert name in ("prepend", "metaspace", "metaspace decoder")
        assert tokenizer.decode(ids) == text.removeprefix(" ")
    assert not set(ids) & {tokenizer.separator, *tokenizer.stop_tokens, *tokenizer.special_ids.values()}
    stream = TextStream(tokenizer)
    streamed = "".join(stream.feed(i) for i in ids) + stream.finish()
    assert streamed.lstrip(" ") == text.lstrip(" ")
    assert tokenizer.byte_lengths[ids].sum() == len(streamed.encode())


def test_the_kinds_of_text(tokenizer: Tokenizer) -> None:
    document, prompt, chat = (tokenizer.encode(SPELLED, kind) for kind in TEXT_KINDS)
    assert tokenizer.encode(SPELLED) == document
    assert tokenizer.decode(document) == SPELLED
    recognised = [i for i in chat if i in tokenizer.special_ids.values()]
    assert recognised == [tokenizer.special_ids[role] for role in ("eos", "bos") if tokenizer.special_ids]
    added = len(prompt) - len(chat)
    assert prompt[added:] == chat
    assert prompt[:added] in ([], tokenizer.start_tokens), "nothing is put before a prompt of ours"
    for kind in TEXT_KINDS:
        assert tokenizer.encode("", kind) in ([], tokenizer.start_tokens)


def test_a_batch_is_each_document_alone(tokenizer: Tokenizer) -> None:
    texts = [*CORPUS, "", SPELLED]
    batch = tokenizer.encode_batch(texts)
    assert [array.tolist() for array in batch] == [tokenizer.encode(text) for text in texts]
    assert {array.dtype for array in batch} == {np.dtype(np.uint32)}
    assert tokenizer.encode_batch([]) == []


def test_files_are_read_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    tokenizer.save(path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == tokenizer.files()
    again = load_tokenizer(path)
    assert type(again) is type(tokenizer)
    names = ("kind", "vocab", "pieces", "separator", "start_tokens", "stop_tokens", "special_ids", "digest")
    for name in (*names, "special_tokens", "chat_template"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert again.files() == tokenizer.files()
    for kind in TEXT_KINDS:
        assert again.encode(SPELLED, kind) == tokenizer.encode(SPELLED, kind)


def test_each_has_a_digest_of_its_own() -> None:
    others = [name for name in NAMES if name != "with a template"]  # which changes nothing about encoding
    assert len({made(name).digest for name in others}) == len(others)
    assert made("with a template").digest == made("byte-level").digest


def test_what_one_lacks_it_says_in_one_line(tokenizer: Tokenizer) -> None:
    if tokenizer.chat_template is None:
        with refused(ConfigError, setting="chat_template") as caught:
            tokenizer.get_chat_template()
        assert "\n" not in str(caught.value)
    else:
        assert tokenizer.get_chat_template() == tokenizer.chat_template
    if isinstance(tokenizer, BPETokenizer):
        with refused(ConfigError, setting="tokenizer") as caught:
            tokenizer.to_hf()
        assert "\n" not in str(caught.value)
    else:
        assert tokenizer.to_hf().digest == tokenizer.digest


def test_what_cannot_be_encoded_or_decoded_is_refused(tokenizer: Tokenizer) -> None:
    with refused(ConfigError, setting="kind", given="text"):
        tokenizer.encode("a", "text")  # type: ignore[arg-type]
    for kind in TEXT_KINDS:
        with refused(DataError, setting="text", given=1):
            tokenizer.encode("a\udc80", kind)
    for wrong in (-1, tokenizer.vocab):
        with refused(DataError, setting="ids"):
            tokenizer.decode([wrong])


def test_the_packaged_models_tokenizer_is_what_it_was() -> None:
    path = REFERENCE / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab, tokenizer.separator, tokenizer.stop_tokens) == (2048, 2047, frozenset())
    assert tokenizer.digest == "7241d5895076d2928f2d9301948ef4cd77b689b40ebe2ef4e21362baa47fbe0e"
    ids = [455, 878, 40, 273, 305, 272, 334, 288, 46, 120, 32, 316, 294, 97, 195, 175, 388, 10]
    assert tokenizer.encode("def read(self):\n    return self.x  # naïve\n") == ids
    assert tokenizer.files() == {"tokenizer.json": path.read_text()}
