"""Stages over processes: against one process, against backprop over the same ones, and as the wire slows.

    python benchmarks/pipeline.py --out FOLDER

Runs `bench pipeline` on loopback with 2 and with 4 ranks, then with links of 10, 100 and 1000 Mbit/s and of
1 to 50 ms (root, for network namespaces), writes each result as JSON and the throughput against the bandwidth
as a figure. About ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pipeline_settings import PipelineSettings
from pipeline_ways import bench_pipeline
from scaling import wire_figure
from topograd.errors import ConfigError

WAYS = (
    *("staged", "staged-int8", "whole", "thin", "late", "thin-late", "thin-late-int8"),
    *("1f1b", "torch-gpipe", "torch-1f1b"),
)
"""Those that are measured on slow links."""
SETTINGS = {
    "loopback": PipelineSettings(),
    "four-ranks": PipelineSettings(ranks=4, rounds=3),
    "wire-10": PipelineSettings(mbit=10.0, rounds=2, ways=WAYS),
    "wire-100": PipelineSettings(mbit=100.0, rounds=3, ways=WAYS),
    "wire-1000": PipelineSettings(mbit=1000.0, rounds=3, ways=WAYS),
    "far-1": PipelineSettings(mbit=100.0, latency=1.0, rounds=2, ways=WAYS),
    "far-10": PipelineSettings(mbit=100.0, latency=10.0, rounds=2, ways=WAYS),
    "far-50": PipelineSettings(mbit=100.0, latency=50.0, rounds=2, ways=WAYS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    slow = []
    for name in asked.only:
        try:
            found = bench_pipeline(SETTINGS[name])
        except ConfigError as error:
            print(f"{name}: {error}")
            continue
        (asked.out / f"{name}.json").write_text(json.dumps(found, indent=1))
        if found["settings"]["mbit"] is not None and found["settings"]["latency"] is None:
            slow.append(found)
        for way, row in found["ways"].items():
            spread, said = row["spread"], found["simulated"].get(way)
            more = "" if said is None else f", simulated {100 * said['off']:+.0f} %"
            print(
                f"{name:10} {way:12} {row['throughput_ratio_vs_single']:.2f} "
                f"({spread['low']:.2f} to {spread['high']:.2f}) bubble {row['bubble']:.2f}{more}",
                flush=True,
            )
        for pair, spread in found["ratios"].items():
            print(f"{name:10} {pair:24} {spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})")
    if slow:
        wire_figure(sorted(slow, key=lambda one: one["settings"]["mbit"]), WAYS, asked.out / "wire.svg")


if __name__ == "__main__":
    main()
