"""How much each benchmark measures: its flags. Nothing here needs torch, so that help comes at once."""

from __future__ import annotations

from dataclasses import dataclass

from topograd.errors import ConfigError
from topograd.limits import BYTES, DEPTH, REPEATS, SIZE, check_numbers, check_total

MOST_TOKENS = 1_000_000
"""Tokens that one way of decoding writes."""


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """How much of decoding is measured."""

    prompts: int = 6
    """Held-out prompts, each continued by itself."""
    prompt_tokens: int = 64
    """Tokens of a prompt, at most."""
    tokens: int = 64
    """Tokens written after each prompt."""
    rounds: int = 7
    """How often every way is measured, in turns."""
    bytes: int = 100_000
    """Held-out text for agreement and calibration."""
    rows: int = 4
    """Prompts that are continued together in the batched comparison."""

    def __post_init__(self) -> None:
        check_numbers(self, prompts=REPEATS, prompt_tokens=SIZE, tokens=REPEATS, rounds=REPEATS)
        check_numbers(self, bytes=BYTES, rows=SIZE)
        if self.prompts * self.tokens * self.rounds > MOST_TOKENS:
            raise ConfigError(f"more than {MOST_TOKENS} tokens would be written by each mode; ask for fewer")


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """How much is written behind the prompts of each category."""

    tokens: int = 48
    """Tokens written after each prompt."""
    drafts: int = 3
    """Tokens that are drafted at a time."""
    rounds: int = 3
    """How often every way is measured, in turns."""

    def __post_init__(self) -> None:
        check_numbers(self, tokens=REPEATS, drafts=DEPTH, rounds=REPEATS)
        if self.tokens * self.rounds > MOST_TOKENS:
            raise ConfigError(f"more than {MOST_TOKENS} tokens would be written by each mode; ask for fewer")


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """How many trainings are broken, and when."""

    seeds: int = 3
    """Trainings of each fault, with a twin each."""
    steps: int = 220
    """Steps of a training."""
    fault_at: int = 140
    """The step at which a fault begins."""
    rounds: int = 7
    """How often the cost is measured, in turns; 0 to leave it out."""
    cost_rows: int = 16
    """Rows of 128 tokens in a step whose cost is measured."""

    def __post_init__(self) -> None:
        check_numbers(self, seeds=REPEATS, steps=REPEATS, fault_at=REPEATS, cost_rows=SIZE)
        if not 0 <= self.rounds <= REPEATS[1]:
            raise ConfigError(f"rounds is {self.rounds}: give 0 to {REPEATS[1]}")
        if not 20 <= self.fault_at < self.steps:
            raise ConfigError(
                f"fault_at is {self.fault_at} of {self.steps} steps: give 20 or more, and some steps after it"
            )


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """The sizes of kernels, and how often everything is measured."""

    examples: int = 512
    """M."""
    width: int = 512
    """N."""
    depth: int = 6
    """L."""
    growth_examples: int = 128
    """M that doubles in the table of growth."""
    growth_width: int = 256
    """N that doubles there."""
    growth_depth: int = 3
    """L that doubles there."""
    transport_examples: int = 64
    """M of Δb, which has the same depth."""
    transport_width: int = 256
    """N of Δb."""
    rounds: int = 3
    """How often both sides are measured, in turns."""

    def __post_init__(self) -> None:
        check_numbers(self, examples=SIZE, width=SIZE, depth=DEPTH, growth_examples=SIZE, growth_width=SIZE)
        check_numbers(self, growth_depth=DEPTH, transport_examples=SIZE, transport_width=SIZE, rounds=REPEATS)
        choices = "examples, width or depth"
        check_total(self.examples * self.depth * self.width**2, choices)  # the peer's Jacobians
        check_total(4 * self.growth_examples * self.growth_depth * self.growth_width**2, choices)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
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
    compile: bool = False
    """Compile DDCAdam's step for the ratio to fused AdamW; takes a C++ compiler, and a minute."""

    def __post_init__(self) -> None:
        check_numbers(self, layers=DEPTH, width=SIZE, vocab=(2, SIZE[1]), repeats=REPEATS)
        parameters = 12 * self.layers * self.width**2 + 3 * self.vocab * self.width
        check_total(8 * parameters, "layers, width or vocab")  # twice with gradients and two moments


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
    batch: int = 4
    """Sequences of a micro-batch."""
    microbatches: int = 8
    """Micro-batches of a step."""
    rounds: int = 5
    """Steps of each way, in turns."""
    mbit: float | None = None
    """Bandwidth of the wire in Mbit/s, each way; needs root, for network namespaces of its own."""
    timeout: float = 120.0
    """Seconds that one rank waits for another."""

    def __post_init__(self) -> None:
        check_numbers(self, ranks=(2, 64), layers=DEPTH, width=SIZE, vocab=(2, SIZE[1]), context=SIZE)
        check_numbers(self, batch=SIZE, microbatches=REPEATS, rounds=REPEATS, mbit=(0.1, 1e6))
        check_numbers(self, timeout=(1, 86_400))
        if self.layers % self.ranks:
            raise ConfigError(
                f"{self.layers} layers cannot be dealt evenly to {self.ranks} ranks; give a multiple"
            )
        check_total(
            self.batch * self.context * self.width * self.microbatches * self.layers, "batch or context"
        )
