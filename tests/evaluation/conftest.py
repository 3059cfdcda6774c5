"""Tiny models whose stages disagree, in float64, and task files made here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from topograd.decode.engine import Engine
from topograd.decode.model import Model
from topograd.evaluation.tasks import TASKS
from topograd.nn.gpt import GPT
from topograd.runs.session import LoadedTextRun
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

VOCAB, CONTEXT = 40, 32


def engine_of(topology: Topology | str = "1,1,1", dtype: torch.dtype = torch.float64, **more: Any) -> Engine:
    """An engine over a random model of three layers."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 3, "width": 16, "heads": 2, "vocab": VOCAB, "context": CONTEXT}
    model = GPT(**sizes | more).to(dtype).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    topology = Topology.chain(topology) if isinstance(topology, str) else topology
    return Engine(model, Plan.of(topology, 3), CONTEXT)


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    return engine_of


@pytest.fixture(scope="module")
def session(make_session: Callable[..., LoadedTextRun]) -> LoadedTextRun:
    return make_session(2)


@pytest.fixture(scope="module")
def model(session: LoadedTextRun) -> Model:
    """A run of two stages on bytes that reads 16 tokens, in float64."""
    session.stack.double()
    return Model(session)


ITEMS: dict[str, dict[str, Any]] = {
    "copa": {"query": "It rained, so", "choices": ["it got wet.", "it was dry."], "gold": 0},
    "winograd": {"context_options": ["Ann saw Bo; Ann", "Ann saw Bo; Bo"], "continuation": "ran.", "gold": 1},
    "lambada_openai": {"context": "a stage and a ", "continuation": "loss"},
    "bigbench_qa_wikidata": {"context": "The native tongue of X is", "continuation": "French"},
}


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few items of four tasks."""
    folder = tmp_path_factory.mktemp("core")
    for label, item in ITEMS.items():
        count = 14 if TASKS[label].shots else 5
        lines = []
        for i in range(count):
            key = next(k for k in ("query", "context", "continuation") if k in item)
            lines.append(json.dumps(item | {key: f"{i}{item[key]}"}))
        (folder / label).mkdir()
        (folder / label / TASKS[label].file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
