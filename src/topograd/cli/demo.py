"""`topograd demo`: one model trained twice, compared and explained, and then decoded in several ways."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.panel import Panel
from rich.text import Text

from topograd.cli.console import Json, note, out, parse, print_json
from topograd.cli.main import INTERRUPTED
from topograd.limits import REPEATS, SEED, check_numbers


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train one small GPT in stages and by backprop, compare the two, and write a report."""

    out: Path = Path("runs/demo")
    """Where the two runs and the report go; what is there already is used again."""
    preset: Literal["tiny", "small"] = "small"
    """The model and the length of its training; tiny takes seconds and shows little."""
    partition: str | None = None
    """Layers per stage of the staged run; by default two."""
    steps: int | None = None
    """Length of both trainings; by default what the preset says."""
    seed: int = 0
    """Draws the weights and the order of the data, the same for both."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, steps=REPEATS, seed=SEED)


def run(argv: list[str]) -> int:
    """Train what is missing, then print the table, the samples and where the report lies."""
    began = time.monotonic()
    asked = parse(Demo, argv, "demo")
    from topograd.cli import demo_depth, demo_pair  # torch: only once there is something to do
    from topograd.report.page import write_report
    from topograd.runs.session import open_session

    results = demo_pair.trained(asked)
    if not all(name in results and results[name]["finished"] for name in demo_pair.wanted(asked)):
        note("stopped; the same command goes on from there")
        return INTERRUPTED
    comparison = demo_pair.compared(asked.out, open_session(asked.out / "staged"), results)
    depth = demo_depth.decoding(asked.out)
    report = write_report(
        asked.out / "report.html",
        demo_pair.run_data(asked.out / "staged", results["staged"]),
        demo_pair.run_data(asked.out / "backprop", results["backprop"]),
        comparison,
        depth,
    )
    if asked.json:
        found = {**results, "comparison": comparison, "decoding": depth["bench"]}
        print_json({"run": str(asked.out), **found, "report": str(report)})
        return 0
    console = out()
    console.print(demo_pair.summary_table(results, comparison))
    for sample in comparison["samples"]:
        text = Text.assemble((sample["prompt"], "bold"), sample["text"])
        console.print(Panel(text, title=sample["title"], title_align="left"))
    demo_depth.show(console, depth)
    console.print(f"Report: {report.resolve()}", soft_wrap=True)
    console.print(f"Playground: topograd serve {asked.out / 'staged'}, then open the address", soft_wrap=True)
    note(f"done in {time.monotonic() - began:.0f} s")
    return 0
