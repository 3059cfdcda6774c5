"""Waiting for what must come: the deadline only turns a hang into a failure, however busy the machine is."""

import time
from collections.abc import Callable

LIMIT = 300.0
"""Seconds after which something counts as hung; far more than anything here takes, also beside others."""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Look again and again until a condition holds."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.005)
