"""Transparent huge pages for weights, where the system has them.

A token reads all weights once, so the processor looks up the place of every page: of 2 MB there are 512 times
fewer than of 4 KB. On Linux, memory that is there already can be collected into such pages (`MADV_COLLAPSE`,
Linux 6.1): a copy, a second for a gigabyte, which pays after some tokens. So it is done for memory that has
proved to be used, in a thread of its own. Elsewhere nothing happens; results are the same bits.

    before = anonymous()                    where memory lies that is no file's
    ...                                     something takes memory for weights
    collect(added(anonymous(), before))     what is new goes to large pages, in a thread

Limits: what other threads took meanwhile is collected too. Measured: `benchmarks/llama_cpp.py`, docs/results.
"""

import ctypes
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

Span = tuple[int, int]
LARGE = 1 << 21
_MAPS = Path("/proc/self/maps")
_COLLAPSE = 25
_worker: ThreadPoolExecutor | None = None


def anonymous() -> list[Span]:
    """Spans of addresses that can be written and are no file's, in order; none where that is unknown."""
    if sys.platform != "linux" or not _MAPS.exists():
        return []
    spans = []
    for line in _MAPS.read_text().splitlines():
        parts = line.split()
        if parts[1] == "rw-p" and len(parts) == 5:
            low, high = (int(part, 16) for part in parts[0].split("-"))
            spans.append((low, high))
    return spans


def added(now: Sequence[Span], before: Sequence[Span]) -> list[Span]:
    """The parts of `now` that `before` has not, in whole large pages."""
    spans = []
    for start, stop in now:
        for low, high in sorted(before):
            if high <= start or low >= stop:
                continue
            if low > start:
                spans.append((start, low))
            start = max(start, high)
        if start < stop:
            spans.append((start, stop))
    whole = [(-(-start // LARGE) * LARGE, stop // LARGE * LARGE) for start, stop in spans]
    return [(start, stop) for start, stop in whole if start < stop]


def collect(spans: Sequence[Span]) -> Future[int]:
    """Collect spans of whole large pages, in a thread of its own; the result is how many bytes were."""
    global _worker
    if _worker is None:
        _worker = ThreadPoolExecutor(1, thread_name_prefix="large-pages")
    return _worker.submit(_collapse, list(spans))


def _collapse(spans: list[Span]) -> int:
    advise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    if advise is None:
        return 0
    done = 0
    for start, stop in spans:
        for place in range(start, stop, LARGE):  # one by one: a hole, or memory given back, ends nothing
            if not advise(ctypes.c_void_p(place), ctypes.c_size_t(LARGE), _COLLAPSE):
                done += LARGE
    return done
