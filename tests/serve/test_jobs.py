"""A job's own state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_a_new_job(make_desk: Callable[..., Any]) -> None:
    desk = make_desk()
    first, second = desk.job([1, 2], 3), desk.job([1], 1)
    assert first.number < second.number
    assert (first.remaining, first.prompt_pos, first.scores, first.cancelled) == (3, 0, [None], False)
