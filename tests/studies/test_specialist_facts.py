"""The study of specialists and facts in its smallest form."""

from __future__ import annotations

import pytest

from topograd.studies import specialist_facts
from topograd.studies.outcome import Result, asked


@pytest.fixture(scope="module")
def found() -> Result:
    return specialist_facts.run(asked("specialists", "tiny"))


def test_the_base_is_preserved_and_the_control_is_not(found: Result) -> None:
    rows = [row for row in found.rows if row["what"] == "preservation"]
    dual = [row["base_max_abs_logit_delta"] for row in rows if row["model"].startswith("dual")]
    single = [row["base_max_abs_logit_delta"] for row in rows if row["model"].startswith("single")]
    assert dual == [0.0] * 6
    assert single[-1] > 0
    assert found.drawing is not None
    assert len(found.drawing.series) == 3


def test_every_question_has_its_table(found: Result) -> None:
    assert len(found.tables) == 6, "all but the fifty prompts, which want a larger base"
    assert all(len(row) == len(table.header) for table in found.tables for row in table.rows)
    assert len(found.findings) == 2
