"""Bytes that a token reads, the machine's own bandwidth, and what rows cost."""

from __future__ import annotations

import pytest

from topograd.decode.engine import Engine
from topograd.decode.streaming import matrix_bytes, read_bandwidth, relative_rows, row_costs
from topograd.nn.gpt import GPT


def test_bytes_of_a_token() -> None:
    gpt = GPT(layers=2, width=16, heads=2, vocab=10, context=8, kv_heads=1, mlp_ratio=2.0)
    layer = 16 * 16 * 2 + 2 * 16 * 8 + 2 * 16 * 32  # queries and output, keys and values, the MLP
    assert matrix_bytes(Engine(gpt, "1,1"), gpt) == 4 * (2 * layer + 10 * 16)


def test_rows_and_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = iter((0.0, 9.0, 10.0, 19.0, 20.0, 20.5, 30.0, 30.25, 40.0, 41.0))  # two to warm up, then three
    monkeypatch.setattr("topograd.decode.streaming.READ_BYTES", 2**16)
    with monkeypatch.context() as patch:
        patch.setattr("topograd.timing.time.perf_counter", lambda: next(shown))
        assert read_bandwidth(3) == 2**16 / 0.25, "the best round"
    gpt = GPT(layers=2, width=16, heads=2, vocab=10, context=8)
    costs = row_costs(Engine(gpt, "1,1"), rounds=2)
    assert {*costs} == {1, 2, 4}, "8 do not fit into the context"
    assert relative_rows({1: [2.0, 1.0, 3.0], 4: [3.0, 4.0, 5.0]}) == {"1": 1.0, "4": 2.0}
