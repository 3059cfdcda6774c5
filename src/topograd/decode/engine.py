"""The engine: a model made ready to write, and the loop that writes.

A mode (`Prefix`, `Composed`, `wand.Wand`, `speculation.Speculate`) decides how deep each token goes: its
`advance` writes at least one token in every row that is still written. All modes share one cache, so their
keys and values are those of the full model (`cache.py`).

The model sees at most `context` tokens of a row. When a row is full, its older half is forgotten and the rest
is read again; this depends only on the number of tokens, so modes that write the same tokens agree on it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from topograd.decode.cache import Cache, can_decode
from topograd.decode.log_op import compose
from topograd.decode.recompute import RecomputedCache
from topograd.decode.rows import Rows
from topograd.decode.sampling import Sampling, draw, generators, probabilities
from topograd.errors import ConfigError, DivergenceError
from topograd.exec.forward import predict
from topograd.nn.preparation import check_prepared
from topograd.nn.relays import CausalRelay
from topograd.nn.stack import Stack
from topograd.nn.translator import Readable, TranslatedReader, Translator
from topograd.runtime.protocol import Runtime, TorchRuntime, torch_beside
from topograd.topology.branches import Path, branches, path_name
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

AnyCache = Cache | RecomputedCache | Rows
Tokens = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token that was written, and the exit whose prediction it is, counted from 0."""

    token: int
    stage: int
    drafter: str = field(default="", compare=False)
    """Who drafted it; nobody where the model itself predicted it."""


