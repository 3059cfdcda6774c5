"""Counters of a server, in Prometheus' text format (version 0.0.4)."""

import sys
import threading
import traceback
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """How many observations are at most each bound."""

    def __init__(self, bounds: Sequence[float] = BUCKETS) -> None:
        self.bounds, self.counts = bounds, [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> list[str]:
        lines, below = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            below += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*lines, f"{name}_sum {self.total}", f"{name}_count {below}"]


class Counters:
    """What happened so far; written by the scheduler's thread and by the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests: Counter[tuple[str, int]] = Counter()
        self.finishes: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.first_token, self.steps = Histogram(), Histogram()

    def request(self, route: str, status: int) -> None:
        with self._lock:
            self.requests[route, status] += 1

    def admitted(self, prompt: int, cached: int) -> None:
        with self._lock:
            self.totals["prompt_tokens"] += prompt
            self.totals["cached_prompt_tokens"] += cached

    def written(self, tokens: int) -> None:
        with self._lock:
            self.totals["generated_tokens"] += tokens

    def first(self, seconds: float) -> None:
        with self._lock:
            self.first_token.add(seconds)

    def step(self, seconds: float, rows: int) -> None:
        with self._lock:
            self.steps.add(seconds)
            self.totals["row_steps"] += rows

    def finished(self, how: str, drafted: int, accepted: int) -> None:
        with self._lock:
            self.finishes[how] += 1
            self.totals["drafted_tokens"] += drafted
            self.totals["accepted_draft_tokens"] += accepted

    def failed(self, error: BaseException) -> None:
        """A bug: the log gets its trace, the client does not."""
        with self._lock:
            self.totals["internal_errors"] += 1
        traceback.print_exception(error, file=sys.stderr)

    def text(self, running: int, waiting: int) -> str:
        """Everything, as Prometheus reads it."""
        with self._lock:
            lines = ["# TYPE topograd_requests_total counter"]
            lines += [
                f'topograd_requests_total{{route="{route}",status="{status}"}} {count}'
                for (route, status), count in sorted(self.requests.items())
            ]
            lines += ["# TYPE topograd_texts_total counter"]
            lines += [f'topograd_texts_total{{finish="{k}"}} {n}' for k, n in sorted(self.finishes.items())]
            names = ("prompt_tokens", "cached_prompt_tokens", "generated_tokens", "row_steps")
            for name in (*names, "drafted_tokens", "accepted_draft_tokens", "internal_errors"):
                lines += [
                    f"# TYPE topograd_{name}_total counter",
                    f"topograd_{name}_total {self.totals[name]}",
                ]
            for name, value in (("running", running), ("waiting", waiting)):
                lines += [f"# TYPE topograd_texts_{name} gauge", f"topograd_texts_{name} {value}"]
            for name, each in (("first_token", self.first_token), ("step", self.steps)):
                lines += [
                    f"# TYPE topograd_{name}_seconds histogram",
                    *each.lines(f"topograd_{name}_seconds"),
                ]
        return "\n".join(lines) + "\n"
