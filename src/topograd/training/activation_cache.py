"""Activation cache: hidden states of a frozen trunk, computed once into memory-mapped files.

What is trained behind a frozen trunk (later stages, a draft stage, a specialist) reads h_k, the state after k
layers, and never changes it. So an epoch needs only the layers behind k:

    rows = packed_rows(data.train, context=256, seed=0, max_tokens=100_000)         # or tensors of your own
    store = compute_states(folder, session.stack, *rows, base=session.weights, layers=(20, 30))
    loader = CachedActivationLoader(store, batch=8, seed=0)
    for batch in loader:                                # endless; loader.position and seek continue it
        batch.states[20], batch.inputs, batch.targets, batch.mask       # (B, T, width), then (B, T)
        train_step(stack, plan, batch.inputs, batch.targets, states=batch.states)       # of any plan

`train_step` leaves out the frozen stages whose outputs are given. x0 is not kept: `batch.layer_context`
embeds the tokens again, which is a look-up. Layer 0 is x0, layer L is what the head's norm reads.

The files are those of `row_cache.py`: inputs, targets (rows, context) int32, where a target of -100 does not
count, and layer.K (rows, context, width). States of another base, text, layers or dtype raise RunError. Disk
is bounded: more than `max_bytes`, or less than a tenth of the disk left free, raises first.

Cost: one forward of the trunk, tokens * width * 4 bytes a layer in float32, half of that in bfloat16 and
float16. Limits: no stacks with relays of their own; states in float32 may differ from those of another batch
size in the last bits.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from topograd.data.loader import IGNORED, EpochLoader, Loader
from topograd.data.shards import Shards
from topograd.errors import ConfigError, DataError, RunError, StackError
from topograd.exec.forward import evaluating
from topograd.exec.objectives import Logits
from topograd.nn.stack import LayerContext, Stack
from topograd.training.row_cache import RowCache, cached_rows

WHAT = "hidden states"
BLOCK_TOKENS = 8192
"""Tokens of a file, which a kill may lose."""
MAX_BYTES = 2**33
Kept = Literal["float32", "bfloat16", "float16"]
OnRows = Callable[[int, int], None]
"""Called with the rows that are done, and of how many."""


@dataclass(frozen=True)
class StateBatch:
    """Sequences with their hidden states."""

    inputs: Tensor
    """(batch, context) tokens."""
    targets: Tensor
    """(batch, context) tokens; -100 does not count."""
    states: dict[int, Tensor]
    """(batch, context, width) float32 by layer."""
    teacher: Logits | None = None
    """A teacher's cached logits, where there are any."""

    @property
    def mask(self) -> Tensor:
        """(batch, context): the positions that have a target."""
        return self.targets != IGNORED

    def part(self, rows: slice) -> StateBatch:
        """Some of the sequences."""
        teacher, first = self.teacher, rows.start * self.targets[0].numel()
        return StateBatch(
            self.inputs[rows],
            self.targets[rows],
            {k: h[rows] for k, h in self.states.items()},
            None if teacher is None else lambda at: teacher(slice(at.start + first, at.stop + first)),
        )

    def layer_context(self, stack: Stack) -> LayerContext:
        """The context of the layers behind the trunk: x0, tokens, positions."""
        return stack.layer_context(stack.embed(self.inputs), self.inputs)


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Cached states on the disk, verified."""

    cache: RowCache

    @property
    def key(self) -> Mapping[str, Any]:
        """What they are of: base, data, layers, dtype, rows, context, width."""
        return self.cache.key

    def __len__(self) -> int:
        return len(self.cache)

    def rows(self, chosen: Sequence[int] | np.ndarray) -> StateBatch:
        """These sequences, read from the files."""
        parts = self.cache.take(chosen)
        states = {layer: parts[f"layer.{layer}"].float() for layer in self.key["layers"]}
        return StateBatch(parts["inputs"].long(), parts["targets"].long(), states)


class SequenceStore(Protocol):
    """A set of sequences: `HiddenStates`, or text alone."""

    def __len__(self) -> int: ...

    def rows(self, chosen: Sequence[int] | np.ndarray) -> StateBatch: ...


@dataclass(frozen=True)
class PlainSequences:
    """Sequences without hidden states: frozen stages run at every step."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def rows(self, chosen: Sequence[int] | np.ndarray) -> StateBatch:
        picked = torch.as_tensor(np.asarray(chosen, dtype=np.int64))
        return StateBatch(self.inputs[picked], self.targets[picked], {})


class CachedActivationLoader(EpochLoader[StateBatch]):
    """Endless batches; every epoch has each sequence once, in an order of (seed, epoch)."""

    def __init__(self, store: SequenceStore, batch: int, seed: int = 0) -> None:
        self.store = store
        super().__init__(batch, seed)

    def _draw(self, generator: np.random.Generator) -> SequenceStore:
        return self.store

    def __next__(self) -> StateBatch:
        return self.store.rows(list(self._next_rows()))


