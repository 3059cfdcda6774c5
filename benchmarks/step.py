"""The training step: staged against backprop, backprop against plain torch, and peak activation memory.

    python benchmarks/step.py [--width 512] [--layers 8] [--rounds 11] [--json]

All times are forward and backward of one batch, in one process, taking turns; gradients exist beforehand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import tyro

from plain_gpt import PlainGPT, copy_weights, plain_step
from topograd.exec.train_step import train_step
from topograd.memory import peak_step_bytes
from topograd.nn.gpt import GPT
from topograd.timing import Spread, ratio, take_turns
from topograd.topology.dag import Topology


@dataclass(frozen=True)
class Settings:
    """The model and how long to measure."""

    width: int = 512
    layers: int = 8
    vocab: int = 2048
    context: int = 256
    batch: int = 4
    rounds: int = 11
    threads: int | None = None
    json: bool = False


def even(layers: int, stages: int) -> Topology:
    return Topology.chain(",".join([str(layers // stages)] * stages))


def measure(settings: Settings) -> dict[str, Any]:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "layers": settings.layers,
        "width": settings.width,
        "heads": settings.width // 64,
        "vocab": settings.vocab,
        "context": settings.context,
    }
    stack, plain = GPT(**shape), PlainGPT(**shape)
    for (
        parameter
    ) in stack.parameters():  # no matrix stays zero: zeros multiply at the same speed, but who knows
        torch.nn.init.normal_(parameter, std=0.02)
    copy_weights(plain, stack)
    inputs = torch.randint(settings.vocab, (settings.batch, settings.context))
    targets = torch.randint(settings.vocab, (settings.batch, settings.context))
    counts = [k for k in (1, 2, 4, 8) if settings.layers % k == 0]
    topologies = {k: even(settings.layers, k) for k in counts}
    parameters = [*stack.parameters(), *plain.parameters()]

    ours = train_step(stack, topologies[1], inputs, targets).item()
    theirs = plain_step(plain, inputs, targets)
    assert abs(ours - theirs) < 1e-4, f"the two models differ: {ours} and {theirs}"

    def staged(k: int) -> Any:
        return lambda: train_step(stack, topologies[k], inputs, targets)

    memory = {k: peak_step_bytes(staged(k), parameters) for k in counts}
    memory_plain = peak_step_bytes(lambda: plain_step(plain, inputs, targets), parameters)
    things = {f"stages {k}": staged(k) for k in counts} | {
        "plain": lambda: plain_step(plain, inputs, targets)
    }
    seconds = take_turns(things, settings.rounds)
    return {
        "settings": {**shape, "batch": settings.batch, "threads": torch.get_num_threads()},
        "step_time_over_backprop": {k: ratio(seconds, f"stages {k}", "stages 1").as_dict() for k in counts},
        "tokens_per_second_over_plain": ratio(seconds, "plain", "stages 1").as_dict(),
        "peak_bytes": memory,
        "peak_bytes_plain": memory_plain,
        "peak_over_backprop": {k: memory[k] / memory[1] for k in counts},
    }


def main() -> None:
    settings = tyro.cli(Settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    result = measure(settings)
    if settings.json:
        print(json.dumps(result))
        return
    print(result["settings"])
    print("stages   step time over backprop        peak memory over backprop")
    for k, spread in result["step_time_over_backprop"].items():
        mebibytes = result["peak_bytes"][k] / 2**20
        print(
            f"{k:6d}   {Spread(**spread)!s:28}   {result['peak_over_backprop'][k]:.3f} ({mebibytes:.0f} MiB)"
        )
    print(f"tokens/s of backprop over plain torch: {Spread(**result['tokens_per_second_over_plain'])}")
    print(f"peak memory of plain torch: {result['peak_bytes_plain'] / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
