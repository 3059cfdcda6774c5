"""Rows that run together write what each writes alone, at any depth; going back, copying, taking turns."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.oracles.decoding import greedy, next_logits
from topograd.decode.autotune import DraftRule
from topograd.decode.cache import Cache
from topograd.decode.engine import Engine, Mode, Prefix
from topograd.decode.rows import OneRow, Rows, copy_prefix, packable
from topograd.decode.speculation import Speculate
from topograd.errors import StackError
from topograd.nn.gpt import GPT
from topograd.nn.transformer.config import TransformerConfig
from topograd.nn.transformer.stack import Transformer
from topograd.topology.dag import Topology

CONTEXT, LAST = 24, 3
PROMPTS = [[1], [2, 3, 4, 5, 6], [7, 8], [9, 1, 9, 1, 9, 1, 9], [4, 4, 4]]


def rows_of(engine: Engine, prompts: list[list[int]]) -> list[OneRow]:
    found = [engine.start([prompt]) for prompt in prompts]
    return [cache for cache in found if not isinstance(cache, Rows)]


def written(mode: Mode, row: OneRow, tokens: int) -> None:
    """Let a mode write in one row."""
    mode.begin(1)
    goal = len(row.tokens[0]) + tokens
    while len(row.tokens[0]) < goal:
        mode.advance(Rows([row]), [True])


STACKS: dict[str, dict[str, Any]] = {
    "gpt": {"windows": (0, 3)},
    "hybrid": {"architecture": "hybrid", "ssm_state": 4},
    "mamba2": {"architecture": "mamba2", "ssm_state": 4},
}


@pytest.mark.parametrize("kind", STACKS)
@torch.inference_mode()
def test_rows_together_have_the_logits_of_each_alone(
    make_gpt: Callable[..., GPT], make_engine: Callable[..., Engine], kind: str
) -> None:
    """Random schedules: some rows, some stages, tokens pushed, taken back, rows emptied and begun again."""
    gpt = make_gpt(**STACKS[kind])
    engine = make_engine(gpt)
    dice = random.Random(kind)
    rows = rows_of(engine, PROMPTS)
    first = rows[0]
    assert isinstance(first, Cache)
    assert packable(first, 0) == (kind == "gpt")
    for _ in range(40):
        some = Rows(dice.sample(rows, dice.randint(1, len(rows))))
        act = dice.choice(["push", "push", "run", "run", "truncate"])
        if act == "push":
            new = [[dice.randrange(50) for _ in range(dice.randint(0, 3))] for _ in some.tokens]
            room = [CONTEXT - n for n in some.lengths()]
            some.push([row[:left] for row, left in zip(new, room, strict=True)])
        elif act == "truncate":
            some.truncate([dice.randint(1, n) for n in some.lengths()])
        else:
            stage = dice.randrange(4)
            some.run(stage)
            logits = engine.logits(some, stage)[:, -1]
            for tokens, z in zip(some.tokens, logits, strict=True):
                expected = next_logits(gpt, engine.plan, tokens, stage)
                torch.testing.assert_close(z, expected, rtol=0, atol=1e-10 * expected.abs().max().item())


SIZES: dict[str, Any] = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "head_width": 8}
SIZES |= {"mlp_width": 48, "vocab": 50, "context": CONTEXT}


@pytest.mark.parametrize(
    "more",
    [
        {"family": "llama"},
        {"family": "gpt2", "heads": 4, "kv_heads": 4},
        {"family": "gemma2", "attention_softcap": 20.0, "windows": (3, 0)},
    ],
    ids=["llama", "gpt2", "gemma2"],
)
@torch.inference_mode()
def test_a_transformer_from_outside_packs_too(more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    shape = TransformerConfig(**SIZES | more)
    stack = Transformer(shape).double().eval()
    engine = Engine(stack, "1,1,1,1", CONTEXT)
    rows = rows_of(engine, PROMPTS)
    first = rows[0]
    assert isinstance(first, Cache)
    assert packable(first, LAST)
    Rows(rows[:3]).run(1)
    everything = Rows(rows)
    everything.run(LAST)
    for tokens, z in zip(everything.tokens, engine.logits(everything, LAST)[:, -1], strict=True):
        expected = next_logits(stack, engine.plan, tokens, LAST)
        torch.testing.assert_close(z, expected, rtol=0, atol=1e-10 * expected.abs().max().item())


def test_rows_of_several_depths_take_turns_and_write_what_each_writes_alone(gpt: GPT, engine: Engine) -> None:
    """Full depth, a prefix and speculation over one set of rows; the rows of one mode run together."""
    rows = rows_of(engine, PROMPTS)
    modes: list[tuple[Mode, list[int]]] = [
        (Prefix(engine), [0, 3]),
        (Prefix(engine, 1), [1, 4]),
        (Speculate(engine, DraftRule(0.0, 3)), [2]),
    ]
    for mode, members in modes:
        mode.begin(len(members))
    for _ in range(8):
        for mode, members in modes:
            mode.advance(Rows([rows[i] for i in members]), [True] * len(members))
    for _mode, members in modes:
        for i in members:
            stage = 1 if members == [1, 4] else LAST
            expected = greedy(gpt, engine.plan, PROMPTS[i], 8, stage, CONTEXT)
            found = rows[i].tokens[0][len(PROMPTS[i]) :][:8]
            assert found == expected[: len(found)]
            assert len(found) == 8
    shallow = rows[1]
    assert isinstance(shallow, Cache)
    assert shallow.marks[LAST] == [0], "no stage ran that nobody asked for"


@torch.inference_mode()
def test_a_row_that_begins_as_another_goes_on_by_itself(gpt: GPT, engine: Engine) -> None:
    (source,) = rows_of(engine, [[1, 2, 3, 4, 5, 6]])
    written(Prefix(engine, 1), source, 4)
    (target,) = rows_of(engine, [[9]])
    assert isinstance(source, Cache)
    assert isinstance(target, Cache)
    target.truncate([0])
    assert copy_prefix(source, target, 5) == 5
    assert target.tokens[0] == [1, 2, 3, 4, 5]
    assert [marks[0] for marks in target.marks] == [5, 5, 0, 0], "as far as each stage had come"
    for row, more in ((target, [7, 7]), (source, [8])):
        row.push([more])
        for stage in (1, LAST):
            row.run(stage)
            expected = next_logits(gpt, engine.plan, row.tokens[0], stage)
            torch.testing.assert_close(
                engine.logits(row, stage)[0, -1], expected, rtol=0, atol=1e-10 * expected.abs().max().item()
            )
    with pytest.raises(StackError, match="cannot be copied"):
        copy_prefix(source, target, 3)


@torch.inference_mode()
def test_states_that_cannot_be_copied_in_part_are_left_alone(
    make_gpt: Callable[..., GPT], make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(make_gpt(architecture="mamba2", ssm_state=4), Topology.chain("2,2"))
    source, target = rows_of(engine, [[1, 2, 3], [4]])
    target.truncate([0])
    assert copy_prefix(source, target, 2) == 0
    assert target.tokens == [[]]


def test_only_caches_of_one_row(engine: Engine) -> None:
    both = engine.start([[1], [2]])
    assert isinstance(both, Cache)
    with pytest.raises(StackError, match="one row each"):
        Rows([both])
