"""What decoding costs on this machine, on models of random weights.

    rows        seconds of M rows over one row, for all the matrices of a model, packed and plain
    forced      speculation on a 150-million-parameter model whose drafts are accepted with a given chance
    pruning     the last head on the surviving candidates against the whole head, by vocabulary

    python benchmarks/decode.py [rows|forced|pruning] [--width 768] [--threads 1]

Things take turns; a figure is the median with its quartiles. Only decoding is timed, not the prompt.
`topograd bench decode` measures trained models.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.decode.benchmark import in_turns
from topograd.decode.cache import Batch
from topograd.decode.drafters import DraftRule
from topograd.decode.engine import Emitted, Engine
from topograd.decode.settings import DecodeSettings
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import DecodeStrategy, FixedDepth
from topograd.decode.wand import Wand
from topograd.nn.gpt import GPT
from topograd.nn.mkl_linear import MklLinear
from topograd.timing import ratio, take_turns
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

ROWS = (1, 2, 4, 8, 16)
PROMPT = [list(range(32))]


class Forced(Speculate):
    """Speculation that does its work but accepts each draft with a fixed chance."""

    def __init__(self, engine: Engine, longest: int, chance: float) -> None:
        super().__init__(engine, DraftRule(0.0, longest))
        self.chance, self.random = chance, random.Random(0)

    @torch.inference_mode()
    def step(self, batch: Batch) -> list[list[Emitted]]:
        start = [len(sequence) for sequence in batch]
        counts = [len(draft.tokens) + 1 for draft in self.drafter.draft(batch)]
        self.engine.run(batch, self.full)
        own = self.engine.logits(batch, self.full, counts).argmax(-1).split(counts)
        kept = [self._kept(count - 1) for count in counts]
        tokens = [int(row[n]) for row, n in zip(own, kept, strict=True)]
        written = [
            [*sequence.tokens[length : length + n], token]
            for sequence, length, n, token in zip(batch, start, kept, tokens, strict=True)
        ]
        batch[0].cache.truncate(batch, [length + n for length, n in zip(start, kept, strict=True)])
        self.engine.append(batch, [[token] for token in tokens])
        return [[Emitted(token, self.exit) for token in row] for row in written]

    def _kept(self, drafted: int) -> int:
        kept = 0
        while kept < drafted and self.random.random() < self.chance:
            kept += 1
        return kept


def rows(width: int, rounds: int) -> None:
    """All the matrices of 8 layers, one after another, so that none stays in a cache."""
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    weights = [torch.randn(shape) for _ in range(8) for shape in shapes]
    packed = [MklLinear(weight) for weight in weights]

    def run(layers: Sequence[Callable[[Tensor], Tensor]], count: int) -> Callable[[], None]:
        inputs = {n: torch.randn(count, n) for n in (width, 4 * width)}

        def go() -> None:
            for layer, weight in zip(layers, weights, strict=True):
                layer(inputs[weight.shape[1]])

        return go

    plain = [partial(F.linear, weight=w) for w in weights]
    things = {f"packed {m}": run(packed, m) for m in ROWS} | {f"plain {m}": run(plain, m) for m in ROWS}
    with torch.inference_mode():
        seconds = take_turns(things, rounds)
    print(f"width {width}: one packed row over one plain row {ratio(seconds, 'packed 1', 'plain 1')}")
    for m in ROWS[1:]:
        ours, theirs = ratio(seconds, f"packed {m}", "packed 1"), ratio(seconds, f"plain {m}", "plain 1")
        print(f"  {m:2d} rows over one: packed {ours}, plain {theirs}")


def random_engine(layers: int, width: int, vocab: int, context: int) -> Engine:
    """A GPT of random weights in four stages."""
    torch.manual_seed(0)
    heads = width // 64
    gpt = GPT(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=max(heads // 4, 1),
        vocab=vocab,
        context=context,
        value_embeddings="none",
    )
    for weight in gpt.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.02)
    count = sum(p.numel() for p in gpt.parameters()) / 1e6
    print(f"{count:.0f} M parameters: {layers} layers of width {width}, vocabulary {vocab}")
    part = str(layers // 4)
    return Engine(gpt, Plan.of(Topology.chain(",".join([part] * 4)), layers), context)


def forced(layers: int, width: int, rounds: int, tokens: int) -> None:
    engine = random_engine(layers, width, 4096, 256)
    ways: dict[str, DecodeStrategy] = {"full": FixedDepth(engine), "prefix:1": FixedDepth(engine, 0)}
    for chance in (0.6, 0.8, 0.9):
        for longest in (2, 3, 4):
            ways[f"{longest} drafts at {chance}"] = Forced(engine, longest, chance)
    seconds = in_turns(ways, PROMPT, DecodeSettings(tokens=tokens, rounds=rounds + 1))
    rate = tokens / sorted(seconds["full"])[rounds // 2]
    print(f"full depth: {rate:.1f} tokens/s")
    for name in list(ways)[1:]:
        print(f"  {name}: {ratio(seconds, 'full', name)} times as fast")


def pruning(width: int, rounds: int, tokens: int) -> None:
    """Every token is checked after the first stage and goes on to the last; about 64 candidates survive."""
    for vocab in (2048, 8192, 32768):
        engine = random_engine(8, width, vocab, 256)
        limits = [1e9] + [float("inf")] * (engine.last - 1)
        bound = first_stage_lead(engine, 64)
        ways: dict[str, DecodeStrategy] = {
            "whole": Wand(engine, limits),
            "pruned": Wand(engine, limits, bounds=[bound] * engine.last),
        }
        seconds = in_turns(ways, PROMPT, DecodeSettings(tokens=tokens, rounds=rounds + 1))
        print(f"  vocabulary {vocab}: pruned is {ratio(seconds, 'whole', 'pruned')} times as fast")


@torch.inference_mode()
def first_stage_lead(engine: Engine, rank: int) -> float:
    """How far the first stage's best logit is above that of a rank, behind the usual prompt."""
    batch = engine.start(PROMPT)
    engine.run(batch, 0)
    best = engine.logits(batch, 0)[0].topk(rank).values
    return float(best[0] - best[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("rows", "forced", "pruning", "all"), nargs="?", default="all")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(f"{asked.threads} threads")
    if asked.what in ("rows", "all"):
        rows(asked.width, asked.rounds)
    if asked.what in ("forced", "all"):
        forced(asked.layers, asked.width, asked.rounds, asked.tokens)
    if asked.what in ("pruning", "all"):
        pruning(asked.width, asked.rounds, asked.tokens)


if __name__ == "__main__":
    main()
