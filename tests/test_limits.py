"""Numbers from outside: what passes, and the line for what does not."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from papers.limits import MAX_NUMBERS, check_total
from raising import refused
from topograd.errors import ConfigError
from topograd.limits import SEED, check_numbers


@pytest.mark.parametrize("value", [None, 0, 1, 2**63 - 1])
def test_what_is_within_passes(value: Any) -> None:
    check_numbers(SimpleNamespace(seed=value), seed=SEED)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-1, "seed is -1; it must be at least 0"),
        (2**63, f"seed is {2**63}; it must be at most {2**63 - 1}"),
        (math.nan, "seed is nan; it must be at least 0"),
        (math.inf, f"seed is inf; it must be at most {2**63 - 1}"),
    ],
)
def test_what_is_not_is_one_line(value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_numbers(SimpleNamespace(seed=value), seed=SEED)
    assert str(caught.value) == said


def test_the_total_has_a_bound() -> None:
    check_total(MAX_NUMBERS, "width")
    with refused(ConfigError, setting="width", given=4294967297):
        check_total(MAX_NUMBERS + 1, "width")
