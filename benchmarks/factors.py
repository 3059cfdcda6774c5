"""K-FAC factors of a GPT against a forward and backward pass over the same data; what models cost to read.

    python benchmarks/factors.py [--width 320] [--layers 6] [--sequences 64] [--rounds 5] [--json]
    python benchmarks/factors.py --read MODEL [--scans 6] [--json]
    python benchmarks/factors.py --block 2048 8192 512 128256 16 [--tokens 512] [--json]

The first: float32, in one process, taking turns; gradients exist beforehand. The loss of the backward pass is
the plain cross-entropy of the same logits that the factors read.

`--read`: `geometry.read_checkpoint` of a run or a checkpoint as `topograd inspect` calls it: seconds by
phase, by the clock and of the processor, the peak of the process's memory, and what was read.

`--block`: what reading a larger model would cost, from Llamas of its width, inner width, width of keys and
vocabulary with one layer and with two, at random, on `tokens` tokens: factors, spectra and flattest
directions. The difference of the two is a layer's; the model has as many as the last number says, and ten
tokens for each channel. Scans and symmetries are not in it.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro

from topograd.geometry import checkpoint, inspection
from topograd.geometry.factors import kfac_factors
from topograd.geometry.inspection import inspect
from topograd.nn.gpt import GPT
from topograd.timing import Spread, ratio, take_turns


@dataclass(frozen=True)
class Settings:
    """The model and how long to measure."""

    width: int = 320
    layers: int = 6
    vocab: int = 2048
    context: int = 256
    sequences: int = 64
    batch: int = 8
    rounds: int = 5
    threads: int | None = None
    read: Path | None = None
    """A model that is read whole."""
    scans: int | None = None
    """How many directions of it are followed outward."""
    block: tuple[int, int, int, int, int] | None = None
    """Width, inner width, width of keys, vocabulary and layers of a larger model."""
    tokens: int = 512
    json: bool = False


def measure(settings: Settings) -> dict[str, Any]:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "layers": settings.layers,
        "width": settings.width,
        "heads": settings.width // 64,
        "vocab": settings.vocab,
        "context": settings.context,
    }
    model = GPT(**shape)
    for parameter in model.parameters():  # output matrices start at zero: then no gradient passes
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(settings.vocab, (2, settings.sequences, settings.context))
    batches = list(zip(*(part.split(settings.batch) for part in tokens), strict=True))

    def learn() -> None:
        for inputs, targets in batches:
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()

    learn()
    things = {
        "forward and backward": learn,
        "empirical": lambda: kfac_factors(model, batches),
        "monte-carlo": lambda: kfac_factors(model, batches, fisher="monte-carlo"),
    }
    seconds = take_turns(things, settings.rounds, warmup=1)
    return {
        "settings": {**shape, "sequences": settings.sequences, "threads": torch.get_num_threads()},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": {name: Spread.of(times).as_dict() for name, times in seconds.items()},
        "over_forward_and_backward": {
            name: ratio(seconds, name, "forward and backward").as_dict() for name in list(things)[1:]
        },
    }


PHASES: tuple[tuple[Any, str], ...] = (
    (inspection, "reduce_batches"),
    (inspection, "spectrum"),
    (inspection.KernelMonitor, "readings"),
    (inspection, "_profiles"),
    (checkpoint._Candidates, "take"),
    (checkpoint, "read_layers"),
    (checkpoint, "Probe"),
    (checkpoint, "find_symmetries"),
    (checkpoint._Scanner, "read"),
    (checkpoint._Scanner, "joint"),
)
"""Functions of a reading that are timed."""


@contextmanager
def phases() -> Iterator[dict[str, dict[str, float]]]:
    """Seconds of the clock and of the processor in each of PHASES, and the most memory held until its end."""
    spent: dict[str, dict[str, float]] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter(), time.process_time()
            found = function(*args, **kwargs)
            before = spent.get(name, {"seconds": 0.0, "processor_seconds": 0.0})
            spent[name] = {
                "seconds": before["seconds"] + time.perf_counter() - began[0],
                "processor_seconds": before["processor_seconds"] + time.process_time() - began[1],
                "peak_gigabytes": peak_gigabytes(),
            }
            return found

        return run

    own = [(owner, name, getattr(owner, name)) for owner, name in PHASES]
    try:
        for owner, name, function in own:
            setattr(owner, name, timed(name, function))
        yield spent
    finally:
        for owner, name, function in own:
            setattr(owner, name, function)


def read_model(settings: Settings) -> dict[str, Any]:
    """A whole reading of a model."""
    from topograd.cli.probe_model import open_probe

    assert settings.read is not None
    probe = open_probe(settings.read, None, None, None)
    began = time.perf_counter(), time.process_time()
    generator = torch.Generator().manual_seed(0)
    with phases() as spent:
        found = checkpoint.read_checkpoint(
            probe.model, probe.batches, outputs=probe.outputs, generator=generator, scans=settings.scans
        )
    every = [one for readings in found.layers.values() for one in readings]
    return {
        "seconds": time.perf_counter() - began[0],
        "processor_seconds": time.process_time() - began[1],
        "peak_gigabytes": peak_gigabytes(),
        "threads": torch.get_num_threads(),
        "tokens": found.inspection.terms,
        "layers": len(found.layers),
        "directions": len(every),
        "scanned": sum(one.group is None for one in found.directions),
        "smallest_fisher": min((one.fisher for one in every), default=None),
        "shares_below_0.45": sum(one.share.value < 0.45 for one in every),
        "phases": spent,
    }


def peak_gigabytes() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


HALF = 9 / 16
"""Of a sum that is stored (`geometry/gram_sums.py`)."""


def read_block(settings: Settings) -> dict[str, Any]:
    """Processor seconds and memory of a layer and of the rest, and those of the whole model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    assert settings.block is not None
    width, inner, keys, vocab, layers = settings.block
    costs, held = [], []
    for count in (1, 2):
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=count,
            num_attention_heads=width // 64,
            num_key_value_heads=keys // 64,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config).eval()
        ids = torch.randint(vocab, (settings.tokens // 128, 129))
        batches = [(row[:, :-1], row[:, 1:]) for row in ids.split(1)]
        flat = checkpoint._Candidates(model)
        with phases() as spent:
            whole = inspect(model, batches, generator=torch.Generator().manual_seed(0), on_factors=flat.take)
        costs.append([spent[name]["processor_seconds"] for name in ("reduce_batches", "take", "spectrum")])
        sides = [one for layer in whole.layers.values() for one in (layer.A, layer.G) if one is not None]
        weights = sum(x.numel() * x.element_size() for x in model.parameters())
        held.append(weights + sum(8 * one.size**2 * HALF for one in sides if not one.sketched))
        del model, whole, flat
    layer = [second - first for first, second in zip(*costs, strict=True)]
    rest = [first - one for first, one in zip(costs[0], layer, strict=True)]
    times = 10 * width / settings.tokens

    def total(parts: list[float]) -> float:
        passes, bottoms, spectra = parts
        return passes * times + bottoms + spectra

    bytes_of_layer = held[1] - held[0]
    return {
        "processor_seconds_of_a_layer": total(layer),
        "processor_seconds_of_the_rest": total(rest),
        "processor_seconds_of_the_model": layers * total(layer) + total(rest),
        "gigabytes_of_weights_and_factors": (held[0] + (layers - 1) * bytes_of_layer) / 1e9,
        "peak_gigabytes_here": peak_gigabytes(),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    settings = tyro.cli(Settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.read is not None or settings.block is not None:
        print(
            json.dumps(read_model(settings) if settings.read is not None else read_block(settings), indent=1)
        )
        return
    result = measure(settings)
    if settings.json:
        print(json.dumps(result))
        return
    print(f"{result['settings']}, {result['parameters'] / 1e6:.1f}M parameters")
    for name, spread in result["seconds"].items():
        print(f"{name:22} {Spread(**spread)!s} s")
    for name, spread in result["over_forward_and_backward"].items():
        print(f"{name} over forward and backward: {Spread(**spread)!s}")


if __name__ == "__main__":
    main()
