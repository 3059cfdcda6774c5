"""Settings of the pipeline benchmark, shared by the script and its ranks."""

from __future__ import annotations

from dataclasses import dataclass

import clone  # noqa: F401  (for what is not installed)
from papers.limits import check_total
from topograd.errors import ConfigError
from topograd.limits import DEPTH, REPEATS, SIZE, check_numbers

BITS = 4
"""Of a thin gradient."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """The model that is spread over ranks, the wire between them, and how often everything is measured."""

    ranks: int = 2
    """Processes, with one thread each; a stage for each."""
    layers: int = 4
    """Layers, dealt evenly."""
    width: int = 256
    """Numbers in the hidden state of a token."""
    vocab: int = 512
    """Rows of the embeddings and of the head."""
    context: int = 128
    """Tokens of a sequence."""
    x0_blend: bool = True
    """Whether every layer reads the embedding, so that all ranks have it; most models do not."""
    batch: int = 4
    """Sequences of a micro-batch."""
    microbatches: int = 8
    """Micro-batches of a step."""
    rounds: int = 5
    """Steps of each way, in turns."""
    mbit: float | None = None
    """Bandwidth of the wire in Mbit/s, each way; needs root, for network namespaces of its own."""
    latency: float | None = None
    """Milliseconds that a message takes beside its bytes, each way; needs --mbit."""
    ways: tuple[str, ...] = ()
    """Only these ways, at least one of them backprop; by default all."""
    timeout: float = 120.0
    """Seconds that one rank waits for another."""

    def __post_init__(self) -> None:
        check_numbers(self, ranks=(2, 64), layers=DEPTH, width=SIZE, vocab=(2, SIZE[1]), context=SIZE)
        check_numbers(self, batch=SIZE, microbatches=REPEATS, rounds=REPEATS, mbit=(0.1, 1e6))
        check_numbers(self, timeout=(1, 86_400), latency=(0, 10_000))
        if self.latency is not None and self.mbit is None:
            raise ConfigError(f"--latency is {self.latency:g} without a bandwidth; give --mbit too")
        if self.layers % self.ranks:
            raise ConfigError(
                f"{self.layers} layers cannot be dealt evenly to {self.ranks} ranks; give a multiple"
            )
        check_total(
            self.batch * self.context * self.width * self.microbatches * self.layers, "batch or context"
        )
