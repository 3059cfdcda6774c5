"""A switch in user space whose links have a bandwidth and a latency, for ranks in network namespaces.

    python benchmarks/slow_links.py MBIT MILLISECONDS NAMESPACE ...

Each namespace gets a network device of its own (TAP), called rank0, rank1 and so on. A frame that a device
sends waits until those before it have gone, takes its bits over the bandwidth, and arrives the latency later:
each direction of a link by itself. Nothing is lost. Prints "ready" when all devices are there, and runs until
its input closes. The kernel's own delay (`tc ... netem`) does the same, where it is compiled in.

Cost: some 30 µs of a processor for each frame of up to MTU bytes. Needs root.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
from heapq import heappop, heappush

TUNSETIFF = 0x400454CA
TAP_WITHOUT_HEADER = 0x1002
MTU = 9000
BROADCAST = b"\xff" * 6


def device(name: str, space: str) -> int:
    """The file of a new device in a namespace; its address is the caller's."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER))
    subprocess.run(["ip", "link", "set", name, "mtu", str(MTU), "netns", space], check=True)
    subprocess.run(["ip", "-n", space, "link", "set", name, "up"], check=True)
    return file


class Switch:
    """Frames between devices, each delivered at its time."""

    def __init__(self, files: list[int], mbit: float, latency: float) -> None:
        self.files, self.bits, self.latency = files, mbit * 1e6, latency
        self.places: dict[bytes, int] = {}
        self.free = dict.fromkeys(files, 0.0)
        self.waiting: list[tuple[float, int, int, bytes]] = []
        self.count = 0

    def take(self, file: int, frame: bytes, now: float) -> None:
        """A frame that a device sends."""
        target, source = frame[:6], frame[6:12]
        self.places[source] = file
        self.free[file] = max(self.free[file], now) + 8 * len(frame) / self.bits
        known = self.places.get(target) if target != BROADCAST else None
        for other in [known] if known is not None else [f for f in self.files if f != file]:
            self.count += 1
            heappush(self.waiting, (self.free[file] + self.latency, self.count, other, frame))

    def deliver(self, now: float) -> float:
        """Write what is due; the time of the next one."""
        while self.waiting and self.waiting[0][0] <= now:
            _, _, file, frame = heappop(self.waiting)
            os.write(file, frame)
        return self.waiting[0][0] if self.waiting else now + 1.0


def main(argv: list[str]) -> int:
    mbit, milliseconds, *spaces = argv
    files = [device(f"rank{rank}", space) for rank, space in enumerate(spaces)]
    switch = Switch(files, float(mbit), float(milliseconds) / 1000)
    print("ready", flush=True)
    with selectors.DefaultSelector() as ready:
        for file in [*files, sys.stdin.fileno()]:
            ready.register(file, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            for key, _ in ready.select(max(0.0, switch.deliver(now) - now)):
                if key.fd == sys.stdin.fileno():
                    return 0
                switch.take(key.fd, os.read(key.fd, MTU + 64), time.monotonic())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
