"""Output heads: z_k = (W + W_k) x, with W shared and W_k per stage.

    H = sh:  z_k = W x              H = ps:  z_k = (W + W_k) x        "Stage-Partitioned Learning" eq. 4

W_k starts at zero, so that adding per-stage heads changes no output. With `rank` r it is U_k V_k with
U_k (vocab, r) zero and V_k (r, width) random: O(r (vocab + width)) parameters instead of O(vocab · width).
With one stage, moving Δ from W to W_k changes nothing (Remark 5.3): a translation gauge.

A stage s may start from the head of another: z_s = (W + W_k + W_s) x. The whole matrices are added up, each
U V x is added behind, in this order; so with W_s = 0 it is z_k, bit for bit, whole or of low rank.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.stack import Projection, Stack


class LowRankDelta(nn.Module):
    """W_k = U V, for all tokens or some; zero at first because U is."""

    def __init__(self, vocab: int, width: int, rank: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(vocab, rank))
        self.down = nn.Parameter(torch.randn(rank, width) / width**0.5)

    def forward(self, rows: Tensor | None) -> Tensor:
        return (self.up if rows is None else self.up[rows]) @ self.down


class FullDelta(nn.Module):
    """W_k itself, for all tokens or some; zero at first."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocab, width))

    def forward(self, rows: Tensor | None) -> Tensor:
        return self.weight if rows is None else self.weight[rows]


class Head(nn.Module):
    """A shared matrix (vocab, width), and deltas per stage."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        rank: int | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        if rank is not None:
            _checked_rank(rank, weight)
        self.weight = weight
        self.bias = bias
        self.rank = rank
        self.softcap = softcap
        self.deltas = nn.ModuleDict()
        """By stage; a stage without one reads W alone."""
        self.starts: dict[int, int] = {}
        """The stage whose head another's delta is added to; one that is not here starts from W."""

    def add(self, stages: Iterable[int], rank: int | None = None) -> bool:
        """Give these stages a delta, of `rank` or else of the head's own; True if any was missing."""
        missing = [stage for stage in stages if str(stage) not in self.deltas]
        rank = self.rank if rank is None else _checked_rank(rank, self.weight)
        for stage in missing:
            vocab, width = self.weight.shape
            delta = FullDelta(vocab, width) if rank is None else LowRankDelta(vocab, width, rank)
            self.deltas[str(stage)] = delta.to(device=self.weight.device, dtype=self.weight.dtype)
        return bool(missing)

    def _parts(self, stage: int) -> list[nn.Module]:
        """What is added to W for a stage, in order."""
        stages = (self.starts[stage], stage) if stage in self.starts else (stage,)
        return [self.deltas[str(k)] for k in stages if self.has_delta(k)]

    def has_delta(self, stage: int) -> bool:
        """Whether the stage has a head of its own."""
        return str(stage) in self.deltas

    def own_parameters(self, stage: int) -> list[nn.Parameter]:
        """The parameters that only this stage's head has."""
        return list(self.deltas[str(stage)].parameters()) if self.has_delta(stage) else []

    @property
    def last_stage(self) -> int:
        """The last stage that has a delta; 0 where none has."""
        return max(map(int, self.deltas), default=0)

    def matrix(self, stage: int, rows: Tensor | None = None) -> Tensor:
        """W + W_k, or W where stage k has no delta, on `rows` of the vocabulary."""
        return self._sum(self._parts(stage), rows)

    def _sum(self, parts: Iterable[nn.Module], rows: Tensor | None) -> Tensor:
        weight = self.weight if rows is None else self.weight[rows]
        for part in parts:
            weight = weight + part(rows)
        return weight

    def projection(self, normalize: Callable[[Tensor], Tensor], stage: int) -> Projection:
        """The head of a stage behind a norm, for losses."""
        factors = self.low_rank(stage)
        weight = self.matrix(stage) if factors is None else self.weight
        return Projection(normalize, weight, self.bias, self.softcap, factors)

    def low_rank(self, stage: int) -> tuple[Tensor, Tensor] | None:
        """(U, V) of a stage whose matrix is W + U V; None where it is another one, or W."""
        parts = [part for part in self._parts(stage) if isinstance(part, LowRankDelta)]
        if not parts or len(parts) < len(self._parts(stage)):
            return None
        if len(parts) == 1:
            return parts[0].up, parts[0].down
        return torch.cat([part.up for part in parts], 1), torch.cat([part.down for part in parts])

    def forward(self, x: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        bias = self.bias if self.bias is None or rows is None else self.bias[rows]
        parts = self._parts(stage)
        thin = [part for part in parts if isinstance(part, LowRankDelta)]
        z = F.linear(x, self._sum((part for part in parts if part not in thin), rows), bias)
        for part in thin:  # nothing of W's size is made, and with U = 0 the sum stays as it is, bit for bit
            up = part.up if rows is None else part.up[rows]
            z = z + F.linear(F.linear(x, part.down), up)
        return cap(z, self.softcap)


class HeadedStack(Stack):
    """A stack whose readout is a norm and one `Head`, with per-stage deltas: all that stage heads need."""

    head: Head

    @property
    def shared_head(self) -> Head | None:
        return self.head

    def normalize(self, h: Tensor) -> Tensor:
        """The head's input: the norm of a hidden state."""
        return h

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        return self.head(self.normalize(h), stage, rows)

    def projection(self, stage: int) -> Projection | None:
        return self.head.projection(self.normalize, stage)

    def add_heads(self, stages: Iterable[int], rank: int | None = None) -> bool:
        return self.head.add(stages, rank)

    def has_head(self, stage: int) -> bool:
        return self.head.has_delta(stage)

    def head_parameters(self, stage: int) -> list[nn.Parameter]:
        return self.head.own_parameters(stage)

    @property
    def vocab(self) -> int:
        return len(self.head.weight)

    @property
    def last_stage(self) -> int:
        return self.head.last_stage


def _checked_rank(rank: int, weight: Tensor) -> int:
    if not 0 < rank <= min(weight.shape):
        allowed = f"in 1..{min(weight.shape)} (vocabulary, width)"
        raise StackError(setting="head_rank", given=rank, allowed=allowed)
    return rank


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    """c tanh(z / c): logits kept within ±c; None leaves them alone."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
