"""Bootstrap intervals of accuracies over items.

    c_ik         1 where depth k answers item i, else 0; n items
    w            multinomial counts of n draws with replacement, the same for all depths
    accuracy*    Σ_i w_i c_ik / n, over DRAWS draws; the interval holds its middle 95 %

Items are drawn within each task, so CORE's interval is that of CORE with these tasks. Draws are shared by the
depths, and by two models that were asked the same items, so a difference is paired. The seed is fixed: equal
results have equal intervals. Cost: O(DRAWS · items). Source: Efron's percentile bootstrap. Limits: with few
items, or an accuracy of 0 or 1, the interval is too short; 0 of n has the interval [0, 0].
"""

from collections.abc import Sequence

import numpy as np

DRAWS = 1000
LEVEL = 0.95
_AT_ONCE = 50


def bootstrap_means(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """(DRAWS, depths) means of resampled values (items, depths)."""
    count = len(values)
    generator = np.random.default_rng([seed, count])
    shares = np.full(count, 1 / count)
    parts = [
        generator.multinomial(count, shares, size=min(_AT_ONCE, DRAWS - start)) @ values / count
        for start in range(0, DRAWS, _AT_ONCE)
    ]
    return np.concatenate(parts)


def percentiles(draws: np.ndarray) -> list[tuple[float, float]]:
    """The middle of the draws, for each depth."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]


def mean_interval(values: np.ndarray) -> list[tuple[float, float]]:
    """The interval of each depth's mean of values (items, depths)."""
    return percentiles(bootstrap_means(values))


def core_interval(tasks: Sequence[np.ndarray], chance: Sequence[float]) -> list[tuple[float, float]]:
    """The interval of the mean of centred accuracies; each task is resampled by itself."""
    centred = [
        (bootstrap_means(values, seed) - b) / (1 - b)
        for seed, (values, b) in enumerate(zip(tasks, chance, strict=True))
    ]
    return percentiles(np.mean(centred, axis=0))
