"""Which runtime is chosen, and what is refused with one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("onnxruntime")

from raising import refused
from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.nn.stack import Stack
from topograd.runtime import choice
from topograd.runtime.choice import runtime_of


def test_onnx_where_it_can_and_torch_elsewhere(stack_of: Callable[[str], Stack]) -> None:
    found = runtime_of(stack_of("gpt"))
    assert found is not None
    assert (found.name, found.precision) == ("onnx", "float32")
    assert runtime_of(stack_of("gpt"), "torch") is None
    assert runtime_of(GPT(layers=1, width=16, heads=2, vocab=9, context=8).double()) is None
    assert runtime_of(GPT(layers=1, width=16, heads=2, vocab=9, context=8, architecture="mamba3")) is None
    int8 = runtime_of(stack_of("gpt"), weights="int8")
    assert int8 is not None
    assert int8.precision == "int8"


def test_without_onnxruntime(stack_of: Callable[[str], Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "installed", lambda: False)
    assert runtime_of(stack_of("gpt")) is None
    each: tuple[dict[str, Any], ...] = ({"name": "onnx"}, {"weights": "int8"})
    for asked in each:
        with refused(ConfigError, setting="runtime"):
            runtime_of(stack_of("gpt"), **asked)


@pytest.mark.parametrize(
    ("settings", "name", "given"),
    [
        ({"name": "jax"}, "runtime", "jax"),
        ({"name": "torch:cuda"}, "runtime", "torch:cuda"),
        ({"name": "onnx:tpu"}, "provider", "tpu"),
        ({"name": "torch", "weights": "int4"}, "weights", "int4"),
        ({"weights": "int2"}, "weights", "int2"),
    ],
)
def test_what_is_refused(
    stack_of: Callable[[str], Stack], settings: dict[str, Any], name: str, given: str
) -> None:
    with refused(ConfigError, setting=name, given=given):
        runtime_of(stack_of("gpt"), **settings)
