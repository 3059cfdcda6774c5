"""Kinds of models beside the GPT behind the server: the text that `generate` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

import topograd as tg
from topograd.runs.config import TrainConfig
from topograd.runs.session import LoadedTextRun
from topograd.serve.server import open_served
from topograd.serve.settings import Limits

PROMPTS = ["def ", "x = "]


def check(folder: Path, serve: Any) -> None:
    """Two prompts at once, greedy, at two depths."""
    model = tg.load(folder)
    served = open_served(folder, None, Limits(rows=2, waiting=4, seconds=60, grace=2))
    running, stop = serve(served)
    try:
        with httpx.Client(base_url=running.address(), timeout=60) as client:
            name = client.get("/v1/models").json()["data"][0]["id"]
            for depth in ("full", "prefix:1"):
                body = {"model": name, "prompt": PROMPTS, "max_tokens": 5, "temperature": 0, "depth": depth}
                choices = client.post("/v1/completions", json=body).json()["choices"]
                texts = [model.generate(prompt, tokens=5, depth=depth) for prompt in PROMPTS]
                assert [choice["text"] for choice in choices] == texts
    finally:
        stop()


@pytest.mark.covers("mamba", "serve")
@pytest.mark.covers("mamba", "serve", feature="early exit")
@pytest.mark.parametrize("architecture", ["mamba2", "hybrid"])
def test_mamba(architecture: str, config: TrainConfig, serve: Any, tmp_path: Path) -> None:
    model = config.gpt.changed(architecture=architecture, ssm_state=8)
    tg.start(config.changed(model=model, partition="1,1", steps=2, eval_every=0), tmp_path / "run").train()
    check(tmp_path / "run", serve)


@pytest.mark.covers("imported", "serve")
@pytest.mark.covers("imported", "serve", feature="early exit")
def test_a_family_that_was_imported(imported: LoadedTextRun, serve: Any) -> None:
    check(imported.run.folder, serve)


@pytest.mark.covers("adapted", "serve")
@pytest.mark.covers("adapted", "serve", feature="early exit")
def test_a_model_that_transformers_runs(adapted: LoadedTextRun, serve: Any) -> None:
    check(adapted.run.folder, serve)
