"""Two runtimes over one memory: whichever runs a row next, it goes on from what the other has run."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from topograd.depth.cache import Cache
from topograd.depth.engine import Engine
from topograd.depth.rows import Rows, copy_prefix
from topograd.nn.stack import Stack
from topograd.runtime.mixed import MixedRuntime, MixedStage

ROWS = 4


def _act(engine: Engine, rows: list[Cache], dice: random.Random) -> torch.Tensor:
    """Something happens to some rows; what they predict after it."""
    what, (one, other) = dice.random(), dice.sample(range(ROWS), 2)
    if what < 0.2:
        rows[one].truncate([dice.randint(1, len(rows[one].tokens[0]))])
    elif what < 0.35:
        length = dice.randint(1, len(rows[other].tokens[0]))
        Rows([rows[one]]).truncate([0])
        copy_prefix(rows[other], rows[one], length)
    some = Rows([rows[i] for i in sorted(dice.sample(range(ROWS), dice.randint(1, ROWS)))])
    some.truncate([min(n, 12) for n in some.lengths()])
    some.push([[dice.randrange(20) for _ in range(dice.randint(1, 3))] for _ in range(some.rows)])
    stage = dice.choice(engine.exits)
    engine.run(some, stage)
    return engine.logits(some, stage)


@pytest.mark.parametrize("name", ["gpt", "gpt-windows", "llama", "qwen3", "gpt2", "gemma3"])
def test_any_schedule_is_torchs(stack_of: Callable[[str], Stack], name: str) -> None:
    stack = stack_of(name)
    mixed = MixedRuntime(stack)
    engines = [Engine(stack, "2,1,1"), Engine(stack, "2,1,1", runtime=mixed)]
    forms = random.Random(7)
    with torch.inference_mode():
        both = [[engine.start([[k]]) for k in range(ROWS)] for engine in engines]
        for step in range(30):
            mixed.few = forms.choice([1, 2, ROWS])
            theirs, ours = (
                _act(engine, rows, random.Random(step))  # type: ignore[arg-type]
                for engine, rows in zip(engines, both, strict=True)
            )
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


def test_a_form_copies_what_it_lacks_and_no_more(stack_of: Callable[[str], Stack]) -> None:
    mixed = MixedRuntime(stack_of("llama"))
    mixed.few = 1
    engine = Engine(mixed.stack, "4", runtime=mixed)
    with torch.inference_mode():
        row, other = (engine.start([[k, 3, 4, 5]]) for k in range(2))
        assert isinstance(row, Cache)
        memory = row.memories[0]
        assert isinstance(memory, MixedStage)
        row.run(0)
        assert (memory._held, memory._torch_held()) == (4, 0)
        row.push([[6]])
        Rows([row, other]).run(0)
        assert (memory._held, memory._torch_held()) == (4, 5), "torch has read it all, four of them copied"
        before = memory.states["keys.0"][:, :, :4].copy()
        row.push([[7, 8]])
        row.run(0)
        assert (memory._held, memory._torch_held()) == (7, 5), "and ONNX Runtime copied the fifth"
        assert (memory.states["keys.0"][:, :, :4] == before).all()
        row.truncate([2])
        assert (memory._held, memory._torch_held()) == (2, 2)
