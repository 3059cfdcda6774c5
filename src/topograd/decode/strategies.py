"""Decode strategies: how deep each token of a batch goes.

    FixedDepth      every token by the stages up to an exit; by default all of them
    PathEnsemble    every token by several paths through the stages, pooled in log space
    Wand            a token leaves at the first exit that is sure enough (`wand.py`)
    Speculate       drafts, verified in one pass (`speculation.py`)

A strategy keeps nothing of a sequence: sampling, random stream and drafters' state are the sequence's own. So
one strategy serves the sequences of any requests, and those that have it share each pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from topograd.decode.cache import Batch
from topograd.decode.engine import Emitted, Engine, Tokens, choose
from topograd.decode.sampling import Sampling
from topograd.decode.sequence import Sequence
from topograd.errors import ConfigError
from topograd.runtime.protocol import inference, single_threaded_torch
from topograd.topology.branches import Path, path_name

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.decode.drafters import CompositeDrafter


class DecodeStrategy(ABC):
    """A way of running the stages."""

    engine: Engine
    exit: int
    """The deepest exit that a token may leave after, counted from 0."""
    drafter: CompositeDrafter | None = None
    """What drafts, where anything does."""
    exits_early = False
    """Whether a token's exit is its own choice, so that its probability is that exit's."""

    @inference
    def step(self, batch: Batch) -> list[list[Emitted]]:
        """Write at least one token in each sequence of a cache."""
        for stage in self.last_stages():
            self.engine.run(batch, stage)
        return self._emit(batch, choose(self.predictions(batch), batch))

    @abstractmethod
    def last_stages(self) -> list[int]:
        """The stages after which the deepest prediction is read."""

    def first_stages(self) -> list[int]:
        """The stages after which the first prediction of a step is read; [] where that is not sure."""
        return self.last_stages()

    @cached_property
    def prompt_stages(self) -> list[int]:
        """The stages that have to run a prompt, in order."""
        return self._needed(self.last_stages())

    @cached_property
    def sure_stages(self) -> list[int]:
        """The stages that a step is sure to run, in order."""
        return self._needed(self.first_stages())

    @cached_property
    def layers(self) -> int:
        """How many layers a token runs at most."""
        return sum(len(self.engine.plan.stages[stage].layers) for stage in self.prompt_stages)

    @inference
    def warm_up(self) -> None:
        """Let the runtime make what it makes when a stage or a head first runs, for a prompt and a token."""
        if self.engine.runtime.ready:
            return
        batch = self.engine.start([[0, 0]])
        for _ in range(2):
            for stage in (*self.first_stages(), *self.last_stages()):
                self.engine.run(batch, stage)
                self.engine.logits(batch, stage)
            self.engine.append(batch, [[0]])

    def _needed(self, after: list[int]) -> list[int]:
        """The stages that predictions after these read, and all that those read."""
        plan = self.engine.plan
        read = {stage for end in after for stage, _ in plan.prediction.after(end)}
        return sorted({planned.index for stage in read for planned in plan.needed(stage)})

    def predictions(self, batch: Batch, counts: abc.Sequence[int] | None = None) -> Tensor:
        """What this depth predicts behind the last positions that ran, of given text: (N, vocab)."""
        return self.engine.logits(batch, self.last_stages()[0], counts)

    def _emit(self, batch: Batch, tokens: abc.Sequence[int]) -> list[list[Emitted]]:
        self.engine.append(batch, [[token] for token in tokens])
        return [[Emitted(token, self.exit)] for token in tokens]


class FixedDepth(DecodeStrategy):
    """Every token by the stages up to an exit; by default all: full depth, as the model predicts."""

    def __init__(self, engine: Engine, exit_: int | None = None) -> None:
        self.engine = engine
        self.exit = engine.last if exit_ is None else exit_
        self.stage = engine.stage_of(self.exit)
        if self.exit == engine.last and engine.plan.prediction.path is not None:
            self.engine, (self.stage,) = engine.branched([engine.plan.prediction.path])

    def last_stages(self) -> list[int]:
        return [self.stage]

    @inference
    def step(self, batch: Batch) -> list[list[Emitted]]:
        self.engine.run(batch, self.stage)
        return self._emit(batch, self.engine.next_tokens(batch, self.stage))


class PathEnsemble(DecodeStrategy):
    """Every token by several paths through the stages, pooled in log space (`log_op.py`)."""

    def __init__(self, engine: Engine, weights: Mapping[Path, float]) -> None:
        for path, weight in weights.items():
            if not 0 < weight < float("inf"):
                problem = f"path {path_name(path)} has weight {weight}"
                remedy = "a weight is a positive number"
                raise ConfigError(problem, setting="weights", given=weight, remedy=remedy)
        self.engine, self.ends = engine.branched(list(weights))
        for path in weights:
            if path[-1] not in engine.exits:
                problem = f"path {path_name(path)} ends at a stage that was not trained to predict"
                remedy = f"these were: {', '.join(str(k + 1) for k in engine.exits)}"
                raise ConfigError(problem, setting="weights", given=path_name(path), remedy=remedy)
        self.weights = list(weights.values())
        self.exit = engine.exits.index(max(path[-1] for path in weights))

    def last_stages(self) -> list[int]:
        return list(self.ends)

    def predictions(self, batch: Batch, counts: abc.Sequence[int] | None = None) -> Tensor:
        """Log-probabilities (N, vocab) of the pool."""
        from topograd.decode.log_op import compose

        each = [self.engine.logits(batch, end, counts) for end in self.ends]
        return each[0] if len(each) == 1 else compose(each, self.weights)


Finished = Callable[[int, Emitted], bool]
"""Whether a sequence ends with a token; called after each token."""


def generate_tokens(
    strategy: DecodeStrategy,
    prompts: Tokens,
    tokens: int,
    finished: Finished | None = None,
    sampling: Sampling | None = None,
) -> Iterator[tuple[int, Emitted]]:
    """Pairs of a prompt's number and its next token, until each has `tokens` of them or is `finished`.

    A sequence with a grammar ends where that lets nothing follow.
    """
    if tokens < 0:
        raise ConfigError(setting="tokens", given=tokens, allowed="at least 0")
    return continue_tokens(strategy, strategy.engine.start(prompts, sampling), tokens, finished)


def continue_tokens(
    strategy: DecodeStrategy, batch: Batch, tokens: int, finished: Finished | None = None
) -> Iterator[tuple[int, Emitted]]:
    """What `generate_tokens` gives, behind the tokens of sequences that the strategy's engine has started."""
    left = {id(sequence): tokens for sequence in batch}
    numbers = {id(sequence): i for i, sequence in enumerate(batch)}
    active: list[Sequence] = [sequence for sequence in batch if tokens]
    while active:
        with single_threaded_torch(strategy.engine.runtime):
            steps = strategy.step(active)
        for sequence, written in zip(active, steps, strict=True):
            key = id(sequence)
            if sequence.problem is not None:
                raise sequence.problem
            for emitted in written[: left[key]]:
                left[key] -= 1
                yield numbers[key], emitted
                if finished is not None and finished(numbers[key], emitted):
                    left[key] = 0
                    break
        active = [sequence for sequence in active if left[id(sequence)] and not sequence.ends()]


def generate_batch(
    strategy: DecodeStrategy, prompts: Tokens, tokens: int, sampling: Sampling | None = None
) -> list[list[Emitted]]:
    """The `tokens` tokens that follow each prompt."""
    rows: list[list[Emitted]] = [[] for _ in prompts]
    for row, emitted in generate_tokens(strategy, prompts, tokens, sampling=sampling):
        rows[row].append(emitted)
    return rows
