"""Capabilities that name submodules are found in every version of Python."""

import inspect

import pytest
from torch import nn

import topograd as tg
from topograd.nn.capabilities import draftable, operator_form


def test_submodules_count_as_members() -> None:
    stack = tg.GPT(layers=2, width=16, heads=2, vocab=32, context=8)
    with pytest.raises(AttributeError):
        inspect.getattr_static(stack, "embedding")  # what isinstance asks for since Python 3.12
    assert draftable(stack) is stack
    assert operator_form(stack) is stack


def test_a_stack_without_the_parts_has_no_capability() -> None:
    module = nn.Linear(2, 2)
    module.embedding = nn.Embedding(2, 2)
    assert draftable(module) is None
    assert operator_form(module) is None
