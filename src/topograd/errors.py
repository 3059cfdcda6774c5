"""Errors that a user can cause. Each message is one line: what was given, what is allowed, what to do.

Every class is also the builtin that a caller would expect, so `except ValueError` works too. The command
line prints the line and exits with code 2.
"""


class TopogradError(Exception):
    """Base of every error that this package raises on purpose."""


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
