"""Requests are read by the schemas that describe them, and refused in one line that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topograd.serve.request_schema import CANDIDATES, CHAT, COMPLETION, TOKENIZE, RequestError, fault, read

GOOD: list[dict[str, Any]] = [
    {},
    {"prompt": "a", "max_tokens": 0, "temperature": 0, "stop": "\n", "seed": -1},
    {"prompt": ["a", ""], "n": 2, "stop": ["a", "b"], "logprobs": 5, "echo": True, "top_k": -1},
    {"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}, "depth": "prefix:1"},
    {"prompt": [[1], [2, 3]], "temperature": None, "logit_bias": {}, "user": "me", "metadata": {"a": "b"}},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 5}, "prompt is none of"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": "\ud800"}, "surrogate"),
    ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be of type integer"),
    ({"max_tokens": True}, "type integer"),
    ({"max_tokens": -1}, "max_tokens is -1; it must be from 0"),
    ({"temperature": "hot"}, "temperature is 'hot'; it must be of type number"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0}, "top_p is 0; it must be above 0"),
    ({"n": 0}, "n is 0"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop has 17 items"),
    ({"logit_bias": {"5": 1}}, "logit_bias has 1 entries"),
    ({"frequency_penalty": 1}, "frequency_penalty is 1; this server knows only 0"),
    ({"suffix": "x"}, "suffix"),
    ({"stream_options": {"more": 1}}, "stream_options has 'more'"),
    ({"temprature": 1}, "'temprature' is unknown"),
]


@pytest.mark.parametrize("body", GOOD)
def test_what_fits_is_taken(body: dict[str, Any]) -> None:
    found = read(COMPLETION, body)
    assert set(found) == set(COMPLETION)
    assert found["temperature"] == (body.get("temperature") if body.get("temperature") is not None else 1.0)


@pytest.mark.parametrize(("body", "said"), BAD)
def test_what_does_not_fit_is_refused_by_name(body: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(COMPLETION, body)
    assert said in caught.value.message
    assert caught.value.param in body
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("body", [None, [], "a", 5, True])
def test_only_objects(body: object) -> None:
    with pytest.raises(RequestError, match="not a JSON object"):
        read(COMPLETION, body)


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}]
    read(CHAT, {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]})
    wrong: list[list[Any]] = [
        [],
        [{}],
        [{"role": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
    ]
    for bad in wrong:
        with pytest.raises(RequestError) as caught:
            read(CHAT, {"messages": bad})
        assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="missing"):
        read(CHAT, {})


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([COMPLETION, CHAT, TOKENIZE, CANDIDATES]), st.data())
def test_anything_is_taken_or_refused_in_a_line(fields: Any, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(fields)) | st.text(max_size=8)
    body = data.draw(st.dictionaries(names, ANY, max_size=4))
    try:
        found = read(fields, body)
    except RequestError as error:
        refused = error
    else:
        assert all(value is None or fault(fields[name].schema, value) is None for name, value in body.items())
        assert set(found) == set(fields)
        return
    assert refused.status == 400
    assert len(refused.message) < 2000
