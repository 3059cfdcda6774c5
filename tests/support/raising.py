"""`refused`: an expected error of this package, checked by its fields and not by its prose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from topograd.errors import TopogradError


@contextmanager
def refused(kind: type[BaseException], **fields: Any) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error of `kind` whose fields (setting, given, allowed, remedy) have these values."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert isinstance(error, TopogradError), repr(error)
    assert "\n" not in str(error), "an error is one line"
    assert {name: getattr(error, name) for name in fields} == fields, str(error)
