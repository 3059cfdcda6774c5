"""Fitted pools of a run's exits: a weight for each exit, the same for all tokens or by a small map of states.

    z_k (V,), h_k (d,)   what exit k = 1..K predicts, and the state at its end, at one position
    pool                 log p = Σ_k w_k z_k - log Z                       w (K,) any numbers
    router               w(h) = c + B tanh(A u + a),  u = (h_k / rms(h_k))_k         A (R, K d), B (K, R)
    shrinkage            w_k = 1 - H(softmax z_k) / log V                  nothing is fitted

A weight holds an exit's share and its temperature: w_k = share_k / T_k. `topograd calibrate` fits them
(`calibration/fit_pool.py`) and keeps them with the run.

Cost: K readouts of every token instead of one; A has R K d numbers.
Source: "Product of Experts" eqs. 5 to 7, §10.2(3), Appendix C.5.
Limits. What a pool gains is in docs/results/2026-11-18-learned-pools.md. Every exit runs for every token:
nothing leaves early, and drafts are of full depth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from topograd.decode.cache import Batch
from topograd.decode.engine import Engine
from topograd.decode.strategies import DecodeStrategy
from topograd.errors import ConfigError
from topograd.exec.forward import predict
from topograd.nn.draft_stage import unit
from topograd.nn.pooling import pool
from topograd.nn.translator import Readable
from topograd.topology.plan import Plan

Kind = Literal["pool", "router", "shrinkage"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def kind_of(depth: str) -> Kind | None:
    """The pool that a depth names, if it is one."""
    return next((kind for kind in KINDS if kind == depth), None)


@dataclass(frozen=True, eq=False)
class ExitWeights:
    """What was fitted; float32 tensors on the CPU, as the module's head names them."""

    w: Tensor
    c: Tensor
    A: Tensor
    a: Tensor
    B: Tensor

    def routed(self, states: Sequence[Tensor]) -> Tensor:
        """w(h) (n, K) of states (n, d) of every exit."""
        u = torch.cat([unit(h) for h in states], dim=-1)
        c, A, a, B = (x.to(u) for x in (self.c, self.A, self.a, self.B))
        return c + torch.tanh(u @ A.T + a) @ B.T

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {name: getattr(self, name).tolist() for name in ("w", "c", "A", "a", "B")}


@dataclass(frozen=True, eq=False)
class ExitPool:
    """A pool of the exits of a plan; `weights` are None for shrinkage."""

    kind: Kind
    plan: Plan
    weights: ExitWeights | None

    @property
    def stages(self) -> list[int]:
        """The stages whose states it reads."""
        exits = self.plan.predicting()
        return sorted({j for k in exits for j, _ in self.plan.prediction.after(k)} | set(exits))

    def read(self, reader: Readable, outputs: Mapping[int, Tensor]) -> Tensor:
        """Pooled logits (n, V), not normalised, from the states (n, d) of `stages`."""
        exits, after = self.plan.predicting(), self.plan.prediction.after
        logits = [predict(reader, self.plan, outputs, after(k)) for k in exits]
        return self.pooled(logits, [outputs[k] for k in exits])

    def pooled(self, logits: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        """Σ_k w_k z_k of every exit's logits (n, V) and states (n, d)."""
        if self.weights is None:
            return pool(logits, "shrinkage")
        fixed = self.weights.w.to(logits[0])
        w = fixed if self.kind == "pool" else self.weights.routed(states).to(logits[0])
        return weighted(w, torch.stack(list(logits)))


def weighted(w: Tensor, logits: Tensor) -> Tensor:
    """Σ_k w_k z_k of logits (K, n, V), with weights (K,) or (n, K)."""
    columns = w.T if w.dim() == 2 else w[:, None]
    total = columns[0, :, None] * logits[0]
    for k in range(1, len(logits)):
        total = total + columns[k, :, None] * logits[k]
    return total


class PooledExits(DecodeStrategy):
    """Every token by all exits, pooled."""

    def __init__(self, engine: Engine, pool: ExitPool) -> None:
        if engine.exits != pool.plan.predicting():
            problem = f"the pool is of {len(pool.plan.predicting())} exits, the model has {len(engine.exits)}"
            raise ConfigError(problem, setting="depth", given=pool.kind, remedy="use depth full")
        self.engine, self.pool, self.exit = engine, pool, engine.last

    def last_stages(self) -> list[int]:
        return list(self.engine.exits)

    def predictions(self, batch: Batch, counts: Sequence[int] | None = None) -> Tensor:
        outputs = {stage: batch[0].cache.hidden(batch, stage, counts) for stage in self.pool.stages}
        return self.pool.read(self.engine.reader(self.engine.runtime), outputs)
