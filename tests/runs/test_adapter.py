"""Adapters: nothing of the base inside, one flipped bit or another base refused, no kill loses one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raising import refused
from topograd import files
from topograd.errors import CheckpointError, RunError
from topograd.runs import adapter
from topograd.runs.adapter import (
    CARD,
    CONFIG,
    TENSORS,
    BaseIdentity,
    create_adapter,
    open_adapter,
    update_adapter,
)
from topograd.runs.session import LoadedTextRun, open_session
from topograd.training.runs import resume

SETTINGS: dict[str, Any] = {"peft_type": "SPECIALIST", "rank": 4, "rates": [0.1, 2.5e-5]}


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    shared = torch.full((3, 4), value)
    return {"a.weight": shared, "b.weight": shared.t(), "c": torch.tensor(value, dtype=torch.bfloat16)}


@pytest.fixture(scope="module")
def sessions(make_session: Callable[..., LoadedTextRun]) -> tuple[LoadedTextRun, LoadedTextRun]:
    return make_session(2), make_session(3)


@pytest.fixture
def made(sessions: tuple[LoadedTextRun, LoadedTextRun], tmp_path: Path) -> adapter.Adapter:
    base = BaseIdentity.of(sessions[0])
    return create_adapter(
        tmp_path / "side", kind="specialist", base=base, tensors=tensors(), settings=SETTINGS, card="# One"
    )


def test_what_was_written_is_read(
    made: adapter.Adapter, sessions: tuple[LoadedTextRun, LoadedTextRun]
) -> None:
    again = open_adapter(made.folder, "specialist")
    assert again.settings == SETTINGS
    assert again.base == BaseIdentity.of(sessions[0])
    for name, tensor in tensors().items():
        assert torch.equal(again.tensors[name], tensor)
        assert again.tensors[name].dtype == tensor.dtype
    assert sorted(path.name for path in made.folder.iterdir()) == [CARD, CONFIG, TENSORS]


def test_it_is_in_the_shape_that_peft_users_know(made: adapter.Adapter) -> None:
    assert load_file(made.folder / TENSORS).keys() == tensors().keys()
    config = json.loads((made.folder / CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(made.base.folder)
    assert config["rank"] == 4
    card = (made.folder / CARD).read_text()
    assert card.startswith('---\nbase_model: "run-2-0"\nlibrary_name: topograd\n')
    assert card.endswith("# One\n")


def test_the_base_is_opened_where_it_was_or_where_it_is(made: adapter.Adapter, tmp_path: Path) -> None:
    assert made.open_base().weights == made.base.weights
    moved = shutil.copytree(made.base.folder, tmp_path / "moved")
    assert made.open_base(moved).run.folder == moved
    with refused(RunError, setting="base"):
        made.open_base(tmp_path / "nowhere")


def test_a_base_that_was_trained_on_is_opened_at_the_checkpoint(
    made: adapter.Adapter, tmp_path: Path
) -> None:
    moved = shutil.copytree(made.base.folder, tmp_path / "moved")
    resume(moved).train(stop_after=1)
    assert open_session(moved).weights != made.base.weights
    assert made.open_base(moved).weights == made.base.weights


def test_another_base_is_refused_by_name(
    made: adapter.Adapter, sessions: tuple[LoadedTextRun, LoadedTextRun]
) -> None:
    with refused(RunError, setting="base") as caught:
        made.open_base(sessions[1].run.folder)
    assert "\n" not in str(caught.value)
    with refused(RunError, setting="base"):
        made.check_base(sessions[1])
    made.check_base(sessions[0])


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
def test_one_flipped_bit_is_refused(made: adapter.Adapter, name: str) -> None:
    path = made.folder / name
    content = bytearray(path.read_bytes())
    for place in range(7, len(content), max(1, len(content) // 23)):
        content[place] ^= 1
        path.write_bytes(content)
        with pytest.raises(RunError) as caught:
            open_adapter(made.folder)
        assert "\n" not in str(caught.value)
        content[place] ^= 1
    path.write_bytes(content)
    open_adapter(made.folder)
    path.write_bytes(content[:-3])
    with pytest.raises(RunError):
        open_adapter(made.folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "was not written by topograd"),
        ({"version": 9}, "has version 9; it must be 1"),
    ],
)
def test_foreign_ones_are_refused(made: adapter.Adapter, change: dict[str, Any], words: str) -> None:
    config = json.loads((made.folder / CONFIG).read_text())
    config["topograd"] |= change
    (made.folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(RunError, match=words):
        open_adapter(made.folder)


def test_what_is_no_adapter_is_refused(made: adapter.Adapter, tmp_path: Path) -> None:
    with refused(RunError, setting="kind", given="specialist"):
        open_adapter(made.folder, "lora")
    with refused(RunError, setting="folder"):
        open_adapter(tmp_path / "none", "specialist")
    with refused(RunError, setting="folder"):
        open_adapter(tmp_path)
    with refused(RunError, setting="folder"):
        create_adapter(made.folder, kind="x", base=made.base, tensors=tensors(), settings={}, card="")
    with refused(RunError, setting="settings", given="topograd"):
        create_adapter(
            tmp_path / "n", kind="x", base=made.base, tensors=tensors(), settings={"topograd": 1}, card=""
        )
    assert not (tmp_path / "n").exists()


def test_written_again_it_has_the_new_values(made: adapter.Adapter) -> None:
    new = update_adapter(made, tensors(2.0), SETTINGS | {"steps": 4}, "# Two")
    assert new.settings["steps"] == 4
    assert new.tensors["c"] == 2
    assert new.digest != made.digest
    assert (made.folder / CARD).read_text().endswith("# Two\n")
    with pytest.raises(RunError, match="other names or shapes"):
        update_adapter(new, {"a.weight": torch.zeros(2)}, SETTINGS)


@pytest.mark.parametrize("kill", range(4))
def test_a_kill_leaves_one_that_opens(
    made: adapter.Adapter, kill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each system call that changes a name may be the last one."""
    calls = 0

    def replace(source: Any, target: Any, original: Callable[..., None] = os.replace) -> None:
        nonlocal calls
        calls += 1
        if calls > kill:
            raise KeyboardInterrupt
        original(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    with contextlib.suppress(KeyboardInterrupt):
        update_adapter(made, tensors(2.0), SETTINGS | {"steps": 4})
    monkeypatch.undo()
    found = open_adapter(made.folder)
    assert found.tensors["c"] in (1, 2)
    assert update_adapter(found, tensors(3.0), SETTINGS).tensors["c"] == 3


def test_what_a_kill_left_is_in_nobodys_way(made: adapter.Adapter, tmp_path: Path) -> None:
    """In a container a process has the number of the one that was killed."""
    (tmp_path / f".again.tmp-{os.getpid()}").mkdir()
    again = create_adapter(
        tmp_path / "again", kind="specialist", base=made.base, tensors=tensors(), settings=SETTINGS, card=""
    )
    assert again.digest == made.digest
    assert not list(tmp_path.glob(".again.tmp-*"))


def test_a_folder_that_cannot_be_written_is_named(made: adapter.Adapter, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write .*file/side"):
        create_adapter(
            tmp_path / "file" / "side", kind="x", base=made.base, tensors=tensors(), settings={}, card=""
        )


def test_it_is_a_checkpoint_error_to_be_damaged(made: adapter.Adapter) -> None:
    (made.folder / TENSORS).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_adapter(made.folder)
