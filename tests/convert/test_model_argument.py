"""MODEL: runs as they are, everything else converted once into the cache, by content."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import topograd as tg
from raising import refused
from topograd.convert import importing, model_argument
from topograd.convert.card import read_origin
from topograd.convert.export import export_model
from topograd.convert.model_argument import resolve_model
from topograd.errors import CheckpointError, RunError
from topograd.runs.folder import Run
from topograd.runs.session import open_session, read_settings
from topograd.specialists.attach import new_specialist

Source = Callable[[str], tuple[Path, Any]]
TOKENS = torch.randint(300, (1, 12), generator=torch.Generator().manual_seed(0))
RESOLVE = "import sys; from topograd.convert.model_argument import resolve_model as r; print(r(sys.argv[1]))"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_argument, "_in_use", {})
    return tmp_path / "cache" / "topograd" / "models"


@pytest.fixture(scope="module")
def gguf(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    from topograd.convert.importing import import_model

    import_model(source("llama")[0], folder / "run")
    export_model(folder / "run", folder / "out", "gguf")
    return folder / "out" / "model.gguf"


def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "import_model", lambda *_: pytest.fail("it was converted again"))


def test_a_run_is_itself(straight: Run, cache: Path) -> None:
    assert resolve_model(str(straight.folder)) == straight.folder
    assert not cache.exists()


def test_an_adapter_of_our_own_is_no_model(straight: Run, tmp_path: Path) -> None:
    new_specialist(tmp_path / "spec", open_session(straight.folder))
    with refused(RunError, setting="model") as error:
        resolve_model(tmp_path / "spec")
    assert "is an adapter and no model; give its base" in str(error.value)


def test_a_folder_is_converted_once(
    source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, theirs = source("llama")
    model = tg.load(folder)
    with torch.no_grad():
        assert torch.equal(model.logits(TOKENS), theirs(TOKENS, use_cache=False).logits)
    run = model.session.run.folder
    assert run.parents[1] == cache
    assert run.name == folder.name
    assert read_settings(Run.open(run)).topology.partition == "L"
    assert tg.generate(folder, "def", 3) == model.generate("def", 3)
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert resolve_model(moved).parents[1] == cache
    assert resolve_model(moved) != run, "its weights lie elsewhere"
    no_conversion(monkeypatch)
    assert resolve_model(folder) == run


def test_a_file_is_known_by_its_content(
    gguf: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = resolve_model(gguf)
    assert [path.name for path in cache.iterdir()] == [run.parent.name]
    other = shutil.copyfile(gguf, tmp_path / "other.gguf")
    with monkeypatch.context() as patch:
        no_conversion(patch)
        assert resolve_model(other) == run
    first = open_session(run).weights
    with open(other, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))
    changed = resolve_model(other)
    assert changed.name == "other"
    assert open_session(changed).weights != first


def test_two_processes_convert_once(gguf: Path, cache: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RESOLVE, str(gguf)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    answers = [process.communicate() for process in processes]
    (run,) = {out for out, _ in answers}
    assert Path(run.strip()).parents[1] == cache
    assert "".join(err for _, err in answers).count("converting") == 1


def test_a_conversion_that_was_killed_is_made_again(gguf: Path) -> None:
    run = resolve_model(gguf)
    run.rename(run.with_name(f".{run.name}.tmp"))
    (run.with_name(f".{run.name}.tmp") / "config.toml").unlink()
    assert resolve_model(gguf) == run
    assert sorted(path.name for path in run.parent.iterdir()) == ["lock", "model"]
    assert tg.load(gguf).generate("def", 2).depth == "full"


def test_models_that_were_not_used_for_longest_go(
    gguf: Path, source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_argument, "MAX_MODELS", 1)
    first = resolve_model(gguf)
    second = resolve_model(source("llama")[0])
    assert first.is_dir(), "this process has it open"
    model_argument._in_use.clear()
    os.utime(second.parent, (1, 1))
    third = resolve_model(source("qwen3")[0])
    assert [path.name for path in cache.iterdir()] == [third.parent.name]


def test_what_cannot_be_converted_leaves_nothing(
    source: Source, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, broken = tmp_path / "notes.txt", tmp_path / "broken.gguf"
    text.write_text("no model")
    with refused(RunError, setting="model", given=str(text)):
        resolve_model(text)
    assert not cache.exists(), "what is no model at all is not begun"
    broken.write_bytes(b"GGUF" + bytes(20))
    with refused(CheckpointError):
        resolve_model(broken)
    (entry,) = cache.iterdir()
    assert [path.name for path in entry.iterdir()] == ["lock"]
    with refused(RunError, setting="model", given=str(tmp_path)):
        resolve_model(tmp_path)
    with refused(RunError, setting="model", given="nowhere"):
        resolve_model("nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(text))
    with refused(RunError) as caught:
        resolve_model(source("llama")[0])
    assert "XDG_CACHE_HOME" in str(caught.value)


def test_what_belongs_to_a_model_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "topograd_adapter.json").write_text("{}")
    with refused(RunError, setting="model", given=str(tmp_path)) as caught:
        resolve_model(tmp_path)
    assert "--specialists" in str(caught.value)


def on_hub(folder: Path, home: Path) -> dict[str, str]:
    """A hub cache that holds the model `there/tiny`, and the environment that names it."""
    repository, commit = home / "hub" / "models--there--tiny", "c" * 40
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


def test_a_name_on_the_hub(source: Source, tmp_path: Path, cache: Path) -> None:
    environment = on_hub(source("llama")[0], tmp_path / "home")
    words = ["generate", "hf:there/tiny", "--prompt", "def", "--tokens", "3", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "topograd", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    run = Path(answer["run"])
    assert (run.parents[1], run.name) == (cache, "tiny")
    assert read_origin(Run.open(run), read_settings(Run.open(run)))["name"] == "tiny"
    assert answer["text"] == str(tg.load(source("llama")[0]).generate("def", 3))
    words[1] = "hf:there/absent"
    done = subprocess.run(
        [sys.executable, "-m", "topograd", *words], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("topograd: hf:there/absent cannot be had from the hub (")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:no such", "hf:../x"])
def test_a_name_that_no_hub_has(name: str) -> None:
    with refused(CheckpointError, setting="model", given=name):
        resolve_model(name)
