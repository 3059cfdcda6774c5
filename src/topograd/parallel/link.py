"""The TCP link between two independent stages: a store and a process group of its own.

The sending stage holds the store of the link. A receiver asks there to be joined, and names its first step;
then both ends make a process group of two. When one end dies the group is dropped, and the process that
returns joins again. No other link is affected: there is no global store and no global group.

    Sender     keeps the messages of the last `buffer` steps and sends those that the receiver asks for. It
               waits when a living receiver is `AHEAD` messages behind (a bounded queue), and not without one.
    Receiver   receives ahead of need, up to `AHEAD` messages, and reconnects when the other end returns.

Frames: a header of int64 (kind, step, batch, dtype, dimensions), then the tensor. An idle end sends a beat
every second, so silence for `timeout` seconds means a stalled process. Threads wait in torch.distributed,
which releases the interpreter lock.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from topograd.errors import ParallelError
from topograd.parallel.transport import DTYPES

AHEAD = 8
"""Messages that a sender may be ahead of a listener."""
BEAT, DATA, END = 0, 1, 2
_HEADER = 12
_BEAT_SECONDS = 1.0


@dataclass(frozen=True)
class Address:
    """Where the store of a link listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ParallelError(setting="links", given=text, allowed="HOST:PORT, such as 127.0.0.1:29800")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


Facts = Mapping[str, Any]
"""What both ends of a link must have alike."""


def difference(ours: Facts, theirs: Facts) -> str:
    """The first fact that differs, in words; '' if none does."""
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name)!r} here and {ours.get(name)!r} at the stage before it"
    return ""


def _group(store: dist.Store, number: int, rank: int, seconds: float) -> dist.ProcessGroup:
    prefix = dist.PrefixStore(f"link/{number}", store)
    group: dist.ProcessGroup = dist.ProcessGroupGloo(prefix, rank, 2, timedelta(seconds=seconds))  # type: ignore[assignment]
    return group


class Sender:
    """The sending end. `put` never waits for a listener that is dead."""

    def __init__(self, address: Address, facts: Facts, buffer: int, batches: int, timeout: float) -> None:
        self.address, self.buffer, self.batches, self.timeout = address, buffer, batches, timeout
        self.facts = facts
        try:
            self._store = dist.TCPStore(
                address.host,
                address.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout),
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ParallelError(
                f"link {address} cannot be opened ({reason})",
                setting="links",
                given=str(address),
                remedy="give another port",
            ) from None
        self._kept: OrderedDict[int, list[Tensor]] = OrderedDict()
        self._at: tuple[int, int] | None = None
        """The step and batch that the listener gets next; None while there is no listener."""
        self._ended = self._closed = False
        self.joins = 0
        self._answered = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait_for_listener(self, seconds: float) -> bool:
        """Whether a listener has come by then."""
        with self._changed:
            return self._changed.wait_for(lambda: self.joins > 0, seconds)

    def put(self, step: int, value: Tensor) -> None:
        """The next message of `step`."""
        with self._changed:
            if step not in self._kept and len(self._kept) >= self.buffer:
                oldest = next(iter(self._kept))
                self._changed.wait_for(lambda: self._at is None or self._closed or self._at[0] > oldest)
                self._kept.popitem(last=False)
            self._kept.setdefault(step, []).append(value.detach().cpu().contiguous())
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._at is None or self._closed or self._behind() <= AHEAD)

    def flush(self, seconds: float) -> bool:
        """Wait until a living listener has everything; False if it has not by then.

        A checkpoint of the sender is made behind this: what was sent before it is not sent again.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self._at is None or self._closed or self._behind() == 0, seconds
            )

    def _behind(self) -> int:
        """Messages that a listener has still to take."""
        assert self._at is not None
        step, batch = self._at
        return sum(len(kept) for s, kept in self._kept.items() if s >= step) - batch

    def close(self, patience: float) -> bool:
        """Send the end, wait until it is received, and stop; False if no receiver was there."""
        with self._changed:
            self._ended = patience > 0  # else a receiver finds the link gone, and waits for its return
            self._changed.notify_all()
            received = self._changed.wait_for(lambda: self._closed, patience)
            self._closed = True
        self._thread.join(timeout=2 * _BEAT_SECONDS)
        return received

    def _serve(self) -> None:
        while not self._closed:
            requests = range(self._answered, self._store.add("joins", 0))
            number = next((n for n in reversed(requests) if self._store.check([f"join/{n}"])), None)
            if number is None:
                time.sleep(0.02)
                continue
            self._answered = number + 1
            try:
                request = json.loads(self._store.get(f"join/{number}"))
                problem = difference(self.facts, request["facts"])
                self._store.set(f"answer/{number}", problem)
                if problem:
                    continue
                group = _group(self._store, number, 0, self.timeout)
            except RuntimeError:  # it went away while it was being joined
                continue
            with self._changed:
                self.joins += 1
                self._at = (request["from"], 0)
                self._changed.notify_all()
            with contextlib.suppress(RuntimeError):  # the listener is gone
                self._feed(group)
            with self._changed:
                self._at = None
                self._changed.notify_all()

    def _feed(self, group: dist.ProcessGroup) -> None:
        """Hand over messages, in order, until the end or until the listener is gone."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._take() is not None or (self._ended and self._exhausted()),
                    _BEAT_SECONDS,
                )
                item = self._take()
                done = item is None and self._ended and self._exhausted()
                quit_ = self._closed
            if quit_:
                return
            header = torch.zeros(_HEADER, dtype=torch.int64)
            if item is None:
                header[0] = END if done else BEAT
                _send(group, header)
                if done:
                    with self._changed:
                        self._closed = True
                        self._changed.notify_all()
                    return
                continue
            step, batch, value = item
            about = [DATA, step, batch, DTYPES.index(value.dtype), value.dim(), *value.shape]
            header[: len(about)] = torch.tensor(about)
            _send(group, header)
            _send(group, value)
            with self._changed:
                self._at = (step, batch + 1) if batch + 1 < self.batches else (step + 1, 0)
                self._changed.notify_all()

    def _take(self) -> tuple[int, int, Tensor] | None:
        """What goes next; steps that are no longer kept, or were never sent, are passed over."""
        if self._at is None:
            return None
        step, batch = self._at
        # Steps are put in order: one that is missing below a kept one will not come (its stage missed it).
        following = next((kept for kept in self._kept if kept >= step), None)
        if following is None:
            return None
        if following > step:
            step, batch = self._at = (following, 0)
        kept = self._kept[step]
        return (step, batch, kept[batch]) if batch < len(kept) else None

    def _exhausted(self) -> bool:
        return self._at is None or not self._kept or self._at[0] > next(reversed(self._kept))