class Engine:
    """A model whose layers are laid out for decoding. A stack without memory is recomputed each time.

    Exits are the stages that predict, in order; modes count them from 0.
    """

    def __init__(
        self,
        stack: Stack,
        topology: Plan | Topology | Configuration | Composition | str,
        context: int | None = None,
        runtime: Runtime | None = None,
        translators: Callable[[], Mapping[int, Translator]] = dict,
    ) -> None:
        """`translators` gives what exits before the last are read through, by head, when one is read."""
        context = stack.context if context is None else context
        if context < 1:
            raise ConfigError(f"context is {context}; it must be at least 1")
        self.plan = Plan.of(topology, len(stack.layers))
        check_prepared(stack, self.plan)
        self.remembers = can_decode(stack)
        if runtime is None:
            runtime = TorchRuntime(stack.for_decoding() if self.remembers else stack)
        self.runtime, self.stack = runtime, runtime.stack
        self.context = context
        self.exits = self.plan.predicting()
        """The stages that predict."""
        self.translators = functools.cache(translators)
        self._last_head = self.plan.stages[self.plan.last].head

    @property
    def last(self) -> int:
        """The last exit, which predicts as the model does."""
        return len(self.exits) - 1

    def branched(self, paths: Sequence[Path]) -> tuple[Engine, tuple[int, ...]]:
        """An engine over paths through the stages, sharing this one's weights, and where each path ends."""
        names = [port.relay for planned in self.plan.stages for port in planned.sends]
        if any(isinstance(self.stack.relay(name), CausalRelay) for name in names):
            raise ConfigError("regions that are joined by interfaces cannot be skipped; use depth full")
        trie = branches(self.plan, paths)
        engine = copy.copy(self)
        engine.plan, engine.exits = trie.plan, trie.plan.predicting()
        return engine, trie.ends

    def stage_of(self, exit_: int) -> int:
        """The stage of an exit, if the model has it."""
        exits = self.exits
        if not 0 <= exit_ < len(exits):
            raise ConfigError(
                f"exit {exit_ + 1} does not exist; the model has {len(exits)} stages that predict: "
                f"give 1 to {len(exits)}"
            )
        return exits[exit_]

    @torch.inference_mode()
    def start(self, prompts: Tokens) -> Cache | RecomputedCache:
        """A cache that holds the end of each prompt, unread."""
        if not prompts or not all(prompts):
            raise ConfigError("a prompt has no token; start with the document separator")
        cache: AnyCache
        if self.remembers:
            cache = Cache(self.runtime, self.plan, self.context, len(prompts))
        else:
            cache = RecomputedCache(self.stack, self.plan, self.context, len(prompts))
        cache.push([list(prompt[-self.context :]) for prompt in prompts])
        return cache

    def append(self, cache: AnyCache, tokens: Tokens) -> None:
        """Give each row one token or none; a row that is full forgets its older half first.

        Like the cache's own methods, for use inside `torch.inference_mode()`.
        """
        new = [list(row) for row in tokens]
        lengths = cache.lengths()
        full = [bool(row) and n == self.context for row, n in zip(new, lengths, strict=True)]
        if any(full):
            for i in range(len(new)):
                if full[i]:
                    half = self.context // 2
                    new[i] = cache.tokens[i][len(cache.tokens[i]) - half :] + new[i]
            cache.truncate([0 if f else n for f, n in zip(full, lengths, strict=True)])
        cache.push(new)

    def run(self, cache: AnyCache, stage: int) -> None:
        """Run what the exit after `stage` predicts by."""
        for each, _ in self.plan.prediction.after(stage):
            cache.run(each)

    def logits(
        self,
        cache: AnyCache,
        stage: int,
        counts: Sequence[int] | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """What the exit after `stage`, which has run, predicts: (rows, most, vocab).

        At the last `counts` positions of each row; for some `tokens` of the vocabulary, or all.
        """
        terms = self.plan.prediction.after(stage)
        hidden = {each: cache.hidden(each, counts) for each, _ in terms}
        return predict(self.reader(self.runtime), self.plan, hidden, terms, tokens)

    def reader(self, reader: Readable) -> Readable:
        """The stack or a runtime, with the exits before the last read through their translators."""
        return TranslatedReader(reader, self.translators, self._last_head)

    @property
    def vocab(self) -> int:
        """How many tokens there are."""
        return self.stack.vocab


class Mode(Protocol):
    """A way of running the stages."""

    engine: Engine

    def begin(self, rows: int) -> None:
        """A new batch of rows: random streams and counts start again."""

    def advance(self, cache: AnyCache, active: Sequence[bool]) -> list[list[Emitted]]:
        """Write at least one token in each active row, and none in the others."""


class Chooser:
    """One token of each row's logits: the likeliest, or drawn with the row's own random stream."""

    def __init__(self, sampling: Sampling, rows: int) -> None:
        self.sampling = sampling
        self.generators = generators(sampling, rows)

    def choose(self, logits: Tensor, active: Sequence[bool]) -> list[int]:
        """A token for each row of logits (rows, vocab); rows that are not active draw nothing."""
        if self.sampling.greedy:
            best, tokens = likeliest(logits)
            check_finite(best)
            return tokens
        each = zip(logits.cpu(), self.generators, active, strict=True)  # one copy for all rows
        return [draw(probabilities(z, self.sampling), g) if on else 0 for z, g, on in each]


def likeliest(logits: Tensor) -> tuple[list[float], list[int]]:
    """The largest logit of each row (rows, vocab), and which it is; the first of several.

    On a CPU by numpy, in one thread: torch's threads would wait for more work, and so take the processor from
    those of another runtime.
    """
    if logits.device.type != "cpu":
        return read_together(*logits.max(-1))
    values = logits.numpy()
    found = values.argmax(-1)
    return values[range(len(values)), found].tolist(), found.tolist()


def read_together(scores: Tensor, tokens: Tensor) -> tuple[list[Any], list[Any]]:
    """Scores and token numbers of one shape as lists, in one copy from a device: exact below 2²⁴ tokens."""
    if scores.device.type == "cpu":
        return scores.tolist(), tokens.tolist()
    dtype = torch.promote_types(scores.dtype, torch.float32)
    first, second = torch.stack((scores.to(dtype), tokens.to(dtype))).cpu()
    return first.tolist(), second.long().tolist()


def check_finite(best: Sequence[float]) -> None:
    """Whether the largest logit of each row is a number; a NaN among the others would be the largest."""
    if not all(-float("inf") < value < float("inf") for value in best):
        raise DivergenceError("the model's logits are not finite, so it cannot write; train it again")


class Prefix:
    """Every token by the stages up to an exit; by default all: full depth, as the model predicts."""

    def __init__(self, engine: Engine, stage: int | None = None, sampling: Sampling | None = None) -> None:
        self.engine = engine
        self.exit = engine.last if stage is None else stage
        self.stage = engine.stage_of(self.exit)
        if self.exit == engine.last and engine.plan.prediction.path is not None:
            self.engine, (self.stage,) = engine.branched([engine.plan.prediction.path])
        self.sampling = sampling or Sampling()

    def begin(self, rows: int) -> None:
        self.chooser = Chooser(self.sampling, rows)

    @torch.inference_mode()
    def advance(self, cache: AnyCache, active: Sequence[bool]) -> list[list[Emitted]]:
        self.engine.run(cache, self.stage)
        tokens = self.chooser.choose(self.engine.logits(cache, self.stage)[:, -1], active)
        return _emit(self.engine, cache, tokens, active, self.exit)


class Composed:
    """Every token by several paths through the stages, pooled in log space (`log_op.py`)."""

    def __init__(
        self, engine: Engine, weights: Mapping[Path, float], sampling: Sampling | None = None
    ) -> None:
        for path, weight in weights.items():
            if not 0 < weight < float("inf"):
                raise ConfigError(
                    f"path {path_name(path)} has weight {weight}; a weight is a positive number"
                )
        self.engine, self.ends = engine.branched(list(weights))
        for path in weights:
            if path[-1] not in engine.exits:
                known = ", ".join(str(k + 1) for k in engine.exits)
                raise ConfigError(
                    f"path {path_name(path)} ends at a stage that was not trained to predict; "
                    f"these were: {known}"
                )
        self.weights = list(weights.values())
        self.exit = engine.exits.index(max(path[-1] for path in weights))
        self.sampling = sampling or Sampling()

    def begin(self, rows: int) -> None:
        self.chooser = Chooser(self.sampling, rows)

    def pooled(self, cache: AnyCache) -> Tensor:
        """Log-probabilities (rows, vocab) of the pool behind the last position of each row."""
        for end in self.ends:
            self.engine.run(cache, end)
        each = [self.engine.logits(cache, end)[:, -1] for end in self.ends]
        return each[0] if len(each) == 1 else compose(each, self.weights)

    @torch.inference_mode()
    def advance(self, cache: AnyCache, active: Sequence[bool]) -> list[list[Emitted]]:
        tokens = self.chooser.choose(self.pooled(cache), active)
        return _emit(self.engine, cache, tokens, active, self.exit)


def _emit(
    engine: Engine, cache: AnyCache, tokens: Sequence[int], active: Sequence[bool], stage: int
) -> list[list[Emitted]]:
    new = [[token] if on else [] for token, on in zip(tokens, active, strict=True)]
    engine.append(cache, new)
    return [[Emitted(token, stage) for token in row] for row in new]


Finished = Callable[[int, Emitted], bool]
"""Whether a row ends with a token; asked after each token that is handed out."""


def generate_tokens(
    mode: Mode, prompts: Tokens, tokens: int, finished: Finished | None = None
) -> Iterator[tuple[int, Emitted]]:
    """Pairs of a row and its next token, until every row has `tokens` of them or is `finished`."""
    if tokens < 0:
        raise ConfigError(f"tokens is {tokens}; it must be at least 0")
    return continue_tokens(mode, mode.engine.start(prompts), tokens, finished)


def continue_tokens(
    mode: Mode, cache: AnyCache, tokens: int, finished: Finished | None = None
) -> Iterator[tuple[int, Emitted]]:
    """What `generate_tokens` gives, behind the tokens of a cache that the mode's engine has started."""
    mode.begin(len(cache.tokens))
    left = [tokens] * len(cache.tokens)
    while any(left):
        with torch_beside(mode.engine.runtime):
            advanced = mode.advance(cache, [n > 0 for n in left])
        for row, written in enumerate(advanced):
            for emitted in written[: left[row]]:
                left[row] -= 1
                yield row, emitted
                if finished is not None and finished(row, emitted):
                    left[row] = 0
                    break


def generate_batch(mode: Mode, prompts: Tokens, tokens: int) -> list[list[Emitted]]:
    """The `tokens` tokens that follow each prompt."""
    rows: list[list[Emitted]] = [[] for _ in prompts]
    for row, emitted in generate_tokens(mode, prompts, tokens):
        rows[row].append(emitted)
    return rows
