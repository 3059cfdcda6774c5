"""How long a step of DDCAdam takes, and what it keeps, against torch.optim.AdamW on a GPT's parameters.

    python benchmarks/optimizer_step.py [--layers 6] [--width 320] [--repeats 20] [--json]

An optimizer sees tensors and gradients only, so that the model is a list of tensors in the shapes of a GPT
with ReLU² (attention 4 d², MLP 8 d² for each layer, two embeddings, a head), with random values and
gradients. The gauges are those that such a GPT has: ReLURescale of degree 2 on each MLP, CEShiftRowShift on
the head. In each round both step once, in turns; the ratio is taken within its round, and its median and
quartiles shown.

    step_ratio_vs_adamw      seconds of DDCAdam over those of AdamW(foreach=True), goal ≤ 1.5
    memory_ratio_vs_adamw    bytes of optimizer state over AdamW's, goal ≤ 1.1

    step_ratio_vs_fused      both with fused=True, processor time, the least of all rounds each; CPUs only

Cost: seconds. Limits: a machine is noisy; read the quartiles. Temporaries are not in the second ratio.
On a CPU AdamW(fused=True) is some seven times faster than foreach, as it passes over memory once. DDCAdam's
split is not fused: it passes over a covered tensor some twenty times, in pieces that fit the caches. Compiled
by inductor it was no faster (docs/results).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import torch
import tyro
from rich.table import Table
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

import clone  # noqa: F401  (for what is not installed)
from papers.limits import check_total
from tables import ratio_table
from topograd.cli.console import Json, note, number, out, print_json
from topograd.limits import DEPTH, REPEATS, SIZE, check_numbers
from topograd.optim.ddc_adam import DDCAdam
from topograd.optim.gauges import CEShiftRowShift, Gauge, ReLURescale
from topograd.runs.device import usable_device
from topograd.timing import Spread, ratio, read_in_turns, take_turns

STEP_GOAL, MEMORY_GOAL = 1.5, 1.1
OURS, ADAMW = "ddc_adam", "adamw"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The shapes of a GPT's tensors, and how often a step is measured."""

    layers: int = 6
    """Layers, each of attention and an MLP."""
    width: int = 320
    """Numbers in the hidden state of a token."""
    vocab: int = 3072
    """Rows of the embeddings and of the head."""
    repeats: int = 20
    """Steps of each optimizer, in turns."""
    device: str = "cpu"
    """Where the tensors lie, as cpu or cuda."""

    def __post_init__(self) -> None:
        check_numbers(self, layers=DEPTH, width=SIZE, vocab=(2, SIZE[1]), repeats=REPEATS)
        parameters = 12 * self.layers * self.width**2 + 3 * self.vocab * self.width
        check_total(8 * parameters, "layers, width or vocab")  # twice with gradients and two moments
        usable_device(self.device)


def bench_optim(settings: Settings) -> dict[str, Any]:
    """Both ratios, with what they are ratios of."""
    parameters, gauges = gpt_parameters(settings)
    twins = {name: nn.Parameter(tensor.detach().clone()) for name, tensor in parameters.items()}
    ours = DDCAdam(parameters.items(), gauges, rms=True, foreach=True)
    adamw = torch.optim.AdamW(twins.values(), weight_decay=0.0, foreach=True)
    for tensor in (*parameters.values(), *twins.values()):
        tensor.grad = 1e-3 * torch.randn_like(tensor)
    seconds = take_turns({OURS: _timed(ours, settings), ADAMW: _timed(adamw, settings)}, settings.repeats)
    ours.param_groups[0].update(foreach=None, fused=True)
    adamw.param_groups[0].update(foreach=None, fused=True)
    step, memory = ratio(seconds, OURS, ADAMW), state_bytes(ours) / state_bytes(adamw)
    return {
        "threads": torch.get_num_threads(),
        "settings": asdict(settings),
        "parameters": sum(tensor.numel() for tensor in parameters.values()),
        "covered": sum(parameters[name].numel() for gauge in gauges for name in gauge.names),
        "step_ratio_vs_adamw": step.median,
        "step_spread": step.as_dict(),
        "step_seconds": {name: Spread.of(times).as_dict() for name, times in seconds.items()},
        "step_ratio_vs_fused": _fused_ratio(ours, adamw, settings),
        "memory_ratio_vs_adamw": memory,
        "goals": {"step": STEP_GOAL, "memory": MEMORY_GOAL},
        "met": step.median <= STEP_GOAL and memory <= MEMORY_GOAL,
    }


