"""Errors: the line is made from the fields, and they survive a pickle between processes."""

import pickle
from pathlib import Path

import pytest

from topograd.errors import ConfigError, TopogradError, shown


def test_the_line_is_made_from_the_fields() -> None:
    error = ConfigError(setting="steps", given=0, allowed="at least 1", remedy="give more")
    assert str(error) == "steps is 0; it must be at least 1; give more"
    assert str(ConfigError("the disk is full", remedy="make room")) == "the disk is full; make room"
    with pytest.raises(ValueError, match="steps is 0"):
        raise error


def test_a_given_value_is_one_short_line() -> None:
    assert shown("a\nb") == repr("a\nb")
    assert len(shown("x" * 5000)) == 60
    assert shown(10**5000) == "a number of thousands of digits"
    path = Path("/" + "long/" * 50)
    assert shown(path) == repr(str(path)), "a path is repeated whole"


def test_fields_survive_a_pickle() -> None:
    error = ConfigError("bad", setting="steps", given=0, allowed="at least 1", remedy="give more")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, TopogradError)
    assert (vars(again), str(again)) == (vars(error), str(error))
