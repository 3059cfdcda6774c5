"""Where a scan over ranks is shorter than handing the adjoint on, by the event model of the package.

    python benchmarks/region_events.py [--rows 5.28]

prints the spans of scan and hybrid (with the best `carried`) over that of handing on, by ranks, micro-batches
and latency, with f = 20 ms, b = 42 ms and J = `rows` f (r = 8 by hand is 5.28), beside what the law
M r c < 2.1 (P - 1) says (`topograd/interfaces/region_events.py`).
"""

from __future__ import annotations

import argparse

import clone  # noqa: F401  (for what is not installed)
from topograd.interfaces.region_events import RegionTimes, plan_schedules


def ratios(ranks: int, microbatches: int, times: RegionTimes) -> tuple[float, float]:
    """The spans of the scan and of the best hybrid over that of handing on."""
    spans = {name: span for name, (span, _) in plan_schedules(ranks, microbatches, times, 0.0).items()}
    return spans["scan"] / spans["handed"], spans["hybrid"] / spans["handed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=float, default=5.28, help="J in forwards: r c")
    asked = parser.parse_args()
    print("ranks micro-batches law  scan/handed, hybrid/handed at 0.1, 5, 20, 50 ms")
    for ranks in (8, 16, 32, 64):
        for count in (1, 2, 4, 8, 16):
            cells = []
            for latency in (0.0001, 0.005, 0.02, 0.05):
                times = RegionTimes(forward=0.02, backward=0.042, jacobian=0.02 * asked.rows, latency=latency)
                cells.append("{:.2f} {:.2f}".format(*ratios(ranks, count, times)))
            law = "yes" if count * asked.rows < 2.1 * (ranks - 1) else "no"
            print(f"{ranks:5} {count:13} {law:4} {'   '.join(cells)}")


if __name__ == "__main__":
    main()
