"""Learning-rate schedule: warmup, stable, warmdown.

Statement. A run has N steps, t = 0, ..., N − 1. With W = warmup · N and D = warmdown · N (shares of the run,
not rounded) the learning rate is multiplied by

    (t + 1) / W                          while t + 1 < W            linear, above 0 from the first step
    1                                    in between
    f + (1 − f) (N − 1 − t) / D          while N − 1 − t < D        linear; the last step has exactly f

So D steps lie below 1 at the end, and W − 1 at the beginning. With f = 0 the last step changes nothing.
"""

from topograd.errors import ConfigError

_ROUNDING = 1e-9  # two shares such as 0.1 and 0.9 may add up to a little more than 1


def warmup_stable_warmdown(step: int, steps: int, warmup: float, warmdown: float, floor: float) -> float:
    """The multiplier of the learning rate at `step` of `steps`.

    >>> [warmup_stable_warmdown(t, 10, warmup=0.2, warmdown=0.5, floor=0.0) for t in range(10)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
    """
    _check(step, steps, warmup, warmdown, floor)
    rise, fall = warmup * steps, warmdown * steps
    done, left = step + 1, steps - 1 - step
    if left < fall:
        return floor + (1 - floor) * (left / fall)
    return min(1.0, done / rise) if rise > 0 else 1.0


def _check(step: int, steps: int, warmup: float, warmdown: float, floor: float) -> None:
    if steps < 1 or not 0 <= step < steps:
        raise ConfigError(setting="step", given=step, allowed=f"from 0 to {steps - 1}, of at least 1 step")
    for name, share in (("warmup", warmup), ("warmdown", warmdown), ("floor", floor)):
        if not 0 <= share <= 1:
            raise ConfigError(setting=name, given=share, allowed="a share in [0, 1]")
    if warmup + warmdown > 1 + _ROUNDING:
        raise ConfigError(
            setting="warmup", given=warmup, allowed=f"at most 1 together with warmdown, which is {warmdown}"
        )
