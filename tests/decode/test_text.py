"""The text of a stream of tokens: cut at the first stop string, and never taken back."""

import codecs
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raising import refused
from topograd.data.bpe import BPETokenizer
from topograd.decode.text import TextStream
from topograd.errors import ConfigError

few = settings(deadline=None, max_examples=150)

# few characters, so that stop strings are often begun and sometimes come: one, two, three and four bytes
TEXT = st.text("abé€𝄞", max_size=24)
STOPS = st.lists(st.text("abé€𝄞", min_size=1, max_size=4), max_size=3)
BYTES = st.lists(st.sampled_from([b"a", b"b", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xff"]), max_size=20)


def cut(text: str, stops: list[str]) -> str:
    """The text before the first stop string."""
    return text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]


def holds(text: str, stops: list[str]) -> bool:
    return any(stop in text for stop in stops)


def shown(stream: TextStream, tokens: list[int]) -> tuple[list[str], str]:
    """What `feed` gives until the stream stops, and what `finish` adds."""
    pieces = []
    for token in tokens:
        pieces.append(stream.feed(token))
        if stream.stopped:
            break
    return pieces, stream.finish()


def split(data: bytes, ends: list[int]) -> tuple[BPETokenizer, list[int]]:
    """A tokenizer with a token for each part of `data`, cut at `ends`, and those tokens."""
    ends = sorted({0, len(data), *(end for end in ends if end < len(data))})
    parts = [data[start:end] for start, end in pairwise(ends)]
    ids = {bytes([value]): value for value in range(256)}
    merges = []
    for part in parts:
        for end in range(2, len(part) + 1):
            if part[:end] not in ids:
                merges.append((ids[part[: end - 1]], part[end - 1]))
                ids[part[:end]] = len(ids)
    return BPETokenizer(tuple(merges)), [ids[part] for part in parts]


@few
@given(TEXT, STOPS)
@example("aab", ["aabb"])  # held back to the end
@example("aaab", ["aab"])  # a beginning within a beginning
@example("abab", ["c", "abab", "b"])
def test_bytes_give_the_text_up_to_the_first_stop(text: str, stops: list[str]) -> None:
    stream = TextStream(BPETokenizer.bytes(), stops)
    pieces, rest = shown(stream, list(text.encode()))
    # a byte completes one character at most: the text stops with the first character that ends a stop
    written = next((text[:n] for n in range(len(text) + 1) if holds(text[:n], stops)), text)
    assert "".join(pieces) + rest == cut(written, stops) == stream.text
    assert stream.stopped == holds(text, stops)


@few
@given(TEXT, STOPS, st.lists(st.integers(0, 60), max_size=12))
def test_without_nested_stops_only_the_text_counts_and_not_its_tokens(
    text: str, stops: list[str], ends: list[int]
) -> None:
    stops = [stop for stop in stops if not any(other in stop for other in stops if other != stop)]
    tokenizer, tokens = split(text.encode(), ends)
    assert tokenizer.decode(tokens) == text
    stream = TextStream(tokenizer, stops)
    pieces, rest = shown(stream, tokens)
    assert "".join(pieces) + rest == cut(text, stops) == stream.text
    assert stream.stopped == holds(text, stops)


def obvious(data: bytes, stops: list[str]) -> str:
    """What may be shown of these bytes, when more can follow."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    if holds(text, stops) or not stops:
        return cut(text, stops)
    return next(text[:n] for n in range(len(text) + 1) if any(stop.startswith(text[n:]) for stop in stops))


@few
@given(BYTES, st.lists(st.text("abé€\ufffd", min_size=1, max_size=3), max_size=3), st.data())
def test_any_bytes_any_tokens_and_any_stops_against_the_obvious_version(
    units: list[bytes], stops: list[str], data: st.DataObject
) -> None:
    ends = data.draw(st.lists(st.integers(0, sum(map(len, units))), max_size=12))
    tokenizer, tokens = split(b"".join(units), ends)
    stream = TextStream(tokenizer, stops)
    for n, token in enumerate(tokens, start=1):
        before = stream.text
        assert before + stream.feed(token) == stream.text
        assert stream.text == obvious(b"".join(tokenizer.pieces[t] for t in tokens[:n]), stops)
        if stream.stopped:
            break
    before, stopped = stream.text, stream.stopped
    assert before + stream.finish() == stream.text
    assert stream.text == (before if stopped else cut(tokenizer.decode(tokens), stops))
    assert not holds(stream.text, stops)
    assert stream.finish() == ""


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    stream = TextStream(BPETokenizer.bytes(), ["\n\nQ:", "END"])
    assert [stream.feed(token) for token in b"A\nB\n\nC E"] == ["A", "", "\nB", "", "", "\n\nC", " ", ""]
    assert [stream.feed(token) for token in b"EN\n\n\n"] == ["E", "", "EN", "", "\n"]
    assert not stream.stopped
    assert stream.finish() == "\n\n"
    assert stream.text == "A\nB\n\nC EEN\n\n\n"


def test_a_stop_may_straddle_tokens_and_nothing_follows_it() -> None:
    tokenizer, tokens = split(b"one ENDtwo", [5, 6])
    assert [tokenizer.pieces[token] for token in tokens] == [b"one E", b"N", b"Dtwo"]
    stream = TextStream(tokenizer, ["END"])
    assert [stream.feed(token) for token in tokens] == ["one ", "", ""]
    assert stream.stopped
    assert [stream.feed(ord("x")), stream.finish()] == ["", ""]
    assert stream.text == "one "


@pytest.mark.parametrize("stops", [["c", "abcd"], ["abcd", "c"]], ids=["inner-first", "outer-first"])
def test_of_two_stops_the_one_that_starts_earlier_cuts(stops: list[str]) -> None:
    tokenizer, tokens = split(b"xabcd", [])
    assert TextStream(tokenizer, stops).feed(tokens[0]) == "x"
    tokenizer, tokens = split(b"xabcd", [4])
    assert TextStream(tokenizer, stops).feed(tokens[0]) == "xab"


def test_a_character_waits_for_its_last_byte() -> None:
    stream = TextStream(BPETokenizer.bytes())
    assert [stream.feed(token) for token in "é€𝄞".encode()] == ["", "é", "", "", "€", "", "", "", "𝄞"]
    assert stream.finish() == ""


def test_a_character_that_never_ends_is_replaced() -> None:
    stream = TextStream(BPETokenizer.bytes())
    assert [stream.feed(token) for token in b"a\xe2\x82"] == ["a", "", ""]
    assert stream.finish() == "\ufffd"
    stream = TextStream(BPETokenizer.bytes(), ["\ufffd"])
    assert [stream.feed(token) for token in b"a\xe2"] == ["a", ""]
    assert stream.finish() == ""
    assert stream.stopped


def test_the_separator_is_no_text() -> None:
    tokenizer = BPETokenizer.bytes()
    stream = TextStream(tokenizer, ["ab"])
    assert [stream.feed(token) for token in (ord("a"), tokenizer.separator, ord("b"))] == ["", "", ""]
    assert stream.stopped


@pytest.mark.parametrize(
    ("stops", "given"),
    [(["x", ""], ""), (["x"] * 17, ["x"] * 17), (["x" * 201], "x" * 201), (["x", 5], 5)],
    ids=["empty", "many", "long", "number"],
)
def test_stops_that_are_refused(stops: list[str], given: object) -> None:
    with refused(ConfigError, setting="stop", given=given):
        TextStream(BPETokenizer.bytes(), stops)


def test_the_most_that_may_be_asked() -> None:
    longest = "a" * 199 + "b"
    stream = TextStream(BPETokenizer.bytes(), [longest] * 16)
    pieces, rest = shown(stream, list(b"a" * 250 + b"bc"))
    assert "".join(pieces) == "a" * 51
    assert rest == ""
    assert stream.stopped