def _send(group: dist.ProcessGroup, tensor: Tensor) -> None:
    group.send([tensor], 1, 0).wait()


@dataclass(frozen=True)
class Arrived:
    """All messages of one step."""

    step: int
    values: list[Tensor]


class Receiver:
    """The receiving end. It wants the steps from `first` on, and asks for them anew when it was cut off."""

    def __init__(self, address: Address, facts: Facts, first: int, batches: int, timeout: float) -> None:
        self.address, self.batches, self.timeout = address, batches, timeout
        self.facts = facts
        self.problem = ""
        """Why the other end does not want this one."""
        self._next = first
        self._arrived: deque[Arrived] = deque()
        self._ended = self._closed = False
        self.connected = False
        self.lost = 0
        """How often the other end was lost."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def take(self, seconds: float) -> Arrived | None:
        """The next step's messages; None if they do not come within `seconds`, or nothing comes any more."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._arrived) or self._ended, seconds)
            if not self._arrived:
                return None
            arrived = self._arrived.popleft()
            self._changed.notify_all()
            return arrived

    @property
    def ended(self) -> bool:
        """Whether everything has been taken and nothing will come."""
        with self._changed:
            return self._ended and not self._arrived

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=2 * _BEAT_SECONDS)

    def _listen(self) -> None:
        while not self._closed and not self._ended:
            try:
                group = self._join()
            except RuntimeError:  # the sender is not there yet
                time.sleep(0.05)
                continue
            if group is None:
                return
            self.connected = True
            try:
                self._receive(group)
            except RuntimeError:  # gone
                with self._changed:
                    self.connected = False
                    self.lost += 1
                    self._changed.notify_all()

    def _join(self) -> dist.ProcessGroup | None:
        """Ask the sending end for a process group of the two; None if it refuses."""
        short = timedelta(seconds=min(self.timeout, 2.0))
        store = dist.TCPStore(self.address.host, self.address.port, is_master=False, timeout=short)
        number = store.add("joins", 1) - 1
        store.set(f"join/{number}", json.dumps({"from": self._next, "facts": self.facts}))
        problem = store.get(f"answer/{number}").decode()
        if problem:
            with self._changed:
                self.problem, self._ended = problem, True
                self._changed.notify_all()
            return None
        return _group(store, number, 1, self.timeout)

    def _receive(self, group: dist.ProcessGroup) -> None:
        values: list[Tensor] = []
        limit, room = timedelta(seconds=self.timeout), max(2, AHEAD // self.batches)
        while not self._closed:
            header = torch.zeros(_HEADER, dtype=torch.int64)
            group.recv([header], 0, 0).wait(limit)
            kind, step, batch, dtype, dims, *sizes = header.tolist()
            if kind == END:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                return
            if kind == BEAT:
                continue
            value = torch.empty(sizes[:dims], dtype=DTYPES[dtype])
            group.recv([value], 0, 0).wait(limit)
            values = [value] if batch == 0 else [*values, value]
            if len(values) == self.batches:
                with self._changed:
                    self._arrived.append(Arrived(step, values))
                    self._next = step + 1
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: len(self._arrived) < room or self._closed)
