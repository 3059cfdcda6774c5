"""Hidden states that are kept are those that were computed; nothing damaged or foreign is taken for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from raising import refused
from topograd.data.shards import shards_in_memory
from topograd.errors import ConfigError, DataError, RunError
from topograd.exec.train_step import train_step
from topograd.nn.config import GPTConfig
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.topology.dag import Topology
from topograd.training import activation_cache
from topograd.training.activation_cache import (
    CachedActivationLoader,
    HiddenStates,
    compute_states,
    layer_states,
    packed_rows,
)
from topograd.training.row_cache import open_rows


@pytest.fixture(scope="module")
def stack() -> GPT:
    torch.manual_seed(0)
    stack = GPT(GPTConfig(layers=4, width=16, heads=2, vocab=40, context=8)).eval()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stack


@pytest.fixture(scope="module")
def rows() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(40, (11, 9), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[3, 5:] = -100
    return tokens[:, :-1].contiguous(), targets


def compute(folder: Path, stack: GPT, rows: tuple[Tensor, Tensor], **changes: Any) -> HiddenStates:
    settings: dict[str, Any] = {"base": "b", "layers": (2, 4), "batch": 3, **changes}
    return compute_states(folder, stack, *rows, **settings)


def test_kept_states_are_those_of_the_layers(stack: GPT, rows: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    store = compute(tmp_path, stack, rows, on_rows=lambda done, of: seen.append((done, of)))
    batch = store.rows([0, 3, 10])
    expected = layer_states(stack, rows[0][[0, 3, 10]], (2, 4))
    for layer in (2, 4):
        torch.testing.assert_close(batch.states[layer], expected[layer], rtol=1e-5, atol=1e-6)
    assert torch.equal(batch.targets, rows[1][[0, 3, 10]])
    assert batch.mask[1].tolist() == [True] * 5 + [False] * 3
    h = stack.layers[3](
        stack.layers[2](batch.states[2], batch.layer_context(stack)), batch.layer_context(stack)
    )
    torch.testing.assert_close(h, batch.states[4], rtol=1e-5, atol=1e-6)
    assert seen[-1] == (11, 11)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache.json", "lock", "shard-00000.safetensors"]


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_half_precision_rounds_and_no_more(
    stack: GPT, rows: tuple[Tensor, Tensor], tmp_path: Path, dtype: Any, bound: float
) -> None:
    kept = compute(tmp_path, stack, rows, dtype=dtype).rows([1, 2]).states[4]
    exact = layer_states(stack, rows[0][[1, 2]], (4,))[4]
    assert ((kept - exact).abs() <= bound * exact.abs() + 1e-6).all()
    (shard,) = (load_file(path) for path in tmp_path.glob("shard-*"))
    assert (shard["layer.4"].shape, str(shard["layer.4"].dtype)) == ((11, 8, 16), f"torch.{dtype}")


def test_a_step_from_kept_states_is_the_step_from_tokens(rows: tuple[Tensor, Tensor]) -> None:
    """In float64: the losses and every gradient of the stages behind a frozen trunk."""
    torch.manual_seed(2)
    stack = GPT(GPTConfig(layers=4, width=16, heads=2, vocab=40, context=8)).double()
    for parameter in stack.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    plan = prepare(stack, _behind("1,1,2"))
    found = []
    for given in (None, layer_states(stack, rows[0], (2,))):
        stack.zero_grad()
        losses = train_step(stack, plan, *rows, states=given)
        found.append((losses, {n: p.grad for n, p in stack.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-12, atol=0, equal_nan=True)
    assert found[0][1].keys() == found[1][1].keys() != set()
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-12, atol=1e-15)


def _behind(partition: str) -> Topology:
    """A chain of which only the last stage learns."""
    chain = Topology.chain(partition)
    *before, last = chain.stages
    frozen = [replace(stage, frozen=True, weight=0.0, head=False) for stage in before]
    return replace(chain, stages=(*frozen, last))


def test_frozen_layers_are_not_run_where_their_states_are_given(
    rows: tuple[Tensor, Tensor],
) -> None:
    torch.manual_seed(2)
    stack = GPT(GPTConfig(layers=4, width=16, heads=2, vocab=40, context=8))
    plan = prepare(stack, _behind("1,1,2"))
    states = layer_states(stack, rows[0], (2,))
    run: list[int] = []
    for i, layer in enumerate(stack.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: run.append(i))
    train_step(stack, plan, *rows, states=states)
    assert run == [2, 3]
    run.clear()
    train_step(stack, plan, *rows, states={1: states[2]})
    assert run == [1, 2, 3]


class _Killed(BaseException):
    pass


def test_a_killed_computation_goes_on_where_it_was(
    stack: GPT, rows: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_cache, "BLOCK_TOKENS", 16)  # two rows
    whole = compute(tmp_path / "whole", stack, rows, batch=2)

    def kill(done: int, of: int) -> None:
        if done >= 7:
            raise _Killed

    with pytest.raises(_Killed):
        compute(tmp_path / "cut", stack, rows, batch=2, on_rows=kill)
    (tmp_path / "cut" / "shard-00003.safetensors").write_bytes(b"a shard that was not noted")
    with refused(RunError, setting="base", given="c"):
        compute(tmp_path / "cut", stack, rows, base="c", batch=2)
    seen: list[int] = []
    again = compute(tmp_path / "cut", stack, rows, batch=2, on_rows=lambda done, _: seen.append(done))
    assert seen[0] == 8
    assert again.key == whole.key
    for name in (f"shard-{number:05d}.safetensors" for number in range(6)):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_block_that_was_damaged_before_resuming_is_computed_again(
    stack: GPT, rows: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_cache, "BLOCK_TOKENS", 16)

    def kill(done: int, of: int) -> None:
        if done >= 7:
            raise _Killed

    with pytest.raises(_Killed):
        compute(tmp_path, stack, rows, batch=2, on_rows=kill)
    file = tmp_path / "shard-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    seen: list[int] = []
    compute(tmp_path, stack, rows, batch=2, on_rows=lambda done, _: seen.append(done))
    assert seen[0] == 4


@pytest.mark.parametrize("name", ["shard-00000.safetensors", "cache.json"])
def test_damage_is_named(stack: GPT, rows: tuple[Tensor, Tensor], tmp_path: Path, name: str) -> None:
    compute(tmp_path, stack, rows)
    file = tmp_path / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=name):
        open_rows(tmp_path, "hidden states")


def test_states_of_something_else_are_refused_by_name(
    stack: GPT, rows: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    compute(tmp_path, stack, rows)
    changes: list[dict[str, Any]] = [{"base": "other"}, {"layers": (2,)}, {"dtype": "float16"}]
    for change in changes:
        with refused(RunError, setting=next(iter(change))):
            compute(tmp_path, stack, rows, **change)
    with refused(RunError, setting="data"):
        compute(tmp_path, stack, (rows[0].flip(0), rows[1]))


def test_bounds(stack: GPT, rows: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    with refused(ConfigError, setting="max_bytes", given=1000):
        compute(tmp_path / "a", stack, rows, max_bytes=1000)
    with refused(ConfigError, setting="layers"):
        compute(tmp_path / "b", stack, rows, layers=(5,))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "letter.txt").write_text("mine")
    with pytest.raises(RunError, match=r"letter\.txt"):
        compute(tmp_path / "c", stack, rows)
    torch.manual_seed(0)
    loud = GPT(GPTConfig(layers=1, width=16, heads=2, vocab=40, context=8))
    with torch.no_grad():
        loud.layers[0].mlp.down.weight.fill_(1e9)  # type: ignore[union-attr,operator]
    with refused(DataError, setting="dtype", given="float16"):
        compute(tmp_path / "d", loud, rows, layers=(1,), dtype="float16")


def test_the_loader_has_every_row_once_an_epoch_and_continues(
    stack: GPT, rows: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    store = compute(tmp_path, stack, rows, layers=(1,))
    loader = CachedActivationLoader(store, batch=4, seed=3)
    first = [next(loader) for _ in range(11)]  # four epochs
    for epoch in range(4):
        lines = torch.cat([b.inputs for b in first])[11 * epoch : 11 * (epoch + 1)]
        assert sorted(map(tuple, lines.tolist())) == sorted(map(tuple, rows[0].tolist()))
    other = CachedActivationLoader(store, batch=4, seed=3)
    for _ in range(4):
        next(other)
    third = CachedActivationLoader(store, batch=4, seed=3)
    third.seek(json.loads(json.dumps(other.position)))
    assert torch.equal(next(third).inputs, first[4].inputs)
    with refused(DataError, setting="position"):
        third.seek({"epoch": 0, "row": 12})


def test_packed_rows_are_those_of_a_loader() -> None:
    shards = shards_in_memory([[1, 2, 3, 4, 5, 6, 7], [8, 9]], 40, separator=0)
    inputs, targets = packed_rows(shards, 4)
    assert inputs.shape == targets.shape == (3, 4)
    assert sorted(t for t in targets.flatten().tolist() if t >= 0) == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert packed_rows(shards, 4, max_tokens=5)[0].shape == (1, 4)
