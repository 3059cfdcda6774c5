"""One link: order, a bounded queue, what is kept for those who return, and an end."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raising import refused
from topograd.errors import ParallelError
from topograd.parallel.link import AHEAD, Address, Receiver, Sender, difference
from waiting import wait_until

SECONDS = 60.0
"""What may take a moment on a busy machine; nothing here waits for so long."""


@pytest.fixture
def address(free_port: Any) -> Iterator[Address]:
    with free_port() as held:
        yield Address("127.0.0.1", held.getsockname()[1])


@pytest.fixture
def sender(address: Address) -> Iterator[Sender]:
    made = Sender(address, {"seed": 1}, buffer=4, batches=2, timeout=SECONDS)
    yield made
    made.close(0)


def put(sender: Sender, steps: range) -> None:
    for step in steps:
        for batch in range(2):
            sender.put(step, torch.full((3,), 10.0 * step + batch))


def test_messages_come_in_order_and_end(sender: Sender, address: Address) -> None:
    receiver = Receiver(address, {"seed": 1}, first=1, batches=2, timeout=SECONDS)
    assert sender.wait_for_listener(SECONDS)
    put(sender, range(1, 4))
    for step in (1, 2, 3):
        arrived = receiver.take(SECONDS)
        assert arrived is not None
        assert arrived.step == step
        assert [float(v[0]) for v in arrived.values] == [10.0 * step, 10.0 * step + 1]
    assert sender.close(SECONDS)
    assert receiver.take(SECONDS) is None
    assert receiver.ended
    receiver.close()


def test_nobody_is_waited_for_when_nobody_is_there_and_the_last_steps_are_kept(
    sender: Sender, address: Address
) -> None:
    put(sender, range(1, 20))  # returns, though nobody listens
    late = Receiver(address, {"seed": 1}, first=3, batches=2, timeout=SECONDS)
    arrived = late.take(SECONDS)
    assert arrived is not None
    assert arrived.step == 16  # of 4 that are kept
    late.close()


def test_one_that_returns_gets_the_steps_that_it_asks_for(sender: Sender, address: Address) -> None:
    put(sender, range(1, 5))
    for first in (3, 4):
        receiver = Receiver(address, {"seed": 1}, first=first, batches=2, timeout=SECONDS)
        arrived = receiver.take(SECONDS)
        assert arrived is not None
        assert arrived.step == first
        receiver.close()


def test_a_step_that_was_never_sent_is_passed_over(sender: Sender, address: Address) -> None:
    """A stage that missed a step never sends it, and its listener must not wait for it."""
    receiver = Receiver(address, {"seed": 1}, first=1, batches=2, timeout=SECONDS)
    assert sender.wait_for_listener(SECONDS)
    put(sender, range(1, 3))
    assert sender.flush(SECONDS)  # the listener now wants step 3
    put(sender, range(4, 8))
    steps = [receiver.take(SECONDS) for _ in range(6)]
    assert [arrived and arrived.step for arrived in steps] == [1, 2, 4, 5, 6, 7]
    receiver.close()


def test_a_flush_waits_for_a_listener_that_lives(sender: Sender, address: Address) -> None:
    assert sender.flush(0.0)  # nobody is there
    receiver = Receiver(address, {"seed": 1}, first=1, batches=2, timeout=SECONDS)
    assert sender.wait_for_listener(SECONDS)
    thread = threading.Thread(target=put, args=(sender, range(1, 9)), daemon=True)
    thread.start()
    wait_until(lambda: sender._behind() > 0 and len(receiver._arrived) == AHEAD // 2, "both queues are full")
    assert not sender.flush(0.01)
    for _ in range(8):
        assert receiver.take(SECONDS) is not None
    thread.join(SECONDS)
    assert sender.flush(SECONDS)
    receiver.close()


def test_a_listener_that_does_not_take_holds_the_sender(sender: Sender, address: Address) -> None:
    receiver = Receiver(address, {"seed": 1}, first=1, batches=2, timeout=SECONDS)
    assert sender.wait_for_listener(SECONDS)
    thread = threading.Thread(target=put, args=(sender, range(1, 100)), daemon=True)
    thread.start()

    def held() -> bool:
        """Both queues are full: nothing moves any more before something is taken."""
        with receiver._changed, sender._changed:
            full = len(receiver._arrived) == AHEAD // 2 and len(sender._kept) == sender.buffer
            return full and sender._at == (next(iter(sender._kept)), 0)

    wait_until(held, "the thread is held")
    assert thread.is_alive()
    assert max(sender._kept) == AHEAD // 2 + sender.buffer, "what was heard, and what is kept"
    assert receiver.take(SECONDS) is not None
    wait_until(lambda: max(sender._kept) > AHEAD // 2 + sender.buffer, "one more step")
    wait_until(held, "the thread is held again")
    receiver.close()
    thread.join(SECONDS)
    assert not thread.is_alive()  # with the listener gone it goes on


def test_ends_that_differ_are_told_in_what(sender: Sender, address: Address) -> None:
    receiver = Receiver(address, {"seed": 2}, first=1, batches=2, timeout=SECONDS)
    assert receiver.take(SECONDS) is None
    assert receiver.problem == "seed is 2 here and 1 at the stage before it"
    assert difference({"a": 1}, {"a": 1}) == ""
    receiver.close()


@pytest.mark.parametrize("text", ["", "host", "host:", ":99", "host:0", "host:port", "host:70000"])
def test_an_address_has_a_host_and_a_port(text: str) -> None:
    with refused(ParallelError, setting="links"):
        Address.parse(text)
    assert str(Address.parse("a.b:99")) == "a.b:99"
