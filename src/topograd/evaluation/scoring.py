"""Log-probabilities of given tokens at every depth, from one pass.

    z_k(t)       logits of depth k before token t; log p_k(t) = z_k(t)_t - logsumexp z_k(t)
    score        Σ_t log p_k(t) over the scored tokens t = start..n-1 of a sequence
    rank         1 + how many tokens have a larger logit; a token is `greedy` where it is the argmax

What is scored together is a *bundle*: sequences that begin alike, such as the choices of one question. Their
common tokens are run once, in one sequence of the cache; it is then forked as often as there are sequences
(`Cache.fork`), and each continues with its own tokens. The head, which for a large vocabulary costs a quarter
of a small model, is read at scored positions only; every depth reads the same pass.

A depth is a weighted sum of stages' logits: an exit as the plan says, a path, or several paths pooled in log
space, whose weights sum to 1 ("Product of Experts" eq. 6, 7); or it is a pool of all exits whose weights may
be each token's own (`decode/exit_pool.py`). Sequence probabilities rather than single
tokens are what its §8.2.1 asks for.

Cost: shared + Σ_i (n_i - shared) positions a bundle instead of Σ_i n_i; K readouts of the scored positions.

Batches are cut by length, `batch_tokens` padded positions each. A score is a function of its bundle alone: in
float64 every bundle is a batch by itself, so neither batch size nor order changes a bit. In float32 the last
bits of a product depend on how many rows it has; `batch_tokens=1` makes every bundle a batch there too, and
how far larger batches move a score is in docs/how-to/evaluate.md.

Limits. A stack that keeps no states computes what is shared again. Sequences must fit into the context: `cut`
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.decode.cache import Batch
from topograd.decode.calibration.store import open_pool
from topograd.decode.engine import Engine
from topograd.decode.exit_pool import ExitPool, PooledExits, kind_of
from topograd.decode.strategies import PathEnsemble
from topograd.errors import ConfigError
from topograd.exec.forward import predict
from topograd.runs.session import LoadedTextRun
from topograd.topology.branches import parse_branches, parse_path
from topograd.topology.prediction import Terms

BATCH_TOKENS = 512
HEAD_BYTES = 2**26
"""Logits that are made at a time, in bytes."""

DEPTHS = "full, prefix:J, path:1,3, branches:1-4*3+1-2, pool, router or shrinkage"
OnMore = Callable[[int, int], None]
Depth = Terms | ExitPool


@dataclass(frozen=True)
class TokenRow:
    """Tokens of which those from `start` on are scored; at least one stands before them."""

    tokens: Sequence[int]
    start: int

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.tokens):
            allowed = f"1 to {len(self.tokens) - 1}: a token or more are scored, behind another"
            raise ConfigError(setting="start", given=self.start, allowed=allowed)

    def cut(self, most: int) -> TokenRow:
        """The last `most` tokens; scored ones that then have nothing before them are left out."""
        gone = max(0, len(self.tokens) - most)
        return TokenRow(self.tokens[gone:], max(self.start - gone, 1)) if gone else self


Bundle = Sequence[TokenRow]
"""Sequences that begin alike."""


@dataclass(frozen=True, eq=False)
class Score:
    """What each depth makes of the scored tokens of one sequence: tensors (depths, tokens) on the CPU."""

    logprob: Tensor
    """float64."""
    logit: Tensor
    rank: Tensor
    """1 is the likeliest."""
    greedy: Tensor
    """Whether the token is the one that a greedy decoder would write."""

    @property
    def total(self) -> list[float]:
        """The log-probability of all scored tokens, for each depth."""
        return [float(x) for x in self.logprob.sum(-1)]

    @property
    def mean_loss(self) -> list[float]:
        """The mean cross-entropy of the scored tokens, in nats, for each depth."""
        return [-float(x) for x in self.logprob.mean(-1)]


class Scorer:
    """Scores bundles with an engine, at every exit or at one depth that is named."""

    def __init__(
        self,
        engine: Engine,
        depth: str | None = None,
        *,
        batch_tokens: int = BATCH_TOKENS,
        session: LoadedTextRun | None = None,
    ) -> None:
        """`session` is the run whose calibration has the weights of depth pool and router."""
        if batch_tokens < 1:
            raise ConfigError(setting="batch_tokens", given=batch_tokens, allowed="at least 1")
        self.parts: list[tuple[Engine, Sequence[Depth]]]
        if depth is None:
            self.parts = [*exits_of(engine)]
        elif session is not None and (kind := kind_of(depth)) is not None:
            self.parts = [(engine, [PooledExits(engine, open_pool(session, kind)).pool])]
        else:
            self.parts = [depth_of(engine, depth)]
        self.context = engine.context
        self.batch_tokens = batch_tokens

    @property
    def depths(self) -> int:
        """How many depths are scored."""
        return sum(len(depths) for _, depths in self.parts)

    def score(self, bundles: Sequence[Bundle], on_more: OnMore | None = None) -> list[list[Score]]:
        """A score for each sequence of each bundle; `on_more` is told how many bundles are done."""
        for bundle in bundles:
            for row in bundle:
                if len(row.tokens) - 1 > self.context:
                    problem = f"a sequence has {len(row.tokens)} tokens and the model reads {self.context}"
                    raise ConfigError(problem, setting="tokens", given=len(row.tokens), remedy="cut it")
        scores: list[list[Score]] = [[] for _ in bundles]
        done = 0
        for batch in self._batches(bundles):
            for place, result in zip(batch, self._batch([bundles[i] for i in batch]), strict=True):
                scores[place] = result
            done += len(batch)
            if on_more is not None:
                on_more(done, len(bundles))
        return scores

    def _batches(self, bundles: Sequence[Bundle]) -> Iterator[list[int]]:
        """Indices of bundles of like length, as many as fit into a batch; empty bundles need none."""
        shape = [(common(bundle), max((len(r.tokens) for r in bundle), default=0)) for bundle in bundles]
        order = sorted((i for i, bundle in enumerate(bundles) if bundle), key=lambda i: (shape[i], i))
        alone = next(self.parts[0][0].stack.parameters()).dtype == torch.float64
        batch: list[int] = []
        for i in order:
            longest = max([shape[j][1] for j in (*batch, i)])
            mixed = bool(batch) and (shape[batch[0]][0] > 0) != (shape[i][0] > 0)
            if batch and (alone or mixed or (len(batch) + 1) * longest > self.batch_tokens):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    @torch.inference_mode()
    def _batch(self, batch: Sequence[Bundle]) -> list[list[Score]]:
        rows = [row for bundle in batch for row in bundle]
        parts = [_read(engine, depths, _run(engine, depths, batch), rows) for engine, depths in self.parts]
        joined = [
            Score(*(torch.cat([getattr(part[i], name) for part in parts]) for name in _COLUMNS))
            for i in range(len(rows))
        ]
        results = iter(joined)
        return [[next(results) for _ in bundle] for bundle in batch]


_COLUMNS = ("logprob", "logit", "rank", "greedy")


def exits_of(engine: Engine) -> list[tuple[Engine, list[Terms]]]:
    """Every exit as the model predicts there; a last one that is a path has an engine of its own."""
    prediction = engine.plan.prediction
    exits = [prediction.after(stage) for stage in engine.exits]
    if prediction.path is None:
        return [(engine, exits)]
    branched, (end,) = engine.branched([prediction.path])
    path: Terms = ((end, 1.0),)
    return [(engine, exits[:-1]), (branched, [path])] if exits[:-1] else [(branched, [path])]


def depth_of(engine: Engine, depth: str) -> tuple[Engine, list[Terms]]:
    """A depth as users name it: full, prefix:J, path:1,3 or branches:1-4*3+1-2."""
    kind, _, rest = depth.partition(":")
    if kind == "full" and not rest:
        part, exits = exits_of(engine)[-1]
        return part, exits[-1:]
    if kind == "prefix" and rest.isdecimal():
        engine.stage_of(int(rest) - 1)
        each = [(part, terms) for part, depths in exits_of(engine) for terms in depths]
        part, terms = each[int(rest) - 1]
        return part, [terms]
    if kind in ("path", "branches"):
        pool = PathEnsemble(engine, {parse_path(rest): 1.0} if kind == "path" else parse_branches(rest))
        total, after = sum(pool.weights), pool.engine.plan.prediction.after
        paths = zip(pool.ends, pool.weights, strict=True)
        return pool.engine, [tuple((k, w * weight / total) for end, weight in paths for k, w in after(end))]
    raise ConfigError(f"depth {depth!r} is unknown", setting="depth", given=depth, remedy=f"use {DEPTHS}")


def common(bundle: Bundle) -> int:
    """How many leading tokens are run once for all: before the last that stands before a scored one."""
    if len(bundle) < 2:
        return 0
    most = min(row.start for row in bundle) - 1
    first = bundle[0].tokens
    for place in range(most):
        if any(row.tokens[place] != first[place] for row in bundle):
            return place
    return most


def _run(engine: Engine, depths: Sequence[Depth], batch: Sequence[Bundle]) -> Batch:
    """Sequences that hold every one of the batch but its last token, run as deep as the depths need."""
    shared = [common(bundle) for bundle in batch]
    if not all(shared):
        rows = engine.start([row.tokens[:-1] for bundle in batch for row in bundle])
    else:
        begun = engine.start([bundle[0].tokens[:n] for bundle, n in zip(batch, shared, strict=True)])
        cache = begun[0].cache
        for stage in _stages(depths):
            cache.run(begun, stage)
        rows = [
            cache.fork(first) if i else first
            for first, bundle in zip(begun, batch, strict=True)
            for i in range(len(bundle))
        ]
        rest = [row.tokens[n:-1] for bundle, n in zip(batch, shared, strict=True) for row in bundle]
        cache.push(rows, rest)
    for stage in _stages(depths):
        rows[0].cache.run(rows, stage)
    return rows


def _stages(depths: Sequence[Depth]) -> list[int]:
    return sorted({stage for depth in depths for stage in _read_by(depth)})


def _read_by(depth: Depth) -> list[int]:
    return depth.stages if isinstance(depth, ExitPool) else [stage for stage, _ in depth]


def _read(engine: Engine, depths: Sequence[Depth], batch: Batch, rows: Sequence[TokenRow]) -> list[Score]:
    """The scores of every row, from the hidden states that predict its scored tokens."""
    counts = [len(row.tokens) - row.start for row in rows]
    flat = {stage: batch[0].cache.hidden(batch, stage, counts) for stage in _stages(depths)}
    targets = torch.tensor([token for row in rows for token in row.tokens[row.start :]])
    columns = [_columns(engine, flat, depth, targets) for depth in depths]
    each = [torch.stack([column[i] for column in columns]).split(counts, dim=1) for i in range(len(_COLUMNS))]
    return [Score(*(column[i] for column in each)) for i in range(len(rows))]


def _columns(engine: Engine, flat: dict[int, Tensor], depth: Depth, targets: Tensor) -> list[Tensor]:
    """log p, logit, rank and greedy of each target, the head in chunks of tokens."""
    parts = []
    step, start = 32, 0
    while start < len(targets):
        stop = start + step
        outputs = {stage: flat[stage][start:stop] for stage in _read_by(depth)}
        reader = engine.reader(engine.stack)
        if isinstance(depth, ExitPool):
            z = depth.read(reader, outputs)
        else:
            z = predict(reader, engine.plan, outputs, depth)
        t = targets[start:stop].to(z.device)[:, None]
        own = z.gather(-1, t)
        logprob = own.double() - torch.logsumexp(z, -1, keepdim=True).double()
        rank = (z > own).sum(-1) + 1
        greedy = z.argmax(-1) == t[:, 0]
        parts.append([x.cpu() for x in (logprob[:, 0], own[:, 0], rank, greedy)])
        start, step = stop, max(1, HEAD_BYTES // (z.shape[-1] * z.element_size()))
    return [torch.cat(column) for column in zip(*parts, strict=True)]
