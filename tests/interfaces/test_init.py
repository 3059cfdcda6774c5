"""The public names of `topograd.interfaces`."""

import pytest

from topograd import interfaces


def test_every_public_name_is_there() -> None:
    for name in interfaces.__all__:
        assert getattr(interfaces, name).__name__ == name
    assert dir(interfaces) == interfaces.__all__
    with pytest.raises(AttributeError, match=r"'topograd.interfaces' has no attribute 'forward'"):
        getattr(interfaces, "forward")  # noqa: B009 (mypy knows that it is not there)
