"""The fit of a run's exit pool on held-out text: the best weights, and a router from there on.

Symbols as in `exit_pool.py`. Both fits minimise the cross-entropy of Σ_k w_k z_k. That of w is convex:
Newton's steps, gradient E[Σ_v p_v z_kv - z_ky], Hessian the mean covariance of the z_k under p, in float64.
The router starts at the fitted w (B = 0), is trained on three of four windows and is kept as it was at the
epoch that did best on the fourth; so on those it is never worse than the pool.

Cost: some twenty passes of K readouts over at most `FIT_LOGITS` / V tokens, whose states are kept.
Limits. Few tokens where the vocabulary is large: the router then stays where it starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.data.windows import Text
from topograd.decode.exit_pool import KINDS, ExitPool, ExitWeights, weighted
from topograd.decode.retrofitted import open_exits
from topograd.exec.forward import predict, stage_outputs
from topograd.nn.translator import Readable, TranslatedReader
from topograd.runs.session import LoadedTextRun
from topograd.topology.plan import Plan

HIDDEN = 8
"""R, the router's hidden numbers."""
FIT_LOGITS = 2**24
"""Logits of one exit that a fit reads, at most."""
BATCH = 256
"""Tokens whose logits are there at a time."""
EPOCHS, PATIENCE, RATE, DECAY = 20, 3, 5e-4, 0.1
NEWTON = 20
"""Newton's steps; a fit stops before where nothing is gained any more."""

Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Gives pairs of logits (K, n, V) and targets (n,), the same each time."""


@dataclass(frozen=True, eq=False)
class ExitStates:
    """States of some windows of text at all that a pool reads, and how logits are read from them."""

    plan: Plan
    reader: Readable
    windows: list[tuple[dict[int, Tensor], Tensor]]
    """States (n, d) by stage, and targets (n,), of each window."""

    @classmethod
    @torch.no_grad()
    def read(cls, session: LoadedTextRun, text: Text, windows: Iterable[int]) -> ExitStates:
        """The states of these windows, until `FIT_LOGITS` are reached."""
        stack, plan = session.stack, session.plan
        exits = open_exits(session)
        reader = TranslatedReader(stack, lambda: exits, plan.stages[plan.last].head)
        wanted, device = ExitPool("shrinkage", plan, None).stages, next(stack.parameters()).device
        found, tokens = [], 0
        for row in windows:
            counted = text.targets[row] != -100
            outputs = stage_outputs(stack, plan, text.inputs[row : row + 1].to(device), wanted)
            states = {k: h[0][counted.to(device)] for k, h in outputs.items()}
            found.append((states, text.targets[row][counted].to(device)))
            tokens += int(counted.sum())
            if tokens * stack.vocab >= FIT_LOGITS:
                break
        return cls(plan, reader, found)

    def split(self) -> tuple[ExitStates, ExitStates]:
        """Three of four windows to learn on, and every fourth."""
        learn = [w for i, w in enumerate(self.windows) if i % 4 != 3]
        return ExitStates(self.plan, self.reader, learn), ExitStates(
            self.plan, self.reader, self.windows[3::4]
        )

    @torch.no_grad()
    def batches(self) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Logits (K, n, V), targets (n,) and the states (n, d) of every exit, `BATCH` tokens at a time."""
        exits, after = self.plan.predicting(), self.plan.prediction.after
        for states, targets in self.windows:
            for start in range(0, len(targets), BATCH):
                some = {k: h[start : start + BATCH] for k, h in states.items()}
                logits = torch.stack([predict(self.reader, self.plan, some, after(k)) for k in exits])
                yield logits, targets[start : start + BATCH], [some[k] for k in exits]


def fit(states: ExitStates, seed: int = 0) -> ExitWeights:
    """The best weights, and the best router from there on."""
    w = fit_weights(lambda: ((z, y) for z, y, _ in states.batches())).float().cpu()
    learn, check = states.split()
    width = sum(h.shape[-1] for h in next(states.batches())[2])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, last = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, len(w))
    nn.init.zeros_(last.weight)
    with torch.no_grad():
        last.bias.copy_(w)
    parts = (last.bias, first.weight, first.bias, last.weight)
    best = ExitWeights(w, *(p.detach().clone() for p in parts))
    if not check.windows:
        return best
    optimizer = torch.optim.AdamW(parts, lr=RATE, weight_decay=DECAY)
    least, since = _loss(best, check), 0
    for _ in range(EPOCHS):
        for logits, targets, hidden in learn.batches():
            now = ExitWeights(w, *parts)
            loss = F.cross_entropy(weighted(now.routed(hidden), logits), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        now = ExitWeights(w, *(p.detach().clone() for p in parts))
        reached, since = _loss(now, check), since + 1
        if reached < least:
            best, least, since = now, reached, 0
        if since == PATIENCE:
            break
    return best


@torch.no_grad()
def _loss(weights: ExitWeights, states: ExitStates) -> float:
    total = 0.0
    for logits, targets, hidden in states.batches():
        total += float(F.cross_entropy(weighted(weights.routed(hidden), logits), targets, reduction="sum"))
    return total


@torch.no_grad()
def fit_weights(batches: Batches) -> Tensor:
    """The weights (K,) in float64 that minimise the cross-entropy of Σ w_k z_k, by Newton's steps."""
    w: Tensor | None = None
    best = math.inf
    for _ in range(NEWTON):
        loss, count = 0.0, 0
        gradient = second = torch.zeros(())
        for logits, targets in batches():
            z = logits.double()
            if w is None:
                w = torch.zeros(len(z), dtype=z.dtype, device=z.device)
                w[-1] = 1
            own = z.gather(-1, targets.expand(len(z), -1)[..., None])[..., 0]
            log_p = weighted(w, z).log_softmax(-1)
            loss -= float(log_p.gather(-1, targets[:, None]).sum())
            p = log_p.exp()
            means = torch.einsum("nv,knv->kn", p, z)
            gradient = gradient + (means - own).sum(-1)
            second = second + torch.einsum("nv,jnv,knv->jk", p, z, z) - means @ means.T
            count += len(targets)
        assert w is not None, "there is text"
        if best - loss / count < 1e-13:
            break
        best = loss / count
        hessian = second / count + 1e-9 * torch.eye(len(w), dtype=w.dtype, device=w.device)
        step = torch.linalg.solve(hessian, gradient / count)
        w = w - step * min(1.0, 1.0 / float(step.abs().max().clamp_min(1e-12)))
    assert w is not None
    return w


@torch.no_grad()
def window_nats(states: ExitStates, weights: ExitWeights) -> dict[str, list[float]]:
    """The cross-entropy of every window, in nats: of the last exit and of each pool."""
    pools = {kind: ExitPool(kind, states.plan, None if kind == "shrinkage" else weights) for kind in KINDS}
    rows: dict[str, list[float]] = {name: [] for name in ("last", *KINDS)}
    for window in states.windows:
        sums = dict.fromkeys(rows, 0.0)
        for logits, targets, hidden in ExitStates(states.plan, states.reader, [window]).batches():
            each: dict[str, Tensor] = {"last": logits[-1]}
            for kind, pooled in pools.items():
                each[kind] = pooled.pooled(list(logits), hidden)
            for name, z in each.items():
                sums[name] += float(F.cross_entropy(z, targets, reduction="sum"))
        for name, value in sums.items():
            rows[name].append(value)
    return rows
