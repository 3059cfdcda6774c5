"""Cached teacher logits: the largest k of each position, and the mass of the rest.

    store = write_teacher(folder, Predictor(stack, plan), inputs, targets, name=session.weights, top=32)
    train_step(student, plan, batch.inputs, batch.targets, teacher=store.logits(rows))

For every position the k largest logits t_1..t_k of the teacher with their tokens, and the logarithm of what
is left, log(Z - Σ exp t_i). The teacher's distribution is given back with the rest spread evenly over the
other tokens: exact for the k tokens, and the right mass elsewhere. So `distillation` (`objectives.py`) works
on it as on a teacher that runs; with k = vocab it is the same. Any run can teach ("Product of Experts" §10.2
item 2).

    teacher.json              format, what it is of (teacher, data, top, rows), SHA-256 of each shard
    shard-00000.safetensors   tokens (rows, time, k) int32, values (rows, time, k), rest (rows, time) float32

`train --teacher RUN --teacher-top K` keeps them in the student's folder: `TeacherLogitRows` are sequences
with the teacher's logits.

Shards of SHARD_ROWS rows are written whole; a kill loses one, and the next call continues after the last.
Cost: one forward of the teacher; 8 k + 4 bytes a position instead of 4 vocab. Limits: rows are those given,
in that order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from topograd.errors import ConfigError, RunError
from topograd.exec.forward import Predictor
from topograd.exec.objectives import Logits
from topograd.files import read_json, sha256, write_atomic, write_json
from topograd.training.activation_cache import OnRows, SequenceStore, StateBatch

FORMAT = "topograd-teacher"
VERSION = 1
SHARD_ROWS = 64
NAME = "teacher.json"


@dataclass(frozen=True)
class SparseTeacher:
    """Kept logits, verified."""

    folder: Path
    top: int
    vocab: int
    shards: tuple[dict[str, Tensor], ...]

    def logits(self, rows: Sequence[int]) -> Logits:
        """The teacher's logits for a batch of these rows, made by the chunk."""
        picked = [self.shards[row // SHARD_ROWS] for row in rows]
        places = [row % SHARD_ROWS for row in rows]
        tokens, values, rest = (
            torch.stack([shard[name][place] for shard, place in zip(picked, places, strict=True)]).flatten(
                0, 1
            )
            for name in ("tokens", "values", "rest")
        )
        left = math.log(max(self.vocab - self.top, 1))

        def chunk(where: slice) -> Tensor:
            dense = (rest[where] - left)[:, None].expand(-1, self.vocab).clone()
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
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = hashlib.sha256(torch.stack((inputs, targets)).numpy().tobytes()).hexdigest()
    key = {"teacher": name, "data": data, "top": top, "rows": len(inputs)}
    described = _described(folder, key)
    device = next(teacher.parameters()).device
    for number in range(len(described["sha256"]), math.ceil(len(inputs) / SHARD_ROWS)):
        some = inputs[number * SHARD_ROWS : (number + 1) * SHARD_ROWS]
        parts = [_largest(teacher(rows.to(device)), top) for rows in some.split(batch)]
        shard = {key: torch.cat([part[key] for part in parts]) for key in ("tokens", "values", "rest")}
        described["vocab"] = int(parts[0]["vocab"])
        write_atomic(folder / _file(number), save(shard))
        described["sha256"].append(sha256(folder / _file(number)))
        write_json(folder / NAME, described)
        if on_rows is not None:
            on_rows(min((number + 1) * SHARD_ROWS, len(inputs)), len(inputs))
    return open_teacher_logits(folder)


def _largest(logits: Tensor, top: int) -> dict[str, Any]:
    """The k largest of the last dimension, their places, and log of the mass of the rest."""
    k = min(top, logits.shape[-1])
    wide = logits.double()
    values, tokens = wide.topk(k, dim=-1)
    others = wide.scatter(-1, tokens, -torch.inf)
    rest = others.logsumexp(-1).clamp(min=-1e30)
    return {
        "tokens": tokens.int().cpu(),
        "values": values.float().cpu(),
        "rest": rest.float().cpu(),
        "vocab": logits.shape[-1],
    }


def open_teacher_logits(folder: Path | str) -> SparseTeacher:
    """What `write_teacher` wrote, checked whole."""
    folder = Path(folder)
    described = read_json(folder / NAME)
    shards = []
    for number, digest in enumerate(described["sha256"]):
        path = folder / _file(number)
        if not path.is_file() or sha256(path) != digest:
            raise RunError(f"{path} is damaged", remedy=f"delete {folder}, and it is computed again")
        shards.append(load_file(path))
    if sum(len(shard["rest"]) for shard in shards) != described["key"]["rows"]:
        raise RunError(f"{folder} is not complete", remedy="call write_teacher again to complete it")
    top = min(described["key"]["top"], described["vocab"])
    return SparseTeacher(folder, top, described["vocab"], tuple(shards))


def _described(folder: Path, key: dict[str, Any]) -> dict[str, Any]:
    """What is there already, if it is of the same teacher and text."""
    if not (folder / NAME).is_file():
        return {"format": FORMAT, "version": VERSION, "key": key, "vocab": 0, "sha256": []}
    saved = read_json(folder / NAME)
    if not isinstance(saved, dict) or saved.get("format") != FORMAT or saved.get("version") != VERSION:
        raise RunError(f"{folder / NAME} does not describe a teacher's logits", remedy="give another folder")
    if saved["key"] != key:
        raise RunError(
            f"{folder} holds the logits of another teacher, text or number",
            setting="folder",
            remedy="delete it",
        )
    return saved


def _file(number: int) -> str:
    return f"shard-{number:05d}.safetensors"
