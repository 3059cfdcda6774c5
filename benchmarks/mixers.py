"""The recurrent mixers in chunks against one token at a time, and against attention, forward and backward.

One process, taking turns. Prints the median, the quartiles and ratios. The loop is the obvious one
(`tests/oracles/recurrence.py`), which splits the sequence once and stacks once.

    python benchmarks/mixers.py [--length 1024] [--rounds 5] [--threads 1] [--json]
"""

import argparse
import json
from collections.abc import Callable

import torch
from torch import Tensor

import clone  # noqa: F401  (for what is not installed)
from tests.oracles.recurrence import mamba2_by_steps, mamba3_by_steps
from topograd.nn.gpt import GPT
from topograd.nn.mamba.mamba2 import Mamba2Mixer
from topograd.nn.mamba.mamba3 import Mamba3Mixer
from topograd.timing import Spread, ratio, take_turns

BATCH, WIDTH = 4, 256


def both_ways(run: Callable[[Tensor], Tensor], u: Tensor) -> Callable[[], object]:
    """A forward and a backward to the inputs and to every parameter."""
    return lambda: run(u).square().mean().backward()


def measure(length: int, rounds: int) -> dict[str, Spread]:
    """The loops over the chunked mixers, and the mixers over attention."""
    torch.manual_seed(0)
    u = torch.randn(BATCH, length, WIDTH, requires_grad=True)
    two, three = Mamba2Mixer(WIDTH, 8, 64, 64), Mamba3Mixer(WIDTH, 8, 64, 64)
    gpt = GPT(layers=1, width=WIDTH, heads=4, vocab=2, context=length, value_embeddings="none")
    attention = gpt.layers[0].attention
    ctx = gpt.layer_context(u, torch.zeros(BATCH, length, dtype=torch.long))
    things = {
        "mamba2": both_ways(two, u),
        "mamba2 loop": both_ways(lambda x: mamba2_by_steps(two, x)[0], u),
        "mamba3": both_ways(three, u),
        "mamba3 loop": both_ways(lambda x: mamba3_by_steps(three, x)[0], u),
        "attention": both_ways(lambda x: attention(x, ctx), u),  # type: ignore[operator]
    }
    seconds = take_turns(things, rounds, warmup=1)
    pairs = [("mamba2 loop", "mamba2"), ("mamba3 loop", "mamba3")]
    pairs += [("mamba2", "attention"), ("mamba3", "attention")]
    return {f"{a} / {b}": ratio(seconds, a, b) for a, b in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    found = measure(asked.length, asked.rounds)
    if asked.json:
        print(json.dumps({name: spread.as_dict() for name, spread in found.items()}))
        return
    print(f"length {asked.length}, batch {BATCH}, width {WIDTH}, {asked.threads} threads, times over times")
    for name, spread in found.items():
        print(f"{name:24}{spread}")


if __name__ == "__main__":
    main()
