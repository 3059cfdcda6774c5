"""/v1/responses by OpenAI's own client: texts, schemas, tools, streams, and what is not supported."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from topograd.serve.server import Running


class Answer(pydantic.BaseModel):
    """What is asked for."""

    word: Literal["yes", "no"]


ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def theirs(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.address() + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_texts_whole_and_in_parts(
    theirs: openai.OpenAI, running: Running, ask: Callable[..., dict[str, Any]]
) -> None:
    asked: Any = {
        "model": running.served.name,
        "input": "def read(",
        "temperature": 0,
        "max_output_tokens": 12,
    }
    made = theirs.responses.create(**asked)
    assert made.output_text == ask(max_tokens=12)["choices"][0]["text"]
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage is not None
    assert made.usage.output_tokens == 12
    with theirs.responses.stream(**asked) as stream:
        events: list[Any] = list(stream)
    assert events[-1].response.output_text == made.output_text
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.incomplete"
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    items = [{"role": "user", "content": [{"type": "input_text", "text": "def read("}]}]
    assert theirs.responses.create(**(asked | {"input": items})).output_text == made.output_text


def test_schemas(theirs: openai.OpenAI, running: Running) -> None:
    made = theirs.responses.parse(model=running.served.name, input="x = ", text_format=Answer, temperature=0)
    assert isinstance(made.output_parsed, Answer)
    assert made.status == "completed"


def test_calls_and_their_results(theirs: openai.OpenAI, running: Running) -> None:
    asked: Any = {"model": running.served.name, "tools": [ADD], "temperature": 0, "max_output_tokens": 90}
    asked |= {"tool_choice": {"type": "function", "name": "add"}}
    made = theirs.responses.create(**asked, input="x = ")
    (call,) = made.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"a", "b"}
    with theirs.responses.stream(**asked, input="x = ") as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert streamed.arguments == call.arguments
    assert kinds.count("response.function_call_arguments.delta") > 1
    assert kinds.count("response.function_call_arguments.done") == 1
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    items: Any = [{"role": "user", "content": "x = "}, call.model_dump(exclude_none=True), result]
    again = theirs.responses.create(
        **(asked | {"tool_choice": "none"}), input=items, instructions="Be brief."
    )
    assert again.usage is not None
    assert made.usage is not None
    assert again.output[0].type == "message"


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "function_call", "name": "add"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "user", "content": 5}]},
        {"tools": [{"type": "web_search"}]},
        {"truncation": "auto"},
        {"temperature": -1},
    ],
)
def test_what_is_not_supported(theirs: openai.OpenAI, running: Running, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as problem:
        theirs.responses.create(**({"model": running.served.name, "input": "a"} | fields))
    assert problem.value.param in fields