def packed_rows(
    shards: Shards, context: int, seed: int = 0, max_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """(inputs, targets), each (N, context): the sequences of a loader's first epoch, or the first of them.

    A sequence without a target, as masked text may have, is left out.
    """
    loader = Loader(shards, context, 1, seed)
    most = loader.rows if max_tokens is None else max(max_tokens // context, 1)
    batches = (next(loader) for _ in range(loader.rows))
    chosen = list(islice((pair for pair in batches if (pair[1] != IGNORED).any()), most))
    return torch.cat([inputs for inputs, _ in chosen]), torch.cat([targets for _, targets in chosen])


@torch.no_grad()
def layer_states(stack: Stack, inputs: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """The hidden states after these numbers of layers."""
    h = stack.embed(inputs)
    ctx = stack.layer_context(h, inputs)
    states = {0: h} if 0 in layers else {}
    for i in range(max(layers)):
        h = stack.layers[i](h, ctx)
        if i + 1 in layers:
            states[i + 1] = h
    return states


def compute_states(
    folder: Path | str,
    stack: Stack,
    inputs: Tensor,
    targets: Tensor,
    *,
    base: str,
    layers: Sequence[int],
    dtype: Kept = "float32",
    batch: int = 8,
    max_bytes: int = MAX_BYTES,
    on_rows: OnRows | None = None,
) -> HiddenStates:
    """The states in `folder`: opened if complete, continued if begun, else computed.

    `base` names the trunk's weights (`LoadedTextRun.weights`); whatever else changes what the layers compute
    belongs into that name. Inputs and targets are (rows, context), int64.
    """
    folder = Path(folder)
    _check(stack, inputs, targets, layers, dtype)
    key = _key(stack, inputs, targets, base, layers, dtype)
    _check_disk(folder, key, max_bytes)
    device = next(stack.parameters()).device

    def make(rows: range) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {f"layer.{layer}": [] for layer in layers}
        for start in range(rows.start, rows.stop, batch):
            until = min(start + batch, rows.stop)
            for layer, h in layer_states(stack, inputs[start:until].to(device), layers).items():
                parts[f"layer.{layer}"].append(_rounded(h, layer, dtype))
            if on_rows is not None:
                on_rows(until, len(inputs))
        tokens = {"inputs": inputs[rows.start : rows.stop], "targets": targets[rows.start : rows.stop]}
        texts = {name: part.to(torch.int32).contiguous() for name, part in tokens.items()}
        return texts | {name: torch.cat(some) for name, some in parts.items()}

    with evaluating(stack):
        shard_rows = max(BLOCK_TOKENS // inputs.shape[1], 1)
        return HiddenStates(cached_rows(folder, WHAT, key, shard_rows, make))


def _rounded(h: Tensor, layer: int, dtype: str) -> Tensor:
    state = h.to("cpu", getattr(torch, dtype)).contiguous()
    if not state.isfinite().all():
        raise DataError(
            setting="dtype", given=dtype, allowed=f"float32: a state after layer {layer} is not finite"
        )
    return state


def _check(stack: Stack, inputs: Tensor, targets: Tensor, layers: Sequence[int], dtype: str) -> None:
    if stack.learned_relays():
        raise StackError("the stack has relays of its own, so its layers do not follow one another")
    if inputs.dim() != 2 or inputs.shape != targets.shape or not inputs.numel():
        raise DataError(
            f"inputs is {tuple(inputs.shape)} and targets {tuple(targets.shape)}",
            setting="inputs",
            given=tuple(inputs.shape),
            remedy="both must be (sequences, context) of at least one token",
        )
    if dtype not in get_args(Kept):
        raise ConfigError(setting="dtype", given=dtype, allowed=f"one of {', '.join(get_args(Kept))}")
    if not layers or any(not 0 <= k <= len(stack.layers) for k in layers) or len(set(layers)) < len(layers):
        raise ConfigError(
            setting="layers",
            given=list(layers),
            allowed=f"different ones from 0, the embedding, to {len(stack.layers)}",
        )


def _key(
    stack: Stack, inputs: Tensor, targets: Tensor, base: str, layers: Sequence[int], dtype: str
) -> dict[str, Any]:
    tokens = torch.stack((inputs, targets)).to(torch.int32).numpy()
    return {
        "base": base,
        "data": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "layers": sorted(layers),
        "dtype": dtype,
        "rows": inputs.shape[0],
        "context": inputs.shape[1],
        "width": stack.width,
    }


def _check_disk(folder: Path, key: Mapping[str, Any], max_bytes: int) -> None:
    """Raise where the states would take too much of the disk; what is there already counts as theirs."""
    size = getattr(torch, key["dtype"]).itemsize * key["context"] * key["width"]
    need = size * key["rows"] * len(key["layers"])
    if need > max_bytes:
        raise ConfigError(
            f"the hidden states would take {need / 1e9:.1f} GB and max_bytes is {max_bytes / 1e9:.1f} GB",
            setting="max_bytes",
            given=max_bytes,
            remedy="take fewer tokens or layers, or dtype float16",
        )
    folder.mkdir(parents=True, exist_ok=True)
    disk = shutil.disk_usage(folder)
    there = sum(path.stat().st_size for path in folder.iterdir())
    if need - there > disk.free - disk.total // 10:
        raise RunError(
            f"the hidden states would take {need / 1e9:.1f} GB and the disk of {folder} has "
            f"{disk.free / 1e9:.1f} free, of which a tenth of the disk is left free",
            remedy="take fewer tokens",
        )
