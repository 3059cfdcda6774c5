"""`topograd specialist compose`: the nats that it prints are those of the composed plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from topograd.exec.forward import Predictor
from topograd.runs.adapter import update_adapter
from topograd.runs.folder import Run
from topograd.runs.session import open_session
from topograd.specialists.attach import attach, open_specialist
from topograd.specialists.composition import Pool, Weights, composed
from topograd.specialists.records import rows_of

Call = Callable[..., Any]


@pytest.fixture
def noisy(spec: Path) -> Path:
    """A specialist that says something else than its base."""
    adapter, generator = open_specialist(spec), torch.Generator().manual_seed(0)
    tensors = {n: t + 0.3 * torch.randn(t.shape, generator=generator) for n, t in adapter.tensors.items()}
    update_adapter(adapter, tensors, adapter.settings)
    return spec


def by_hand(base: Path, folder: Path, text: Path, weights: Weights, pool: Pool) -> float:
    attached = attach(open_session(base), {"spec": open_specialist(folder)})
    inputs, targets = rows_of(text, attached)
    with torch.no_grad():
        logits = Predictor(attached.stack, composed(attached, weights, pool))(inputs)
    return float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@pytest.mark.parametrize("pool", ["deltas", "sum"])
def test_the_nats_are_those_of_the_plans(
    straight: Run, call: Call, noisy: Path, chat: Path, pool: Pool
) -> None:
    words = (
        "specialist",
        "compose",
        straight.folder,
        "--specialists",
        f"{noisy}*0.5",
        "--data",
        chat,
        "--pool",
        pool,
    )
    found = call(*words, "--json").json
    assert found["specialists"] == {"spec": 0.5}
    (text,) = found["texts"]
    asked: dict[str, Weights] = {"base": {}, "spec": {"spec": 1.0}, "together": {"spec": 0.5}}
    assert list(text["nats"]) == list(asked)
    for name, weights in asked.items():
        by_plan = by_hand(straight.folder, noisy, chat, weights, pool)
        assert text["nats"][name] == pytest.approx(by_plan, rel=1e-4)
    assert len(set(text["nats"].values())) == 3


def test_it_shows_a_column_for_each_composition(straight: Run, call: Call, noisy: Path, chat: Path) -> None:
    words = ("specialist", "compose", straight.folder, "--specialists", noisy, "--data", chat, "--data", chat)
    shown = call(*words, "--rows", 1)
    assert shown.out.startswith("nats a token")
    assert "base" in shown.out
    assert "together" not in shown.out, "one specialist with weight 1 is itself"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--specialists", "SPEC"], "--data is not given"),
        (["--specialists", "SPEC", "--data", "nowhere"], "nowhere"),
        (["--specialists", "SPEC*x", "--data", "CHAT"], "it must be written as A,B or A*0.7,B*0.3"),
        (["--specialists", "SPEC,SPEC", "--data", "CHAT"], "it must be names, each once"),
        (["--specialists", "SPEC", "--data", "CHAT", "--rows", "0"], "--rows is 0"),
        (["--specialists", "SPEC", "--data", "CHAT", "--context", "99"], "the base sees 16"),
    ],
)
def test_bad_input_is_one_line(
    straight: Run, call: Call, spec: Path, chat: Path, words: list[str], said: str
) -> None:
    given = [word.replace("SPEC", str(spec)).replace("CHAT", str(chat)) for word in words]
    assert said in call("specialist", "compose", straight.folder, *given).refusal
