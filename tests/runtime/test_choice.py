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
from topograd.runtime.native import library


@pytest.fixture(params=["native", "onnx"])
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The default on this machine, and on one without kernels."""
    name: str = request.param
    if name == "onnx":
        monkeypatch.setattr(library, "missing_reason", lambda: "no compiler")
    elif reason := library.missing_reason():
        pytest.skip(reason)
    return name


def test_the_faster_where_it_can_and_torch_elsewhere(stack_of: Callable[[str], Stack], faster: str) -> None:
    found = runtime_of(stack_of("gpt"))
    assert found is not None
    assert (found.name, found.precision) == (faster, "float32")
    assert choice.preferred() == faster
    assert runtime_of(stack_of("gpt"), "torch") is None
    assert runtime_of(GPT(layers=1, width=16, heads=2, vocab=9, context=8).double()) is None
    mamba = runtime_of(GPT(layers=1, width=16, heads=2, vocab=9, context=8, architecture="mamba3"))
    assert getattr(mamba, "name", "torch") == ("native" if faster == "native" else "torch")
    int8 = runtime_of(stack_of("gpt"), weights="int8")
    assert int8 is not None
    assert (int8.name, int8.precision) == (faster, "int8")


def test_a_runtime_by_name(stack_of: Callable[[str], Stack]) -> None:
    for name in ("native", "onnx"):
        if name == "onnx" or library.missing_reason() is None:
            found = runtime_of(stack_of("llama"), name, "int4")
            assert found is not None
            assert (found.name, found.precision) == (name, "int4")


def test_without_kernels_they_are_refused_by_name(
    stack_of: Callable[[str], Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "missing_reason", lambda: "no compiler")
    each: tuple[dict[str, Any], ...] = ({"name": "native"}, {"weights": "bfloat16"})
    for asked in each:
        with refused(ConfigError, setting="runtime") as caught:
            runtime_of(stack_of("gpt"), **asked)
        assert "no compiler" in str(caught.value)


def test_without_onnxruntime(stack_of: Callable[[str], Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "installed", lambda: False)
    monkeypatch.setattr(library, "missing_reason", lambda: "no compiler")
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
        ({"name": "onnx", "weights": "bfloat16"}, "weights", "bfloat16"),
        ({"name": "native:cuda"}, "runtime", "native:cuda"),
        ({"weights": "int2"}, "weights", "int2"),
    ],
)
def test_what_is_refused(
    stack_of: Callable[[str], Stack], settings: dict[str, Any], name: str, given: str
) -> None:
    with refused(ConfigError, setting=name, given=given):
        runtime_of(stack_of("gpt"), **settings)
