"""A bound on what a study or a benchmark holds in memory."""

from __future__ import annotations

from topograd.errors import ConfigError

MAX_NUMBERS = 2**32
"""Numbers that are held at once: 16 GiB in float32."""


def check_total(numbers: int, choices: str) -> None:  # doctest: +ELLIPSIS
    """Raise ConfigError for more numbers in memory than a machine has; smaller `choices` would help.

    >>> check_total(2**40, "width or depth")
    Traceback (most recent call last):
        ...
    topograd.errors.ConfigError: this needs about 1.1e+12 numbers in memory, and at most 4.3e+09 ...
    """
    if numbers > MAX_NUMBERS:
        raise ConfigError(
            f"this needs about {numbers:.1e} numbers in memory, and at most {MAX_NUMBERS:.1e} are allowed",
            setting=choices,
            given=numbers,
            remedy=f"choose a smaller {choices}",
        )
