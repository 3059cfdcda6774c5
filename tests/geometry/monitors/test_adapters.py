"""The monitor in other loops and logs; what is not installed is one line."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.monitors import adapters
from topograd.geometry.monitors.adapters import (
    UnclippedNorms,
    lightning_callback,
    trainer_callback,
    writer_to,
)
from topograd.geometry.monitors.early_warning import EarlyWarning


def test_writers_by_protocol(tmp_path: Path) -> None:
    file = tmp_path / "signals.jsonl"
    writer_to(file)(1, {"loss": 2.0})
    writer_to(str(file))(2, {"loss": 1.0})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.0},
    ]
    writer_to(file)(3, {"loss": float("nan"), "rank": float("inf")})
    last = file.read_text().splitlines()[-1]
    assert json.loads(last, parse_constant=pytest.fail) == {"step": 3, "loss": None, "rank": None}
    seen: list[Any] = []
    board = SimpleNamespace(add_scalar=lambda name, value, step: seen.append((name, value, step)))
    writer_to(board)(3, {"loss": 1.0, "rank": 4.0})
    assert seen == [("loss", 1.0, 3), ("rank", 4.0, 3)]
    run = SimpleNamespace(log=lambda values, step: seen.append((values, step)))
    writer_to(run)(4, {"loss": 1.0})
    assert seen[-1] == ({"loss": 1.0}, 4)
    with refused(GeometryError, setting="target", given=3):
        writer_to(3)


def test_norms_are_those_before_clipping() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    norms = UnclippedNorms(model)
    (100 * model(torch.randn(4, 3))).sum().backward()
    before = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norms.total() == pytest.approx(before, rel=1e-5)
    norms.remove()
    model(torch.randn(4, 3)).sum().backward()
    assert norms.total() == 0.0


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=12
    )
    model = transformers.LlamaForCausalLM(config)
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8
    seen: list[tuple[int, dict[str, float]]] = []
    monitor = EarlyWarning(model, slow_every=1, writer=lambda step, values: seen.append((step, dict(values))))
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        max_grad_norm=1e-3,
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
    )
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[trainer_callback(monitor)]).train()
    assert [step for step, _ in seen] == [0, 1, 2]
    assert seen[-1][1]["gradient_norm"] > 0.01, "before it was clipped to a thousandth"
    assert {"logit_size", "update_size", "rank"} <= seen[-1][1].keys()
    assert not model.lm_head._forward_hooks


def test_an_evaluation_of_the_trainer_raises_no_alarm_of_the_loss() -> None:
    """The record of an evaluation has no training loss, and a loss is read once, not until the next log.

    The calls are those that transformers' Trainer makes, in its order.
    """
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    seen: dict[int, dict[str, float]] = {}
    monitor = EarlyWarning(model, writer=lambda step, values: seen.update({step: dict(values)}))
    callback = trainer_callback(monitor)
    state = SimpleNamespace(global_step=0, log_history=[])

    def log(**record: float) -> None:
        state.log_history.append(record)
        callback.on_log(None, state, None, logs=record)

    callback.on_train_begin(None, state, None, model=model)
    for step in range(40):
        model(torch.randn(4, 3)).square().mean().backward()
        callback.on_pre_optimizer_step(None, state, None)
        state.global_step = step + 1
        if step % 2:
            log(loss=1.0 + 0.01 * step)
        if step % 10 == 9:
            log(eval_loss=1.5)
    callback.on_train_end(None, state, None)
    assert [step for step, values in seen.items() if "loss" in values] == list(range(2, 40, 2))
    assert not [alarm for alarm in monitor.alarms if alarm.signal == "loss"]


def test_lightning_by_its_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning is no dependency: the calls are those that its Trainer makes, in its order."""
    monkeypatch.setattr(adapters, "_imported", lambda *names: object)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[int] = []
    callback = lightning_callback(EarlyWarning(model, writer=lambda step, values: seen.append(step)))
    trainer = SimpleNamespace(global_step=0)
    callback.on_fit_start(trainer, model)
    for trainer.global_step in range(3):
        loss = model(torch.randn(4, 3)).square().mean()
        callback.on_before_backward(trainer, model, loss)
        optimizer.zero_grad()
        loss.backward()
        callback.on_before_optimizer_step(trainer, model, SimpleNamespace(optimizer=optimizer))
        optimizer.step()
    callback.on_fit_end(trainer, model)
    assert seen == [0, 1, 2]


def test_what_is_not_installed_is_one_line() -> None:
    with refused(GeometryError, setting="package", given="no_such_package"):
        adapters._imported("no_such_package", "Callback", "nor_this_one")
