"""Broken trainings in small: each fault does what it says, and scores are made of what happened."""

from typing import get_args

import numpy as np
import pytest
import torch

import monitors
from monitors import Fault, Rareness, Settings, Training, Window, judged, run_on, with_intervals
from topograd.errors import ConfigError
from topograd.geometry.monitors.early_warning import SIGNALS

TOKENS = torch.randint(96, (3000,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "_tokens", lambda: TOKENS)
    for name, value in (("ROWS", 4), ("FIRST", 24), ("WITHIN", 8), ("INTERVAL", 2), ("DRAWS", 4)):
        monkeypatch.setattr(monitors, name, value)


def test_every_signal_is_judged_and_every_fault_is_tried() -> None:
    done: list[tuple[int, int]] = []
    found = monitors.bench_monitors(Settings(seeds=1, steps=44, rounds=0), lambda *now: done.append(now))
    assert found["signals"].keys() == SIGNALS.keys()
    assert found["faults"].keys() == set(get_args(Fault))
    assert found["broken_windows"] == len(get_args(Fault))
    assert done[-1] == (11, 11)
    assert monitors.monitors_table(found).row_count == len(SIGNALS)


def test_a_training_is_taken_up_bit_for_bit_and_then_broken() -> None:
    calm = Training(0, narrow=False, kept={24: {}})
    run_on(calm, calm.monitored(), TOKENS, 32)
    again, monitor = calm.taken_up(24)
    run_on(again, monitor, TOKENS, 32)
    assert again.losses == {step: calm.losses[step] for step in range(24, 32)}
    assert again.readings == calm.readings
    for fault in ("logits", "fading_channels", "rate_creep", "label_drift"):
        broken, monitor = calm.taken_up(24)
        run_on(broken, monitor, TOKENS, 32, fault)
        assert broken.losses != again.losses, fault


def test_an_expansion_keeps_old_rows_and_adds_others() -> None:
    calm = Training(0, narrow=True, kept={4: {}})
    run_on(calm, calm.monitored(), TOKENS, 5)
    broken, monitor = calm.taken_up(4)
    before = broken.model.head.weight.detach().clone()
    run_on(broken, monitor, TOKENS, 5, "expansion")
    assert broken.model.head.weight.shape[0] == 2 * len(before)
    assert (broken.model.head.weight[: len(before)] - before).abs().max() < 0.02, "one step"


def window(seed: int, fault: str | None, score: float, other: float, early: float) -> Window:
    best = dict.fromkeys(SIGNALS, other) | {"gradient_norm": score}
    return Window(seed, fault, best, dict.fromkeys(SIGNALS, early))


def test_detection_is_at_an_equal_rate_of_false_alarms_and_gains_pay_for_theirs() -> None:
    draw = np.random.default_rng(0)
    calm = [window(i % 4, None, draw.normal(), draw.normal(), 0) for i in range(200)]
    broken = [window(i % 4, "logits", 9.0 if i < 20 else 0.0, 9.0 if i >= 20 else 0.0, -9) for i in range(40)]
    found = judged([*calm, *broken])
    assert found["gradient_norm"]["detected"] == 0.5
    assert found["gradient_norm"]["area"] == pytest.approx(0.75, abs=0.06)
    assert found["gradient_norm"]["early"] == 0, "only behind the damage"
    assert found["rank"]["gain_detected"] == 0.5, "it sees the other half"
    noise = [window(i % 4, "logits", draw.normal(), draw.normal(), -9) for i in range(200)]
    assert judged([*calm, *noise])["rank"]["gain_detected"] == pytest.approx(0, abs=0.06)
    rows = with_intervals([*calm, *broken], draws=20)["gradient_norm"]["detected"]
    assert rows["interval"][0] <= rows["value"] <= rows["interval"][1]
    assert Rareness(calm, "loss").area([-99.0]) == 0


def test_the_cost_is_a_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "COST_STEPS", 1)
    found = monitors.measure_cost(Settings(rounds=1, cost_rows=1))
    assert found["default"]["median"] > 0
    assert "critical_sharpness" in found["default"]["not_read"], "it is asked for with again="
    assert {"critical_sharpness", "rank", "anisotropy"}.isdisjoint(found["with_sharpness"]["not_read"])
    assert found["goal"] == 1.03


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="steps is 5"):
        Settings(steps=5)
    with pytest.raises(ConfigError, match="rounds is -1"):
        Settings(rounds=-1)
