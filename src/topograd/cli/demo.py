"""`topograd demo`: the packaged model decodes, and a staged and a backprop model are trained and compared."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from topograd.cli.console import Json, note, out, parse, print_json
from topograd.cli.main import INTERRUPTED
from topograd.errors import ConfigError
from topograd.limits import REPEATS, SEED, check_numbers


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Decode with the packaged model, then train a small GPT in stages and by backprop, and compare the two.

    About two minutes on two cores. Stopped and started again, it continues where it was.
    """

    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the two runs and the report, used again if there; by default runs/demo, or runs/demo-full."""
    full: tyro.conf.FlagCreatePairsOff[bool] = False
    """Train three times as long and measure every decode strategy: about six minutes on two cores."""
    preset: Literal["tiny", "small"] = "small"
    """Size of the model and length of its training; tiny takes seconds and shows little."""
    partition: Annotated[str | None, tyro.conf.arg(metavar="2,2,2")] = None
    """Layers per stage of the staged run; by default two in each."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Steps of both trainings; by default 400 of the preset small, and the preset's own with --full."""
    seed: int = 0
    """Seed of the weights and of the order of the data, the same for both."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, steps=REPEATS, seed=SEED)

    @property
    def folder(self) -> Path:
        """Folder of the two runs and the report."""
        return self.out or Path("runs/demo-full" if self.full else "runs/demo")


def run(argv: list[str]) -> int:
    """Show the packaged model, train what is missing, print the comparison, write the report."""
    began = time.monotonic()
    args = parse(Demo, argv, "demo")
    if (args.folder / "config.toml").exists():
        problem, remedy = f"{args.folder} is a run", "give the demo a folder of its own"
        raise ConfigError(problem, setting="out", given=args.folder, remedy=remedy)
    from topograd.cli import demo_parts as parts  # torch: only once there is something to do

    console = out()
    look = parts.first_look()
    if not args.json:
        parts.show_look(console, look)
    results = parts.trained(args)
    if not all(name in results and results[name]["finished"] for name in parts.CONTENDERS):
        note("stopped; run the same command again to continue")
        return INTERRUPTED
    comparison = parts.compared(args.folder, results)
    bench = parts.bench(args.folder) if args.full else look
    report = parts.report(args.folder, results, comparison, {"bench": bench, "picture": look["picture"]})
    serve = f"topograd serve {args.folder / 'staged'}"
    seconds = time.monotonic() - began
    if args.json:
        values = {**results, "comparison": comparison, "decoding": bench, "report": str(report)}
        print_json({"run": str(args.folder), **values, "playground": serve, "seconds": seconds})
    else:
        parts.show_results(console, results, comparison, bench if args.full else None)
        console.print(f"Report: {report.resolve()}", soft_wrap=True)
        console.print(f"Playground: {serve}, then open the address that it prints", soft_wrap=True)
        console.print(f"done in {seconds:.0f} s")
    return 0
