"""Intervals cover what they should, and shrink as they should."""

from __future__ import annotations

import numpy as np
import pytest

from topograd.evaluation.intervals import bootstrap_means, core_interval, mean_interval


def test_the_bootstrap_of_zeros_and_ones_is_binomial() -> None:
    values = np.zeros((400, 1))
    values[:100] = 1
    means = bootstrap_means(values)[:, 0]
    assert means.mean() == pytest.approx(0.25, abs=0.003)
    assert means.std() == pytest.approx((0.25 * 0.75 / 400) ** 0.5, rel=0.1)
    [(low, high)] = mean_interval(values)
    assert (low, high) == pytest.approx((0.25 - 1.96 * 0.02165, 0.25 + 1.96 * 0.02165), abs=0.006)


def test_depths_share_their_draws() -> None:
    first = np.random.default_rng(0).integers(0, 2, (50, 1)).astype(float)
    both = np.concatenate([first, first, 1 - first], axis=1)
    draws = bootstrap_means(both)
    assert np.array_equal(draws[:, 0], draws[:, 1])
    np.testing.assert_allclose(draws[:, 0] + draws[:, 2], 1)
    assert np.array_equal(draws, bootstrap_means(both)), "the seed is fixed"


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    generator = np.random.default_rng(1)
    samples = (generator.random((60, 80, 1)) < 0.6).astype(float)
    held = sum(low <= 0.6 <= high for sample in samples for low, high in mean_interval(sample))
    assert 52 <= held <= 60


def test_the_interval_of_core_is_that_of_the_centred_mean() -> None:
    certain, even = np.ones((40, 1)), np.tile([[0.0], [1.0]], (50, 1))
    [(low, high)] = core_interval([certain, even], [0.0, 0.5])
    assert low < 0.5 < high
    assert high - low == pytest.approx(2 * 1.96 * 0.05 / 0.5 / 2, rel=0.15)
