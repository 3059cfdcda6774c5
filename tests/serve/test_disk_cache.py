"""The prompt cache on disk: bit for bit what was computed, over restarts, whatever is damaged, by tenant."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from topograd.decode.model import Model
from topograd.errors import ConfigError
from topograd.runs.session import LoadedTextRun
from topograd.serve import disk_cache
from topograd.serve.disk_cache import PromptCache
from topograd.serve.jobs import Job

PROMPT = [(7 * i + 3) % 40 for i in range(9)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "BLOCK", 2)


@pytest.fixture
def write(make_desk: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[Any, Job]]:
    """One server's life: a text, and the folder is written."""

    def write(
        prompt: list[int] = PROMPT, depth: str = "full", limit: float = 1e9, **more: Any
    ) -> tuple[Any, Job]:
        desk = make_desk(disk=PromptCache(tmp_path, limit, "a model"))
        job = desk.job(prompt, 5, depth, **more)
        desk.scheduler.add([job])
        desk.run()
        desk.scheduler.base.disk.close()
        return desk, job

    return write


def states(desk: Any, length: int = 8) -> list[torch.Tensor]:
    pool = desk.scheduler.base
    (slot,) = pool.slots
    each = [pool.cache.computed(slot.sequence, stage, 0, length) for stage in range(len(pool.cache.stages))]
    return [tensor.clone() for some in each for _, tensor in sorted(some.items())]


def test_a_second_server_starts_where_the_first_was(write: Callable[..., tuple[Any, Job]]) -> None:
    cold, first = write()
    warm, second = write()
    assert (first.timings.cached, second.timings.cached) == (0, 8)
    assert warm.tokens(second) == cold.tokens(first)
    assert all(map(torch.equal, states(cold), states(warm)))
    longer, third = write([*PROMPT[:5], 1, 2, 3])
    assert third.timings.cached == 4
    alone, fourth = write([*PROMPT[:5], 1, 2, 3], tenant="nobody's")
    assert longer.tokens(third) == alone.tokens(fourth)


@pytest.mark.parametrize("stages", [[0], [3, 1], [0, 1, 2, 3]])
def test_what_is_damaged_is_ignored_and_replaced(
    write: Callable[..., tuple[Any, Job]], tmp_path: Path, stages: list[int]
) -> None:
    cold, first = write()
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    chance = random.Random(len(stages))
    for path in sorted(tmp_path.iterdir()):
        if int(path.name.split(".")[1]) not in stages:
            continue
        data, place = bytearray(path.read_bytes()), chance.randrange(len(path.read_bytes()))
        damage = chance.randrange(4)
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes([bytes(data), bytes(data[:place]), b"", whole[min(whole)][:-1] + b"\xff"][damage])
    warm, second = write()
    assert second.timings.cached == 0
    assert warm.tokens(second) == cold.tokens(first)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == whole


def test_another_models_numbers_under_our_name(write: Callable[..., tuple[Any, Job]], tmp_path: Path) -> None:
    cold, first = write()
    for path in tmp_path.iterdir():
        tensors = {"output": torch.zeros(2, 7), "keys.0": torch.zeros(1, 2, 3)}
        path.write_bytes(disk_cache.save({**tensors, "digest": disk_cache._digest(tensors)}))
    warm, second = write()
    assert second.timings.cached == 0
    assert warm.tokens(second) == cold.tokens(first)
    assert write()[1].timings.cached == 8


def test_shallow_texts_read_and_write_their_stages_only(
    write: Callable[..., tuple[Any, Job]], tmp_path: Path
) -> None:
    write(depth="prefix:1")
    assert {path.name.split(".")[1] for path in tmp_path.iterdir()} == {"0"}
    assert write(depth="prefix:1")[1].timings.cached == 8
    deep, job = write()
    assert job.timings.cached == 0
    again, other = write(depth="speculate:2")
    assert other.timings.cached == 8
    assert again.tokens(other)[:5] == deep.tokens(job)


def test_tenants_share_nothing(write: Callable[..., tuple[Any, Job]]) -> None:
    write(tenant="a")
    assert write(tenant="b")[1].timings.cached == 0
    assert write(tenant="a")[1].timings.cached == 8


def test_it_is_bounded_and_keeps_what_was_used_last(
    write: Callable[..., tuple[Any, Job]], tmp_path: Path
) -> None:
    write()
    files = sorted(tmp_path.iterdir())
    for age, path in enumerate(files):
        os.utime(path, (1000 + age, 1000 + age))
    size = sum(path.stat().st_size for path in files)
    write([*reversed(PROMPT)], limit=1.5 * size)
    left = sorted(tmp_path.iterdir())
    assert sum(path.stat().st_size for path in left) <= 1.5 * size
    kept = [path in left for path in files]
    assert kept == sorted(kept), "the oldest go first"
    assert write([*reversed(PROMPT)])[1].timings.cached == 8


def test_models_have_caches_of_their_own(double: LoadedTextRun, tmp_path: Path) -> None:
    model = Model(double)
    one, two = PromptCache.of(tmp_path, 1e9, model), PromptCache(tmp_path, 1e9, "another")
    keys = one.keys(PROMPT)
    assert len(keys) == 4
    assert keys[:2] == one.keys(PROMPT[:5])
    assert not set(keys) & set(two.keys(PROMPT))
    assert not set(keys) & set(one.keys(PROMPT[2:]))
    one.close()
    two.close()


def test_a_folder_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as problem:
        PromptCache(tmp_path / "file" / "folder", 1e9, "")
    assert problem.value.setting == "prompt_cache"
