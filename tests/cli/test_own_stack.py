"""A model of a user's own, named in a config file as package.module:Spec, is a run like any other."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from topograd.cli.main import main
from topograd.decode.engine import Engine
from topograd.decode.model import load
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.runs.folder import Run
from topograd.serve.server import Running, bind, open_served
from topograd.serve.settings import Limits

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "own_stack.toml"
SMALL = ["--config", CONFIG, "--steps", 6, "--batch", 2, "--eval-bytes", 300, "--save-every", 3, "--json"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the example, trained from its config file."""
    folder = tmp_path_factory.mktemp("own") / "run"
    assert main([str(word) for word in ("train", *SMALL, "--out", folder)]) == 0
    return folder


def losses(folder: Path) -> list[Any]:
    return [record.get("losses") for record in Run.open(folder).metrics() if record.get("kind") == "train"]


def test_it_is_a_run_with_its_own_table(own: Path) -> None:
    table = Run.open(own).read_config()["model"]
    assert table == {
        "kind": "examples.own_stack:DecaySpec",
        "layers": 4,
        "width": 64,
        "vocab": 257,
        "context": 64,
    }


@pytest.mark.covers("own", "train", "resume")
@pytest.mark.covers("own", "train", "resume", feature="topologies")
def test_stopped_and_resumed_it_is_the_same_bit_for_bit(own: Path, tmp_path: Path, call: Any) -> None:
    half = tmp_path / "half"
    assert call("train", *SMALL, "--out", half, "--stop-after", 3).json["steps"] == 3
    assert call("train", "--resume", half, "--json").json["steps"] == 6
    assert losses(half) == losses(own)
    assert load(half).session.weights == load(own).session.weights


@pytest.mark.covers("own", "decode", feature="scores")
def test_it_is_evaluated_and_scored(own: Path, call: Any) -> None:
    assert call("eval", own, "--bytes", 300, "--json").json["bpb"]["last"] > 0
    words = ("--context", "def ", "--continuation", "main", "--continuation", "x")
    assert len(call("score", own, *words, "--json").json["continuations"]) == 2


@pytest.mark.covers("own", "decode")
@pytest.mark.covers("own", "decode", feature="early exit")
@pytest.mark.parametrize("depth", ["full", "prefix:1", "speculate:2"])
def test_it_writes_at_every_depth(own: Path, call: Any, depth: str) -> None:
    answer = call("generate", own, "--prompt", "def ", "--tokens", 8, "--depth", depth, "--json").json
    assert answer["tokens"] == 8
    assert answer["runtime"] == "torch"


@pytest.mark.covers("own", "decode", feature="speculation")
def test_speculation_is_exact(own: Path) -> None:
    model = load(own)
    model.session.stack.double()
    full, drafted = (model.generate("def f", tokens=24, depth=depth) for depth in ("full", "speculate:3"))
    assert full == drafted


def test_ragged_texts_are_those_of_one_alone(own: Path) -> None:
    session = load(own).session
    stack = session.stack.double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    prompts = [session.tokenizer.encode(text) for text in ("def read(self", "x", "class Node:")]
    mode = FixedDepth(Engine(stack, session.plan, session.config.model.context), 1)
    together = generate_batch(mode, prompts, 12)
    assert together == [generate_batch(mode, [prompt], 12)[0] for prompt in prompts]
    assert len({tuple(emitted.token for emitted in text) for text in together}) == 3, "they differ"


@pytest.mark.covers("own", "serve")
def test_it_is_served(own: Path) -> None:
    served = open_served(own, None, Limits(rows=2, waiting=4, seconds=60, grace=2))
    running = Running(served, bind("127.0.0.1", 0), None)
    ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(running.run(ready.set)))
    thread.start()
    assert ready.wait(60)
    try:
        with httpx.Client(base_url=running.address(), timeout=60) as client:
            name = client.get("/v1/models").json()["data"][0]["id"]
            body = {"model": name, "prompt": "def ", "max_tokens": 5, "temperature": 0}
            choice = client.post("/v1/completions", json=body).json()["choices"][0]
    finally:
        running.stop()
        thread.join(60)
    assert choice["text"] == load(own).generate("def ", tokens=5)


def test_what_it_cannot_do_is_one_line(own: Path, tmp_path: Path, call: Any) -> None:
    said = call("export", own, "--format", "onnx", "--out", tmp_path / "x").refusal
    assert "DecayStack is not made of transformer blocks" in said
    assert "DecayStack" in call("generate", own, "--runtime", "onnx", "--prompt", "a").refusal
    assert "takes no new layers" in call("specialist", "attach", own, "--out", tmp_path / "s").refusal


def test_the_command_finds_modules_below_its_folder(tmp_path: Path) -> None:
    """As a user's script does: the console script has no current folder on its path by itself."""
    script = (
        "import sys; _, root, *sys.argv = sys.argv; sys.path = [p for p in sys.path if p not in ('', root)];"
    )
    words = ["topograd", "train", "--config", str(CONFIG), "--help"]
    code = f"{script}\nfrom topograd.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    words[-1:] = ["--out", str(tmp_path / "run")]
    elsewhere = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert elsewhere.returncode == 2
    assert "'examples.own_stack:DecaySpec' cannot be imported" in elsewhere.stderr
