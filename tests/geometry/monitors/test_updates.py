"""Where the loss along an update is what it was before it."""

import pytest

from topograd.geometry.monitors.updates import critical_multiple


@pytest.mark.parametrize("curvature", [0.15, 0.5, 1.0, 3.0, 9.0])
def test_a_parabola_has_its_sharpness(curvature: float) -> None:
    """L = -s + c s²/2 along the update crosses at s = 2/c, interpolated between powers of two."""
    found = critical_multiple(lambda s: -s + curvature * s * s / 2)
    assert found == pytest.approx(2 / curvature, rel=0.2)


def test_no_crossing_and_no_number() -> None:
    assert critical_multiple(lambda s: -s) == 32.0
    assert critical_multiple(lambda s: s) == 1 / 32
    assert 1 <= critical_multiple(lambda s: -s if s < 1.7 else float("inf")) <= 2
