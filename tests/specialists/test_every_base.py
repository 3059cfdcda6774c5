"""Specialists on every kind of base: the identity at insertion, and trained as they predict."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from raising import refused
from topograd.errors import ConfigError, RunError
from topograd.exec.forward import Predictor
from topograd.exec.train_step import train_step
from topograd.runs.adapter import update_adapter
from topograd.runs.session import Held, LoadedTextRun
from topograd.specialists.attach import attach, new_specialist
from topograd.specialists.composition import composed
from topograd.specialists.finetune import FineTuning, training_records
from topograd.specialists.model import SpecialistPool
from topograd.specialists.settings import FineTune
from topograd.specialists.tokens import NewToken

Make = Callable[..., LoadedTextRun]
TOKENS = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0))
BASES: dict[str, dict[str, Any]] = {
    "shared": {},
    "per-stage": {"heads": "per-stage"},
    "low-rank": {"heads": "low-rank", "head_rank": 3},
    "own": {"heads": "own"},
    "forest": {"graph": "forest", "branches": ("2", "1")},
    "forest of heads": {"graph": "forest", "branches": ("2", "1"), "heads": "per-stage"},
    "mean": {"prediction": "mean"},
    "sum": {"prediction": "sum", "heads": "per-stage"},
    "residual": {"objective": "residual"},
    "diversity": {"objective": "diversity"},
    "weights": {"prediction": "0.2,0.5,0.3", "heads": "low-rank", "head_rank": 2},
    "last weighs nothing": {"prediction": "0.2,0.8,0"},
}


@pytest.fixture(params=list(BASES))
def base(request: pytest.FixtureRequest, make_session: Make) -> LoadedTextRun:
    kept: dict[str, LoadedTextRun] = request.session.__dict__.setdefault("specialist_bases", {})
    name = request.param
    if name not in kept or not kept[name].run.folder.exists():
        kept[name] = make_session(3, **BASES[name])
    return kept[name]


@pytest.mark.parametrize(
    "shape",
    [{"layers": 1}, {"layers": 2, "head_rank": 2}, {"layers": 0}, {"layers": 0, "head_rank": 2}],
    ids=str,
)
@torch.no_grad()
def test_insertion_changes_no_bit(base: LoadedTextRun, shape: dict[str, Any], tmp_path: Path) -> None:
    before = Predictor(base.stack, base.plan)(TOKENS)
    adapters = {name: new_specialist(tmp_path / name, base, **shape) for name in ("s", "t")}
    attached = attach(base, adapters)
    for weights in ({}, {"s": 1.0}, {"t": 1.0}):
        assert torch.equal(Predictor(attached.stack, composed(attached, weights))(TOKENS), before)
    both = Predictor(attached.stack, composed(attached, {"s": 0.7, "t": 0.6}))(TOKENS)
    torch.testing.assert_close(both, before, rtol=1e-4, atol=1e-4)
    tensors = {n: t + 0.3 for n, t in adapters["s"].tensors.items()}
    update_adapter(adapters["s"], tensors, adapters["s"].settings)
    attached.part("s").load_state_dict(tensors)
    assert torch.equal(Predictor(attached.stack, composed(attached, {}))(TOKENS), before)
    assert not torch.equal(Predictor(attached.stack, composed(attached, {"s": 1.0}))(TOKENS), before)


@torch.no_grad()
def test_new_tokens_change_no_bit_of_the_others(base: LoadedTextRun, tmp_path: Path) -> None:
    before = Predictor(base.stack, base.plan)(TOKENS)
    adapter = new_specialist(tmp_path / "s", base, tokens=[NewToken("<|one|>", "x")])
    attached = attach(base, {"s": adapter})
    rows, (source,) = base.stack.vocab, base.tokenizer.encode("x")
    for weights in ({}, {"s": 1.0}):
        z = Predictor(attached.stack, composed(attached, weights))(TOKENS)
        torch.testing.assert_close(z[..., :rows], before, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(z[..., rows], z[..., source])


@pytest.mark.parametrize("layers", [0, 1])
def test_it_is_trained_as_it_predicts(base: LoadedTextRun, layers: int, tmp_path: Path) -> None:
    """Loss and gradients of a step against the obvious form, in float64."""
    stack = copy.deepcopy(base.stack).double()
    attached = attach(
        replace(base, read_stack=Held(stack)), {"s": new_specialist(tmp_path / "s", base, layers=layers)}
    )
    part, plan = attached.part("s").double(), composed(attached, {"s": 1.0})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    targets = TOKENS.roll(-1, 1)
    losses = train_step(attached.stack, plan, TOKENS, targets)
    found = {name: p.grad.clone() for name, p in part.named_parameters() if p.grad is not None}
    attached.stack.zero_grad()
    logits = Predictor(attached.stack, plan)(TOKENS)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    torch.testing.assert_close(losses[attached.stages["s"]], loss.detach())
    for name, parameter in part.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], parameter.grad)
    assert found


@pytest.mark.parametrize("runtime", ["torch", "onnx"])
def test_it_decodes_as_its_base(base: LoadedTextRun, runtime: str, tmp_path: Path) -> None:
    adapters = {str(n): new_specialist(tmp_path / str(n), base, layers=n, head_rank=2) for n in (0, 1)}
    pool = SpecialistPool.open(base, adapters, runtime=runtime)
    rows: list[dict[str, float]] = [{}, {"0": 1.0}, {"1": 1.0}]
    texts = pool.generate([[65, 66, 67]] * 3, rows, tokens=5)
    assert texts[0] == texts[1] == texts[2]
    alone = pool.model({"0": 1.0}).generate([65, 66, 67], 5)
    assert alone == pool.model().generate([65, 66, 67], 5)


@pytest.mark.parametrize("keep", [True, False])
def test_training_lowers_the_loss_and_leaves_the_base(
    base: LoadedTextRun, keep: bool, chats: Path, tmp_path: Path
) -> None:
    new_specialist(tmp_path / "s", base, layers=0, head_rank=2)
    settings = FineTune(data=str(chats), steps=6, batch=4, context=16, keep_states=keep, head_rate=2.0)
    result = FineTuning.start(tmp_path / "s", settings).train()
    assert result["base_bit_identical"]
    losses = [r["loss"] for r in training_records(tmp_path / "s") if r["kind"] == "train"]
    assert losses[-1] < losses[0]


def test_a_specialist_of_before_is_read_where_it_was_the_identity(make_session: Make, tmp_path: Path) -> None:
    for name, allowed in (("shared", True), ("per-stage", False)):
        base = make_session(2, **BASES[name])
        adapter = new_specialist(tmp_path / name, base)
        old = {key: value for key, value in adapter.settings.items() if key != "behind"}
        adapter = replace(adapter, settings=old)
        if allowed:
            assert attach(base, {"s": adapter}).stages == {"s": 2}
        else:
            with refused(RunError, setting="specialists"):
                attach(base, {"s": adapter})


def test_a_base_that_predicts_by_a_path_is_refused(make_session: Make, tmp_path: Path) -> None:
    base = make_session(3, prediction="path:1,3")
    with refused(ConfigError, setting="prediction"):
        new_specialist(tmp_path / "s", base)
