"""Actions on alarms in broken trainings, in small: counts are those of the records."""

import pytest
import torch

import alarm_actions
from alarm_actions import Settings, end_of, measure, summary

TOKENS = torch.randint(96, (3000,), generator=torch.Generator().manual_seed(0))


def test_a_huge_batch_is_left_out() -> None:
    settings = Settings(seeds=1, steps=34, fault_at=28)
    calm, _ = end_of(TOKENS, settings, 0, None, "report")
    broken, reported = end_of(TOKENS, settings, 0, "huge_batch", "report")
    mended, acted = end_of(TOKENS, settings, 0, "huge_batch", "skip")
    assert reported >= 1
    assert acted >= 1
    assert abs(mended - calm) < abs(broken - calm)


def test_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {None: 1.0, "logits": 1.005, "bad_batch": 1.2}
    monkeypatch.setattr(alarm_actions, "_tokens", lambda: TOKENS)
    monkeypatch.setattr(
        alarm_actions,
        "end_of",
        lambda tokens, settings, seed, fault, action: (ends.get(fault, 9.0), 1),
    )
    results = summary(list(measure(Settings(seeds=2))))
    assert results["broken"] == 12
    assert results["mended"]["skip"] == 2
    assert results["by_fault"]["calm"]["rollback"] == 2
    assert results["by_fault"]["bad_batch"]["report"] == 0
