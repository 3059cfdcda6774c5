"""Generation with specialists: one base in memory, any set of them per request.

    pool = SpecialistPool.open("runs/base", {"chat": "runs/chat", "facts": "runs/facts"})
    pool.model({"chat": 1.0}).generate("Hello", tokens=32)             # a `Model` like any other
    pool.generate(["Hello", "Where is ..."], [{"chat": 1}, {"facts": 0.7}], tokens=32)     # one batch

Models of one pool share the base's weights as they are laid out for decoding, and the specialists'. A mixed
batch runs as one: the base once for all sequences, then each specialist on those that want it, then one
readout for each stage. A text is what it would be alone, but for the rounding of another batch shape.

The runtime is the base's: the fastest that can run the model (`runtime/choice.py`).

Cost: what is inactive is not run. A low-rank head costs r (vocab + width) beside the base's head, which is
read once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from topograd.decode.cache import Batch
from topograd.decode.depths import engine_of
from topograd.decode.engine import Emitted, Engine, choose
from topograd.decode.model import SOURCES, Generated, Model
from topograd.decode.sampling import Sampling
from topograd.decode.strategies import DecodeStrategy, generate_tokens
from topograd.errors import ConfigError
from topograd.runs.adapter import Adapter
from topograd.runs.session import LoadedTextRun, open_session
from topograd.runtime.choice import check_runtime
from topograd.specialists.attach import Attached, attach, by_folder, open_specialist, with_plan
from topograd.specialists.composition import Pool, Weights, composed, composed_terms, parse_specialists
from topograd.specialists.tokens import Vocabulary
from topograd.topology.prediction import Terms


class SpecialistPool:
    """A base with specialists attached."""

    def __init__(
        self,
        attached: Attached,
        pool: Pool = "deltas",
        runtime: str | None = None,
        weights: str = "float32",
    ) -> None:
        self.attached, self.pool = attached, pool
        self.runtime, self.precision = runtime, weights

    @classmethod
    def open(
        cls,
        base: LoadedTextRun | Path | str,
        specialists: Mapping[str, Path | str | Adapter],
        pool: Pool = "deltas",
        runtime: str | None = None,
        weights: str = "float32",
    ) -> SpecialistPool:
        """A model with specialists by name; those of another base are refused."""
        opened = {
            name: given if isinstance(given, Adapter) else open_specialist(given)
            for name, given in specialists.items()
        }
        if isinstance(base, LoadedTextRun):
            session = base
        else:  # at the checkpoint that the specialists belong to
            first = next(iter(opened.values()), None)
            folder = SOURCES["any"](base)
            session = open_session(folder) if first is None else first.open_base(folder)
        return cls(attach(session, opened), pool, runtime, weights)

    @property
    def names(self) -> list[str]:
        """The specialists, in order."""
        return list(self.attached.stages)

    @property
    def vocabulary(self) -> Vocabulary:
        """The base's tokens and those that the specialists added."""
        return self.attached.vocabulary

    @cached_property
    def engine(self) -> Engine:
        """Base and specialists laid out for decoding; made when it is first used."""
        return engine_of(with_plan(self.attached, self.attached.plan), self.runtime, self.precision)

    def model(self, weights: Weights | None = None) -> ComposedModel:
        """The base with these specialists active, as a model; without any, the base."""
        return ComposedModel(self, weights or {})

    def strategy(self, rows: Sequence[Weights]) -> Mixed:
        """How a batch is decoded whose sequences, by their number, have these specialists."""
        return Mixed(self, rows)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        rows: Sequence[Weights],
        tokens: int = 200,
        sampling: Sampling | None = None,
    ) -> list[list[int]]:
        """The tokens that follow each prompt, each with the specialists of its row, as one batch."""
        if len(prompts) != len(rows):
            raise ConfigError(
                setting="specialists", given=len(rows), allowed=f"{len(prompts)}, one set for each prompt"
            )
        model = self.model()
        begun = [model.encode(p) if isinstance(p, str) else list(p) for p in prompts]
        written: list[list[int]] = [[] for _ in prompts]
        ends = self.attached.base.tokenizer.stop_tokens
        mixed = self.strategy(rows)
        for row, emitted in generate_tokens(mixed, begun, tokens, lambda _, e: e.token in ends, sampling):
            written[row].append(emitted.token)
        return written


