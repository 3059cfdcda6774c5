"""The switch of `slow_links.py` without devices: frames arrive when their link and its latency let them."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest

from slow_links import BROADCAST, Switch

BITS = 8e6
"""A megabyte a second."""


@pytest.fixture
def ports() -> Iterator[tuple[list[int], list[int]]]:
    """What the switch writes to, and what reads it."""
    pairs = [os.pipe() for _ in range(3)]
    yield [write for _, write in pairs], [read for read, _ in pairs]
    for pair in pairs:
        for file in pair:
            os.close(file)


def frame(target: int | None, source: int, size: int) -> bytes:
    to = BROADCAST if target is None else struct.pack(">HI", 2, target)
    return (to + struct.pack(">HI", 2, source)).ljust(size, b"\0")


def test_frames_wait_for_those_before_them_and_arrive_a_latency_later(
    ports: tuple[list[int], list[int]],
) -> None:
    files, readers = ports
    switch = Switch(files, BITS / 1e6, latency=0.5)
    switch.take(files[1], frame(None, 1, 100), 0.0)  # says where 1 is
    assert switch.deliver(0.49) == pytest.approx(0.5001)
    switch.deliver(0.6)
    assert [len(os.read(readers[i], 9999)) for i in (0, 2)] == [100, 100]
    first, second = frame(1, 0, 1000), frame(1, 0, 2000)
    switch.take(files[0], first, 1.0)
    switch.take(files[0], second, 1.0)
    switch.take(files[1], frame(0, 1, 500), 1.0)  # the other way is another link
    assert switch.deliver(1.4) == pytest.approx(1.5005)
    assert switch.deliver(1.5006) == pytest.approx(1.501)
    assert len(os.read(readers[0], 9999)) == 500
    assert switch.deliver(1.5011) == pytest.approx(1.503)
    assert os.read(readers[1], 9999) == first
    switch.deliver(2.0)
    assert os.read(readers[1], 9999) == second
    assert not switch.waiting
