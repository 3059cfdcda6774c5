"""Broken trainings in small: each fault does what it says, and scores are made of what happened."""

import json

import pytest
import torch

import monitors
from monitors import Settings, Training, _damage, _score, bench_monitors, main, monitors_table, train
from topograd.errors import ConfigError
from topograd.geometry.monitors.early_warning import SIGNALS

FEW = Settings(seeds=1, steps=32, fault_at=24, rounds=0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(monitors, "_tokens", lambda: torch.randint(96, (3000,), generator=generator))
    monkeypatch.setattr(monitors, "ROWS", 4)


def test_every_fault_is_scored_for_every_signal() -> None:
    done: list[tuple[int, int]] = []
    found = bench_monitors(FEW, lambda *now: done.append(now))
    assert found["signals"].keys() == SIGNALS.keys()
    for row in found["signals"].values():
        assert {"lead", "false_alarms"} <= row.keys()
        assert row["detected_by_fault"].keys() == found["damage"].keys()
        assert row["false_alarms"] is not None
    assert len(found["damage"]) == 6
    assert done[-1] == (8, 8)


def test_a_training_before_its_fault_is_its_twin() -> None:
    tokens = monitors._tokens()
    calm = train(tokens, FEW, 0, None, narrow=False)
    broken = train(tokens, FEW, 0, "logits", narrow=False)
    assert broken.losses[: FEW.fault_at] == calm.losses[: FEW.fault_at]
    assert broken.losses[FEW.fault_at :] != calm.losses[FEW.fault_at :]


def test_leads_and_false_alarms_are_counted() -> None:
    calm = Training([1.0] * 32, {name: [5] for name in SIGNALS}, dict.fromkeys(SIGNALS, 50))
    worse = Training([1.0] * 28 + [2.0] * 4, {name: [3, 25] for name in SIGNALS}, dict.fromkeys(SIGNALS, 50))
    assert _damage(worse, calm, 24) == 28
    assert _damage(calm, calm, 24) is None
    row = _score("loss", {"logits": [(worse, 28)], "bad_batch": [(calm, None)]}, [calm], FEW)
    assert row["lead"] == 3, "the alarm at step 3 was before the fault"
    assert row["false_alarms"] == 20
    assert row["detected_by_fault"] == {"logits": 1.0, "bad_batch": 0.0}


def test_the_cost_is_a_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "COST_STEPS", 1)
    found = monitors.measure_cost(Settings(rounds=1, cost_rows=1))
    assert found["default"]["median"] > 0
    assert found["goal"] == 1.03


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="fault_at is 5"):
        Settings(fault_at=5)
    with pytest.raises(ConfigError, match="rounds is -1"):
        Settings(rounds=-1)


def test_as_json_and_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(FEW, json=True)
    found = json.loads(capsys.readouterr().out)
    assert {"loss", "gradient_norm", "rank", "anisotropy"} <= found["signals"].keys()
    assert monitors_table(found).row_count == len(found["signals"])