class ComposedModel(Model):
    """A base with a set of specialists active, as a model."""

    def __init__(self, pool: SpecialistPool, weights: Weights) -> None:
        self.pool, self.weights = pool, dict(weights)
        super().__init__(with_plan(pool.attached, composed(pool.attached, weights, pool.pool)))

    @cached_property
    def engine(self) -> Engine:
        """The pool's engine, predicting as this composition does."""
        engine = copy.copy(self.pool.engine)
        engine.plan = self.session.plan
        return engine

    def encode(self, prompt: str) -> list[int]:
        vocabulary = self.pool.vocabulary
        return vocabulary.encode(prompt) if vocabulary.new else super().encode(prompt)

    def generate(
        self,
        prompt: str | Sequence[int] = "",
        tokens: int = 200,
        *,
        depth: str | None = None,
        **settings: object,
    ) -> Generated:
        """As `Model.generate`; a composition has no calibration, so full depth."""
        kind = (depth or "").partition(":")[0]
        if kind in ("wand", "pool", "router"):
            raise ConfigError(
                setting="depth",
                given=depth,
                allowed=f"another with specialists: {kind} is calibrated for a base",
            )
        return super().generate(prompt, tokens, depth=depth or "full", **settings)  # type: ignore[arg-type]


class Mixed(DecodeStrategy):
    """Sequences of one batch, each with specialists of its own: the base runs once for all of them."""

    def __init__(self, pool: SpecialistPool, rows: Sequence[Weights]) -> None:
        self.engine = pool.engine
        self.terms: list[Terms] = [composed_terms(pool.attached, weights, pool.pool) for weights in rows]
        plan = self.engine.plan
        self.needed = [{p.index for stage, _ in terms for p in plan.needed(stage)} for terms in self.terms]
        self.exits = [self.engine.exits.index(terms[-1][0]) for terms in self.terms]
        self.exit = max(self.exits)

    def last_stages(self) -> list[int]:
        return sorted({stage for terms in self.terms for stage, _ in terms})

    def logits(self, batch: Batch) -> Tensor:
        """What each sequence predicts next: (rows, vocab)."""
        if max(sequence.index for sequence in batch) >= len(self.terms):
            raise ConfigError(
                setting="specialists", given=len(self.terms), allowed="one set for each sequence"
            )
        self._run(batch)
        total: Tensor | None = None
        for stage in self.last_stages():
            shares = [dict(self.terms[sequence.index]).get(stage) for sequence in batch]
            rows = [row for row, share in enumerate(shares) if share is not None]
            if not rows:
                continue
            some = [batch[row] for row in rows]
            h = some[0].cache.hidden(some, stage)
            z = self.engine.runtime.readout(h, self.engine.plan.stages[stage].head)
            weights = [share for share in shares if share is not None]
            if any(weight != 1 for weight in weights):
                z = z * z.new_tensor(weights)[:, None]
            total = z.new_zeros(len(batch), z.shape[-1]) if total is None else total
            total[rows] += z
        assert total is not None, "a sequence has a term"
        return total

    def _run(self, batch: Batch) -> None:
        """Each stage once, for all sequences that need it."""
        for stage in range(len(self.engine.plan.stages)):
            some = [sequence for sequence in batch if stage in self.needed[sequence.index]]
            if some:
                some[0].cache.run(some, stage)

    @torch.inference_mode()
    def step(self, batch: Batch) -> list[list[Emitted]]:
        tokens = choose(self.logits(batch), batch)
        self.engine.append(batch, [[token] for token in tokens])
        exits = [self.exits[sequence.index] for sequence in batch]
        return [[Emitted(token, exit_)] for token, exit_ in zip(tokens, exits, strict=True)]


def open_composed(
    base: Path | str,
    specialists: str,
    pool: Pool = "deltas",
    runtime: str | None = None,
    weights: str = "float32",
) -> ComposedModel:
    """A model with specialists as users write them: folders, with weights where not 1."""
    check_runtime(runtime, weights)
    opened, active = open_named(specialists)
    return SpecialistPool.open(base, opened, pool, runtime, weights).model(active)


def open_named(specialists: str) -> tuple[dict[str, Adapter], dict[str, float]]:
    """Specialists as users write them, opened, and their weights; both by the names of the folders."""
    given = parse_specialists(specialists)
    opened = by_folder([open_specialist(folder) for folder in given])
    return opened, dict(zip(opened, given.values(), strict=True))
