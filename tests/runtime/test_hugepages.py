"""Which memory is new, and that collecting it keeps what it holds."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest

from topograd.runtime.hugepages import LARGE, added, anonymous, collect


def test_what_was_not_there_before() -> None:
    before = [(4, 6), (10, 12)]
    now = [(2, 8), (10, 12), (20, 22)]
    big = [[(a * LARGE, b * LARGE) for a, b in spans] for spans in (now, before)]
    assert added(*big) == [(a * LARGE, b * LARGE) for a, b in ((2, 4), (6, 8), (20, 22))]
    assert added([(1, 2 * LARGE - 1)], []) == [], "no whole page"
    assert added([(1, 3 * LARGE - 1)], []) == [(LARGE, 2 * LARGE)]
    assert added(big[1], big[0]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says where memory lies")
def test_memory_that_is_collected_holds_what_it_held() -> None:
    before = anonymous()
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, 8 * LARGE, flags=private)  # an array of numpy might lie in memory that was free
    values = np.frombuffer(memory, np.float64)
    values[:] = np.arange(LARGE)
    address = values.ctypes.data
    new = added(anonymous(), before)
    assert any(start < address + values.nbytes and stop > address for start, stop in new)
    assert collect(new).result() >= 0  # 0 on a system that has no large pages
    assert (values == np.arange(LARGE)).all()
    assert collect([]).result() == 0
