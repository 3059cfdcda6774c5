"""A small model beside a large one: its cache follows the text, and what was kept is not computed again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding import written
from topograd.decode.draft_model import ModelDrafter
from topograd.decode.drafters import CompositeDrafter, DraftRule
from topograd.decode.engine import Engine
from topograd.decode.sequence import common_prefix
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.nn.gpt import GPT

texts = st.lists(st.integers(0, 2), max_size=8)


@given(texts, texts)
def test_the_common_beginning(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_the_model_itself_is_always_right(mild: GPT, mild_engine: Engine) -> None:
    """Every draft is kept, and each position of the small model runs once."""
    small = Engine(mild, "4", 24)
    mode = Speculate(mild_engine, ModelDrafter(mild_engine, small, rule=DraftRule(0.0, 3)))
    ran: list[int] = []
    layer = small.stack.layers[0]
    hook = layer.register_forward_pre_hook(lambda module, given: ran.append(given[0].shape[1]))
    (found,), tally = written(mode, [[1, 2, 3, 4]], 16)
    hook.remove()
    assert [e.token for e in found] == [
        e.token for e in generate_batch(FixedDepth(mild_engine), [[1, 2, 3, 4]], 16)[0]
    ]
    assert tally.acceptance == 1
    assert sum(ran) <= len(found) + 4 + tally.rounds


@torch.inference_mode()
def test_rows_beyond_its_context_are_not_drafted(mild_engine: Engine, make_gpt: Callable[..., GPT]) -> None:
    small = Engine(make_gpt(context=6, layers=1), "1", 6)
    drafter = ModelDrafter(mild_engine, small, rule=DraftRule(0.0, 3))
    batch = mild_engine.start([list(range(8)), [1, 2, 3]])
    drafts = CompositeDrafter(mild_engine, [drafter]).draft(batch)
    assert drafts[0].tokens == []
    assert len(drafts[1].tokens) == 3
    for sequence in batch:
        sequence.cache.free(sequence)
    assert not drafter._cache._table.slots, "the small model's places are given back"
