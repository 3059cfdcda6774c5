"""What a step takes on many ranks, by every way of spreading it, without the ranks.

python benchmarks/simulate.py [--ranks 1024] [--bench FILE.json] [--figure FILE.svg] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from simulator import METHODS, Machine, Times, Work, simulate
from topograd.cli.console import Json, note, number, out, parse, print_json
from topograd.errors import ConfigError, TopogradError
from topograd.files import read_json


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Step time, bubbles, memory, bytes and goodput of backprop pipelines, stages, the scan and replicas."""

    ranks: int = 1024
    """P: the most ranks; 1, 2, 4, ... up to it are simulated."""
    bench: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """What `bench pipeline --json` printed: times and sizes are taken from it instead of the flags."""
    microbatches: int = Work.microbatches
    """M: micro-batches of a step."""
    message: float = Work.message
    """Bytes of activations of one micro-batch at a boundary."""
    thin: float = Work.thin
    """Bytes of their gradient in few bits."""
    shared: float = Work.shared
    """Bytes of parameters that all stages read; 0 without an x0 bus."""
    head_bytes: float = Work.head
    """Bytes of the head."""
    stage: float = Work.stage
    """Bytes of parameters of a stage."""
    interface_rank: int = Work.interface_rank
    """r, of bounded interfaces."""
    interface_bytes: float = Work.interface_bytes
    """Bytes of their messages, of one micro-batch."""
    interface_samples: int = Work.interface_samples
    """Sequences of a micro-batch."""
    times: Annotated[Times, tyro.conf.arg(name="")] = field(default_factory=Times)
    machine: Annotated[Machine, tyro.conf.arg(name="")] = field(default_factory=Machine)
    figure: Annotated[Path | None, tyro.conf.arg(metavar="FILE.svg")] = None
    """Draw throughput, bubbles and goodput against the number of ranks."""
    json: Json = False

    def __post_init__(self) -> None:
        self.work()
        if self.figure is not None and self.figure.suffix not in (".svg", ".png"):
            raise ConfigError(f"--figure is {self.figure}; give a name that ends in .svg or .png")

    def work(self) -> Work:
        return Work(
            microbatches=self.microbatches,
            message=self.message,
            thin=self.thin,
            shared=self.shared,
            head=self.head_bytes,
            stage=self.stage,
            interface_rank=self.interface_rank,
            interface_bytes=self.interface_bytes,
            interface_samples=self.interface_samples,
            times=self.times,
            machine=self.machine,
        )


def run(argv: list[str]) -> int:
    """Simulate, print, draw; return the exit code."""
    asked = parse(Simulate, argv, "simulate")
    work = asked.work() if asked.bench is None else _measured(asked)
    results = simulate(asked.ranks, work)
    if asked.figure is not None:
        from scaling import scaling_figure

        scaling_figure(results, asked.figure)
        note(f"drawn: {asked.figure}")
    if asked.json:
        print_json(results)
    else:
        out().print(simulation_table(results))
    return 0


def _measured(asked: Simulate) -> Work:
    """The sizes and times of a measurement, with the links and failures of the flags."""
    from pipeline_settings import PipelineSettings
    from pipeline_ways import work_of

    assert asked.bench is not None
    found = read_json(asked.bench, ConfigError)
    try:
        work = work_of(PipelineSettings(**found["settings"]), found["parts"])
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"--bench {asked.bench} is not what `topograd bench pipeline --json` prints ({error}); make it "
            "again"
        ) from None
    return replace(
        work,
        microbatches=asked.microbatches,
        machine=asked.machine,
        interface_rank=asked.interface_rank,
        interface_bytes=asked.interface_bytes,
        interface_samples=asked.interface_samples,
    )


def simulation_table(results: Mapping[str, Any]) -> Table:
    """Each method at the most ranks, and at some fewer."""
    rows = results["methods"]
    counts = [row["ranks"] for row in rows["staged"]]
    shown = sorted({counts[0], counts[len(counts) // 2], counts[-1]})
    table = Table(title=f"Up to {results['ranks']} ranks", title_justify="left")
    for column in ("way", "ranks", "s", "speedup", "bubble", "MB sent", "held", "goodput"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for method in METHODS:
        for row in rows[method]:
            if row["ranks"] in shown:
                table.add_row(
                    method,
                    str(row["ranks"]),
                    number(row["seconds"], 2),
                    number(row["speedup"], 1),
                    number(row["bubble"], 2),
                    number(row["bytes"] / 1e6, 1),
                    number(row["memory"], 0),
                    number(max(row["goodput"].values()), 3),
                )
    table.caption = (
        "speedup: of throughput over one rank; held: stages' activations on the fullest rank; goodput: what "
        "failures leave, of free stages those that replay"
    )
    return table


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:]))
    except TopogradError as error:
        sys.exit(f"simulate: {error}")
