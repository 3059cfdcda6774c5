"""Arithmetic of the paper's own tables, where a claim is corrected by it alone."""

import pytest


def test_branch_weights_are_arithmetic_means_of_raw_logits() -> None:
    """§6.5.6: base 9.81, Stage 5 14.25; the published logit of the fact by weights (base, Stage 5)."""
    published = {(1, 1): 12.03, (1, 2): 12.77, (1, 3): 13.14, (2, 1): 11.29, (3, 1): 10.92}
    for (base, specialist), logit in published.items():
        mean = (base * 9.81 + specialist * 14.25) / (base + specialist)
        assert mean == pytest.approx(logit, abs=0.01)
        assert mean < 14.25, "no composition reaches the better branch"


def test_tokens_of_the_configurations() -> None:
    """§3.3: steps times the batch of 1,048,576 tokens, at r = 10 and r = 20."""
    ten, twenty = (steps * 1_048_576 for steps in (6_960, 26_430))
    assert ten / 1e9 == pytest.approx(7.3, abs=0.05)
    assert twenty / 1e9 == pytest.approx(27.7, abs=0.05)
    assert twenty / ten == pytest.approx(3.8, abs=0.05)


def test_the_gap_that_is_called_compression_widens() -> None:
    """Abstract: 6.0 % at r = 10; BP 0.676788 and PoE 0.720935 at r = 20."""
    gap = 100 * (0.720935 / 0.676788 - 1)
    assert gap == pytest.approx(6.52, abs=0.005)
    assert gap > 6.0
