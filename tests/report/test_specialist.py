"""The report of a specialist: every number of its checkpoints, and a plain word where the base moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from topograd.report.specialist import checkpoints, write_specialist_report

SETTINGS = {"layers": 2, "head_rank": 16, "steps": 4, "first_layer": 30}


def reading(step: int, delta: float = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "kind": "preservation",
        "step": step,
        "base_max_abs_logit_delta": delta,
        "base_bit_identical": delta == 0.0,
        "base_bpb": 0.8898,
        "base_choices": 0.917,
        "bpb": 0.8898 + step / 10,
        "choices": 0.9,
        **more,
    }


def losses(count: int) -> list[dict[str, Any]]:
    return [{"kind": "train", "step": k + 1, "loss": 3.0 / (k + 1)} for k in range(count)]


def test_the_page_has_every_checkpoint(tmp_path: Path) -> None:
    tasks: dict[str, Any] = {"base_tasks": {"copa": 0.62}, "tasks": {"copa": 0.58}}
    records = [reading(0, **tasks), *losses(4), reading(4, **tasks)]
    page = write_specialist_report(tmp_path / "report.html", "<chat>", SETTINGS, "smollm2", records)
    text = page.read_text()
    assert "&lt;chat&gt;: a specialist" in text
    assert "At all 2 checkpoints the base&#x27;s logits on the probe set had the same bits" in text
    for number in ("0.0000", "0.8898", "1.2898", "0.620", "0.580", "0.750"):
        assert f">{number}<" in text
    assert {p.stem for p in (tmp_path / "figures").glob("*.svg")} == {"loss", "base", "tasks"}
    assert "<script" not in text


def test_a_base_that_moved_is_said_to(tmp_path: Path) -> None:
    records = [reading(0), reading(2, delta=1.25)]
    text = write_specialist_report(
        tmp_path / "r.html", "s", SETTINGS | {"head_rank": None}, "b", records
    ).read_text()
    assert "logits had changed at 1 of 2 checkpoints" in text
    assert "a whole head" in text
    assert "it was not trained" in text
    assert checkpoints(records).rows[1][:2] == ("2", "1.2500")
    assert len(checkpoints(records).header) == 6, "no tasks were asked"
