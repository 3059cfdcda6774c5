"""Errors that a user can cause, with fields: setting, given, allowed, remedy.

The message is one line made from the fields: "steps is 0; it must be at least 1". Every class is also the
builtin that a caller would expect, so `except ValueError` works too. The command line prints the line, with
the flag in place of the setting, and exits with code 2.
"""

import os
from typing import Any

MAX_SHOWN = 60
"""Characters of a given value that a message repeats; a path is repeated whole."""


def shown(value: object) -> str:
    """`value` for an error message: on one line, and short."""
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


class TopogradError(Exception):
    """Base of every error that this package raises on purpose.

    `problem` says what is wrong where "SETTING is GIVEN" does not. A program reads the fields; a person reads
    `str(error)`.
    """

    def __init__(
        self, problem: str = "", *, setting: str = "", given: Any = None, allowed: str = "", remedy: str = ""
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.setting = setting
        """The setting, argument or field at fault, as Python names it; empty where there is none."""
        self.given = given
        self.allowed = allowed
        """What would be taken, as a phrase that follows "it must be"."""
        self.remedy = remedy

    def __str__(self) -> str:
        what = self.problem or f"{self.setting} is {shown(self.given)}"
        allowed = f"it must be {self.allowed}" if self.allowed else ""
        return "; ".join(filter(None, (what, allowed, self.remedy)))


class TopologyError(TopogradError, ValueError):
    """A composition, configuration or stage DAG that does not exist."""


class StackError(TopogradError, ValueError):
    """A model that does not keep the stack protocol, or does not fit a topology."""


class DataError(TopogradError, ValueError):
    """A corpus, tokenizer or shard that cannot be read, or is too small."""


class ConfigError(TopogradError, ValueError):
    """A setting outside its range, or settings that exclude one another."""


class RunError(TopogradError, ValueError):
    """A run's folder that is missing, foreign or in use."""


class CheckpointError(RunError):
    """A checkpoint that is truncated, foreign or does not fit the model."""


class GeometryError(TopogradError, ValueError):
    """A model, path or request that the theory of rates does not cover, or cannot read."""


class FieldError(TopogradError, ValueError):
    """A network or request that the theory of fields does not cover."""


class OptimError(TopogradError, ValueError):
    """A gauge that does not hold, or a request that an optimizer cannot keep."""


class DivergenceError(TopogradError, ArithmeticError):
    """A loss or gradient that is not finite; says at which step and stage."""


class ParallelError(TopogradError, RuntimeError):
    """Ranks that do not fit together, or one that is stalled or gone; says which."""
