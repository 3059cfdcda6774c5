"""Specialists at work: one base in memory, any set of them switched on for each request.

    pool = SpecialistPool.open("runs/base", {"chat": "runs/chat", "facts": "runs/facts"})
    pool.model({"chat": 1.0}).generate("Hello", tokens=32)             # a `Model` like any other
    pool.generate(["Hello", "Where is ..."], [{"chat": 1}, {"facts": 0.7}], tokens=32)     # one batch

Models of one pool share the base's weights as they are laid out for decoding, and the specialists'. A mixed
batch runs as one: the base once for all rows, then each specialist that some row wants, then one readout for
each stage on the rows that want it. A row's text is what it would be alone, but for the rounding of another
batch shape.

The runtime is the base's: ONNX Runtime where it can run the model, else torch (`runtime/choice.py`).

Cost: what is inactive is not run. In a mixed batch a specialist's layers run on every row (they are few), its
head on its own rows. A low-rank head costs r (vocab + width) beside the base's head, which is read once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from topograd.decode.engine import AnyCache, Chooser, Emitted, Engine, generate_tokens
from topograd.decode.model import Generated, Model
from topograd.decode.modes import engine_of
from topograd.decode.sampling import Sampling
from topograd.errors import ConfigError
from topograd.runs.session import Session, open_session
from topograd.runs.sidecar import Sidecar
from topograd.specialists.attach import Attached, attach, open_specialist, with_plan
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
        base: Session | Path | str,
        specialists: Mapping[str, Path | str | Sidecar],
        pool: Pool = "deltas",
        runtime: str | None = None,
        weights: str = "float32",
    ) -> SpecialistPool:
        """The base in a folder with specialists by name; those of another base are refused."""
        opened = {
            name: given if isinstance(given, Sidecar) else open_specialist(given)
            for name, given in specialists.items()
        }
        session = base if isinstance(base, Session) else _open_base(Path(base), list(opened.values()))
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

    def mode(self, rows: Sequence[Weights], sampling: Sampling | None = None) -> Mixed:
        """A way of writing a batch whose rows have these specialists."""
        return Mixed(self, rows, sampling or Sampling())

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
                f"{len(prompts)} prompts and {len(rows)} sets of specialists; give one for each"
            )
        model = self.model()
        begun = [model.encode(p) if isinstance(p, str) else list(p) for p in prompts]
        written: list[list[int]] = [[] for _ in prompts]
        ends = self.attached.base.tokenizer.stop_tokens
        mode = self.mode(rows, sampling)
        for row, emitted in generate_tokens(mode, begun, tokens, lambda _, e: e.token in ends):
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
        """As `Model.generate`; the base's calibration says nothing of a composition, so full depth."""
        if depth is not None and depth.startswith("wand"):
            raise ConfigError("wand is calibrated for a base alone; use another depth with specialists")
        return super().generate(prompt, tokens, depth=depth or "full", **settings)  # type: ignore[arg-type]


class Mixed:
    """Rows of one batch, each with specialists of its own: the base runs once for all of them."""

    def __init__(self, pool: SpecialistPool, rows: Sequence[Weights], sampling: Sampling) -> None:
        self.engine, self.sampling = pool.engine, sampling
        self.terms: list[Terms] = [composed_terms(pool.attached, weights, pool.pool) for weights in rows]
        wanted = sorted({stage for terms in self.terms for stage, _ in terms})
        self.readers: dict[int, tuple[list[int], list[float]]] = {}
        for stage in wanted:
            share = {row: dict(terms)[stage] for row, terms in enumerate(self.terms) if stage in dict(terms)}
            self.readers[stage] = list(share), list(share.values())
        self.exits = [self.engine.exits.index(terms[-1][0]) for terms in self.terms]

    def begin(self, rows: int) -> None:
        if rows != len(self.terms):
            raise ConfigError(f"the batch has {rows} rows and specialists are given for {len(self.terms)}")
        self.chooser = Chooser(self.sampling, rows)

    def logits(self, cache: AnyCache) -> Tensor:
        """What each row predicts next: (rows, vocab)."""
        total: Tensor | None = None
        for stage, (rows, weights) in self.readers.items():
            cache.run(stage)
            h = cache.hidden(stage)
            some = h if len(rows) == len(h) else h[rows]
            z = self.engine.runtime.readout(some, self.engine.plan.stages[stage].head)[:, -1]
            if any(weight != 1 for weight in weights):
                z = z * z.new_tensor(weights)[:, None]
            total = z.new_zeros(len(h), z.shape[-1]) if total is None else total
            total[rows] += z
        assert total is not None, "a row has a term"
        return total

    @torch.inference_mode()
    def advance(self, cache: AnyCache, active: Sequence[bool]) -> list[list[Emitted]]:
        tokens = self.chooser.choose(self.logits(cache), active)
        new = [[token] if on else [] for token, on in zip(tokens, active, strict=True)]
        self.engine.append(cache, new)
        return [[Emitted(t, exit_) for t in row] for row, exit_ in zip(new, self.exits, strict=True)]


def open_composed(
    base: Path | str,
    specialists: str,
    pool: Pool = "deltas",
    runtime: str | None = None,
    weights: str = "float32",
) -> ComposedModel:
    """The base in a folder with specialists as users write them: folders, with weights where not 1."""
    opened, active = open_named(specialists)
    return SpecialistPool.open(base, opened, pool, runtime, weights).model(active)


def open_named(specialists: str) -> tuple[dict[str, Sidecar], dict[str, float]]:
    """Specialists as users write them, opened, and their weights; both by the names of the folders."""
    asked = parse_specialists(specialists)
    opened = {Path(folder).resolve().name: open_specialist(folder) for folder in asked}
    if len(opened) < len(asked):
        raise ConfigError(f"specialists {specialists!r} have two folders of one name; rename one")
    return opened, dict(zip(opened, asked.values(), strict=True))


def _open_base(folder: Path, sidecars: Sequence[Sidecar]) -> Session:
    """The run at the checkpoint that the specialists are of; others are refused when they are attached."""
    return sidecars[0].open_base(folder) if sidecars else open_session(folder)
