"""Interfaces that are pooled and read by attention: by loops, and step by step while decoding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from raising import refused
from topograd.errors import ConfigError
from topograd.nn.attention_interface import AttentionInterface, AttentionRelay
from topograd.nn.interface_config import parse_interface
from topograd.nn.stack import LayerContext

WIDTH, CONTEXT, SEGMENT = 8, 12, 3
SETTINGS = AttentionInterface(segments=4, rank=5)


def relay() -> AttentionRelay:
    torch.manual_seed(0)
    made = SETTINGS.build(WIDTH, CONTEXT, None).double()
    assert isinstance(made, AttentionRelay)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter))
    return made


def context(x0: Tensor, start: int = 0) -> LayerContext:
    places = torch.arange(start, start + x0.shape[1])
    return LayerContext(x0, torch.zeros(x0.shape[:2], dtype=torch.long), places)


def states() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    double = torch.float64
    return (
        torch.randn(2, CONTEXT, WIDTH, dtype=double),
        torch.randn(2, 3, 5, dtype=double),
        torch.randn(2, CONTEXT, WIDTH, dtype=double),
    )


def test_it_is_what_the_formulas_say_position_by_position() -> None:
    made, (h, m, x0) = relay(), states()
    pooled = made.pool(h)
    read = made.receive(m, context(x0))
    for row in range(2):
        for s in range(3):
            part = h[row, s * SEGMENT : (s + 1) * SEGMENT]
            weights = torch.softmax(part @ made.focus / math.sqrt(WIDTH), 0)
            torch.testing.assert_close(pooled[row, s], weights @ part)
        for t in range(CONTEXT):
            before = m[row, : t // SEGMENT]
            expected = x0[row, t]
            if len(before):
                scores = made.key(before) @ made.query(x0[row, t]) / math.sqrt(5)
                expected = expected + torch.softmax(scores, 0) @ made.decode(before)
            torch.testing.assert_close(read[row, t], expected)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_decoding_gives_the_same_numbers(chunk: int) -> None:
    made, (h, m, x0) = relay(), states()
    whole_sent = made.send(h, m)
    history = torch.randn(2, CONTEXT, 5, dtype=torch.float64)
    ends = history[:, SEGMENT - 1 :: SEGMENT][:, :3]
    whole_read = made.receive(ends, context(x0))
    sent, read = [], []
    for start in range(0, CONTEXT, chunk):
        stop = min(start + chunk, CONTEXT)
        ctx = context(x0[:, start:stop], start)
        received = m[:, [min(t // SEGMENT, 2) for t in range(start, stop)]]
        sent.append(made.send_next(h[:, :stop], received, ctx))
        read.append(made.receive_next(history[:, :stop], ctx))
    torch.testing.assert_close(torch.cat(read, 1), whole_read)
    torch.testing.assert_close(torch.cat(sent, 1)[:, SEGMENT - 1 :: SEGMENT][:, :3], whole_sent)


def test_it_begins_as_the_mean_that_nobody_hears() -> None:
    made = SETTINGS.build(WIDTH, CONTEXT, None).double()
    h, m, x0 = states()
    assert isinstance(made, AttentionRelay)
    torch.testing.assert_close(made.pool(h), h[:, :9].unflatten(1, (3, SEGMENT)).mean(2))
    assert torch.equal(made.receive(m, context(x0)), x0)


def test_its_ends_have_all_parameters_once() -> None:
    made = relay()
    sending, receiving = made.parameters_by_end()
    assert {id(p) for p in sending} | {id(p) for p in receiving} == {id(p) for p in made.parameters()}
    assert not {id(p) for p in sending} & {id(p) for p in receiving}


def test_words() -> None:
    assert parse_interface("attention:S=4,r=5") == SETTINGS
    with refused(ConfigError, setting="interface", given="S=4,pool=tail"):
        parse_interface("attention:S=4,pool=tail")