def _fused_ratio(ours: Optimizer, adamw: Optimizer, settings: Settings) -> float | None:
    """By processor time, which other processes disturb less; None where that is not where a step runs."""
    if settings.device != "cpu":
        return None

    def clock(optimizer: Optimizer) -> float:
        began = time.process_time()
        optimizer.step()
        return time.process_time() - began

    clocks = {OURS: partial(clock, ours), ADAMW: partial(clock, adamw)}
    seconds = read_in_turns(clocks, settings.repeats)
    return min(seconds[OURS]) / min(seconds[ADAMW])


def _timed(optimizer: Optimizer, settings: Settings) -> Callable[[], None]:
    """A step that is over when it returns."""

    def step() -> None:
        optimizer.step()
        if settings.device.startswith("cuda"):
            torch.cuda.synchronize()

    return step


def gpt_parameters(settings: Settings) -> tuple[dict[str, nn.Parameter], list[Gauge]]:
    """Tensors in the shapes of a GPT, and the gauges that it has."""
    width, vocab = settings.width, settings.vocab
    shapes = {"embedding": (vocab, width), "previous": (vocab, width), "head": (vocab, width)}
    gauges: list[Gauge] = [CEShiftRowShift("head")]
    for layer in range(settings.layers):
        shapes |= {f"{layer}.{name}": (width, width) for name in ("query", "key", "value", "output")}
        shapes |= {f"{layer}.up": (4 * width, width), f"{layer}.down": (width, 4 * width)}
        gauges.append(ReLURescale(f"{layer}.up", f"{layer}.down", degree=2))
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) / width**0.5 for name, shape in shapes.items()}
    return {name: nn.Parameter(tensor.to(settings.device)) for name, tensor in made.items()}, gauges


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors in an optimizer's state."""
    states: list[Tensor] = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in states)


def optim_table(results: Mapping[str, Any]) -> Table:
    """DDCAdam over AdamW: time of a step with its quartiles, and state."""
    goals, spread, seconds = results["goals"], results["step_spread"], results["step_seconds"]
    step, memory = results["step_ratio_vs_adamw"], results["memory_ratio_vs_adamw"]
    rows = [
        {"name": "step", "ratio": step, "spread": spread, "goal": goals["step"]},
        {
            "name": "state",
            "ratio": memory,
            "spread": {"low": memory, "high": memory},
            "goal": goals["memory"],
        },
    ]
    table = ratio_table(
        f"DDCAdam over AdamW, {results['threads']} threads",
        [row | {"met": row["ratio"] <= row["goal"]} for row in rows],
    )
    times = " and ".join(f"{1e3 * seconds[name]['median']:.1f} ms" for name in ("ddc_adam", "adamw"))
    covered, parameters = (f"{results[name] / 1e6:.1f}M" for name in ("covered", "parameters"))
    table.caption = f"a step takes {times}; gauges cover {covered} of {parameters} parameters"
    if (fused := results["step_ratio_vs_fused"]) is not None:
        table.caption += f"; both fused, by processor time: {number(fused, 2)}"
    return table


def main(settings: Annotated[Settings, tyro.conf.arg(name="")], json: Json = False) -> None:
    """Measure a step of DDCAdam, and what it keeps, against AdamW on the tensors of a GPT."""
    note("measuring optimizer steps: some seconds, on a quiet machine if you can")
    results = bench_optim(settings)
    if json:
        print_json(results)
        return
    out().print(optim_table(results))


if __name__ == "__main__":
    tyro.cli(main)
