"""Bounds of numeric settings, and their checks.

A dataclass of settings calls `check_numbers(self, ...)` in its `__post_init__`. Upper bounds are far above
useful values and below what a machine can hold: a digit too many raises at once, and nothing is allocated.
"""

from collections.abc import Iterable

from topograd.errors import ConfigError, TopogradError

MUST_EXIST = "must exist"
"""Mark of a setting, in `Annotated`, that names a file or folder to read; a flag is checked at once."""
Bounds = tuple[float, float]
SEED: Bounds = (0, 2**63 - 1)
"""Seeds that torch, numpy and random all take."""
REPEATS: Bounds = (1, 10**9)
"""Repetitions."""
BYTES: Bounds = (1, 2**40)
"""Bytes of text."""
DEPTH: Bounds = (1, 10**4)
"""Layers."""
SIZE: Bounds = (1, 2**24)
"""One side of a tensor: a width, a batch, a vocabulary."""


def check_numbers(settings: object, **bounds: Bounds) -> None:
    """Raise ConfigError for numbers outside their bounds, the ends allowed. None passes.

    >>> from types import SimpleNamespace
    >>> check_numbers(SimpleNamespace(depth=3, seed=None), depth=DEPTH, seed=SEED)
    >>> check_numbers(SimpleNamespace(depth=0), depth=DEPTH)
    Traceback (most recent call last):
        ...
    topograd.errors.ConfigError: depth is 0; it must be at least 1
    """
    for name, (least, most) in bounds.items():
        value = getattr(settings, name)
        if value is not None and not least <= value <= most:
            allowed = f"at most {most}" if value > most else f"at least {least}"  # NaN is neither
            raise ConfigError(setting=name, given=value, allowed=allowed)


def check_rules(
    settings: object, error: type[TopogradError] = ConfigError, /, **rules: tuple[bool, str]
) -> None:
    """Raise an error for the first setting whose rule (holds, allowed) does not hold.

    >>> from types import SimpleNamespace
    >>> check_rules(SimpleNamespace(share=2.0), share=(False, "in [0, 1]"))
    Traceback (most recent call last):
        ...
    topograd.errors.ConfigError: share is 2.0; it must be in [0, 1]
    """
    for name, (holds, allowed) in rules.items():
        if not holds:
            raise error(setting=name, given=getattr(settings, name), allowed=allowed)


def changed(settings: object, names: Iterable[str]) -> list[str]:
    """Those of the settings of a dataclass that do not have their default."""
    known = type(settings).__dataclass_fields__  # type: ignore[attr-defined]
    return [name for name in names if getattr(settings, name) != known[name].default]


def check_exclusive(settings: object, first: str, *others: str, remedy: str = "give one of them") -> None:
    """Raise ConfigError where `first` and one of the others are both given."""
    for other in others:
        if getattr(settings, first) and getattr(settings, other):
            raise ConfigError(
                f"{first} and {other} are both given",
                setting=first,
                given=getattr(settings, first),
                remedy=remedy,
            )
