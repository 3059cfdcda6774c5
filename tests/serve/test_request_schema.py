"""Requests are read by the schemas that describe them, and refused in one line that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topograd.serve import anthropic, openai_responses
from topograd.serve.request_schema import CANDIDATES, CHAT, COMPLETION, TOKENIZE, RequestError, fault, read

GOOD: list[dict[str, Any]] = [
    {},
    {"prompt": "a", "max_tokens": 0, "temperature": 0, "stop": "\n", "seed": -1},
    {"prompt": ["a", ""], "n": 2, "stop": ["a", "b"], "logprobs": 5, "echo": True, "top_k": -1},
    {"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}, "depth": "prefix:1"},
    {"logit_bias": {"5": -100, "6": 1.5}, "presence_penalty": -2, "frequency_penalty": 2, "min_p": 0},
    {"repetition_penalty": 1.1, "stop_token_ids": [1, 2]},
    {"prompt": [[1], [2, 3]], "temperature": None, "logit_bias": {}, "user": "me", "metadata": {"a": "b"}},
]
BAD: list[dict[str, Any]] = [
    {"prompt": 5},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": [-1]},
    {"prompt": [True]},
    {"prompt": "\ud800"},
    {"max_tokens": 1.5},
    {"max_tokens": True},
    {"max_tokens": -1},
    {"temperature": "hot"},
    {"temperature": -0.1},
    {"temperature": float("nan")},
    {"top_p": 0},
    {"n": 0},
    {"stop": [""]},
    {"stop": ["a"] * 17},
    {"stream_options": {"more": 1}},
    {"logit_bias": {"five": 1}},
    {"logit_bias": {"-5": 1}},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"5": "1"}},
    {"logit_bias": {str(i): 1 for i in range(1025)}},
    {"logit_bias": [5, 1]},
    {"presence_penalty": 2.5},
    {"frequency_penalty": -3},
    {"repetition_penalty": 0},
    {"min_p": 1.5},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": 5},
]
UNSUPPORTED: list[tuple[Any, dict[str, Any]]] = [
    (COMPLETION, {"suffix": "x"}),
    (openai_responses.FIELDS, {"previous_response_id": "resp_1"}),
    (anthropic.FIELDS, {"thinking": {"type": "enabled"}}),
]


@pytest.mark.parametrize("body", GOOD)
def test_what_fits_is_taken(body: dict[str, Any]) -> None:
    found = read(COMPLETION, body)
    assert set(found) == set(COMPLETION)
    assert found["temperature"] == (body.get("temperature") if body.get("temperature") is not None else 1.0)


def problem(fields: Any, body: object) -> RequestError:
    """The error that a body gets, in one line."""
    with pytest.raises(RequestError) as caught:
        read(fields, body)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("body", BAD)
def test_a_value_that_does_not_fit_is_named(body: dict[str, Any]) -> None:
    error = problem(COMPLETION, body)
    assert ([error.param], error.code) == ([*body], "invalid_value")
    assert error.message.startswith(f"{error.param} ")


@pytest.mark.parametrize(("fields", "body"), UNSUPPORTED)
def test_what_only_openai_has_is_not_supported_here(fields: Any, body: dict[str, Any]) -> None:
    enough = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "input": "a"}
    error = problem(fields, {name: enough[name] for name in enough if name in fields} | body)
    assert ([error.param], error.code) == ([*body], "unsupported_parameter")
    assert error.message.startswith(f"not supported here: {error.param}; ")


def test_an_unknown_field_is_named() -> None:
    error = problem(COMPLETION, {"temprature": 1})
    assert (error.param, error.code) == ("temprature", "unknown_parameter")
    assert "temperature" in error.message


@pytest.mark.parametrize("body", [None, [], "a", 5, True])
def test_only_objects(body: object) -> None:
    error = problem(COMPLETION, body)
    assert (error.param, error.status) == (None, 400)


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
        assert problem(CHAT, {"messages": bad}).param == "messages"
    assert problem(CHAT, {}).code == "missing_required_parameter"


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
