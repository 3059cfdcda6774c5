"""Cached teacher logits: the largest k of each position, and the mass of the rest.

    store = write_teacher(folder, Predictor(stack, plan), inputs, targets, name=session.weights, top=32)
    train_step(student, plan, batch.inputs, batch.targets, teacher=store.logits(rows))

For every position the k largest logits t_1..t_k of the teacher with their tokens, and the logarithm of what
is left, log(Z - Σ exp t_i). The teacher's distribution is given back with the rest spread evenly over the
other tokens: exact for the k tokens, and the right mass elsewhere. So `distillation` (`objectives.py`) works
on it as on a teacher that runs; with k = vocab it is the same. Any run can teach ("Product of Experts" §10.2
item 2).

The files are those of `row_cache.py`: tokens (rows, time, k) int32, values (rows, time, k) and rest (rows,
time) float32, and vocab (rows,).

`train --teacher RUN --teacher-top K` keeps them in the student's folder: `TeacherLogitRows` are sequences
with the teacher's logits.

Cost: one forward of the teacher; 8 k + 4 bytes a position instead of 4 vocab. Limits: rows are those given,
in that order.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from topograd.errors import ConfigError
from topograd.exec.forward import Predictor
from topograd.exec.objectives import Logits
from topograd.training.activation_cache import OnRows, SequenceStore, StateBatch
from topograd.training.row_cache import RowCache, cached_rows

WHAT = "teacher logits"
SHARD_ROWS = 64


@dataclass(frozen=True)
class SparseTeacher:
    """Kept logits, verified."""

    cache: RowCache

    def logits(self, rows: Sequence[int]) -> Logits:
        """The teacher's logits for a batch of these rows, made by the chunk."""
        parts = self.cache.take(rows)
        vocab = int(parts.pop("vocab")[0])
        tokens, values, rest = (parts[name].flatten(0, 1) for name in ("tokens", "values", "rest"))
        left = math.log(max(vocab - tokens.shape[1], 1))

        def chunk(where: slice) -> Tensor:
            dense = (rest[where] - left)[:, None].expand(-1, vocab).clone()
            return dense.scatter_(1, tokens[where].long(), values[where])

        return chunk


@dataclass(frozen=True)
class TeacherLogitRows:
    """Rows of text, with hidden states or without, and what a teacher predicts on each."""

    store: SequenceStore
    teacher: SparseTeacher
    device: str

    def __len__(self) -> int:
        return len(self.store)

    def rows(self, chosen: Sequence[int] | np.ndarray) -> StateBatch:
        picked = [int(row) for row in chosen]
        logits = self.teacher.logits(picked)
        return replace(self.store.rows(picked), teacher=lambda where: logits(where).to(self.device))


@torch.no_grad()
def write_teacher(
    folder: Path | str,
    teacher: Predictor,
    inputs: Tensor,
    targets: Tensor,
    *,
    name: str,
    top: int = 32,
    batch: int = 4,
    on_rows: OnRows | None = None,
) -> SparseTeacher:
    """The teacher's logits on these rows: opened if complete, continued if begun, else computed.

    `name` identifies the teacher's weights (`LoadedTextRun.weights`).
    """
    if top < 1:
        raise ConfigError(setting="top", given=top, allowed="at least 1")
    data = hashlib.sha256(torch.stack((inputs, targets)).numpy().tobytes()).hexdigest()
    key = {"teacher": name, "data": data, "top": top, "rows": len(inputs)}
    device = next(teacher.parameters()).device

    def make(rows: range) -> dict[str, Tensor]:
        some = inputs[rows.start : rows.stop].split(batch)
        parts = [_largest(teacher(part.to(device)), top) for part in some]
        if on_rows is not None:
            on_rows(rows.stop, len(inputs))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return SparseTeacher(cached_rows(Path(folder), WHAT, key, SHARD_ROWS, make))


def _largest(logits: Tensor, top: int) -> dict[str, Tensor]:
    """The k largest of the last dimension, their places, and log of the mass of the rest."""
    wide = logits.double()
    values, tokens = wide.topk(min(top, logits.shape[-1]), dim=-1)
    rest = wide.scatter(-1, tokens, -torch.inf).logsumexp(-1).clamp(min=-1e30)
    return {
        "tokens": tokens.int().cpu(),
        "values": values.float().cpu(),
        "rest": rest.float().cpu(),
        "vocab": torch.full((len(logits),), logits.shape[-1], dtype=torch.int32),
    }
