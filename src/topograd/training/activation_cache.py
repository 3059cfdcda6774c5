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

    states.json        format, what it is made of (base, data, layers, dtype, shape), SHA-256 of each file
    tokens.bin         int32, inputs and then targets, (2, rows, context); a target of -100 does not count
    layer-K.bin        (rows, context, width), little-endian, for each layer K
    journal.jsonl      while it is computed: rows that are done, and the digests of the files up to there

A kill loses at most BLOCK_TOKENS tokens of work: the next call checks the files against the journal and
continues. States of another base, text, layers or dtype raise RunError, and so does a file with one changed
bit. Disk is bounded: more than `max_bytes`, or less than a tenth of the disk left free, raises first.

Cost: one forward of the trunk, tokens * width * 4 bytes a layer in float32, half of that in bfloat16 and
float16. Opening hashes the files once (`data/digest_cache.py`). Limits: no stacks with
relays of their own; states in float32 may differ from those of another batch size in the last bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from topograd.data.digest_cache import remembered_sha256
from topograd.data.loader import IGNORED, Loader
from topograd.data.shards import Shards
from topograd.errors import ConfigError, DataError, RunError, StackError
from topograd.exec.objectives import Logits
from topograd.files import hold_lock, naming, read_json, write_atomic, write_json
from topograd.nn.stack import LayerContext, Stack

FORMAT = "topograd-hidden-states"
VERSION = 1
BLOCK_TOKENS = 8192
"""Tokens between two lines of the journal."""
MAX_BYTES = 2**33
NAME, TOKENS, JOURNAL = "states.json", "tokens.bin", "journal.jsonl"
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

    folder: Path
    key: Mapping[str, Any]
    """What they are of: base, data, layers, dtype, rows, context, width."""
    inputs: np.ndarray
    targets: np.ndarray
    states: Mapping[int, np.ndarray]
    """(rows, context, width) by layer, mapped; bfloat16 as its bits in uint16."""

    def __len__(self) -> int:
        return len(self.inputs)

    def rows(self, chosen: Sequence[int] | np.ndarray) -> StateBatch:
        """These sequences, read from the files."""
        picked = np.asarray(chosen, dtype=np.int64)
        tokens = [torch.from_numpy(part[picked].astype(np.int64)) for part in (self.inputs, self.targets)]
        return StateBatch(tokens[0], tokens[1], {k: _floats(part[picked]) for k, part in self.states.items()})


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


class CachedActivationLoader(Iterator[StateBatch]):
    """Endless batches; every epoch has each sequence once, in an order of (seed, epoch)."""

    def __init__(self, store: SequenceStore, batch: int, seed: int = 0) -> None:
        if batch < 1 or seed < 0:
            raise ConfigError(
                setting="batch", given=batch, allowed=f"at least 1, and seed, which is {seed}, at least 0"
            )
        self.store, self.batch, self.seed = store, batch, seed
        self._epoch = self._row = 0
        self._order = self._shuffled(0)

    @property
    def position(self) -> dict[str, int]:
        """Where the next batch starts; JSON-able."""
        return {"epoch": self._epoch, "row": self._row}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue from a `position` of a loader with the same store and settings."""
        epoch, row = position.get("epoch"), position.get("row")
        if type(epoch) is not int or type(row) is not int or epoch < 0 or not 0 <= row <= len(self.store):
            raise DataError(
                setting="position",
                given=dict(position),
                allowed=f"an epoch and a row of {len(self.store)} sequences",
            )
        self._epoch, self._row, self._order = epoch, row, self._shuffled(epoch)

    def __next__(self) -> StateBatch:
        chosen: list[int] = []
        while len(chosen) < self.batch:
            if self._row == len(self.store):
                self._epoch, self._row = self._epoch + 1, 0
                self._order = self._shuffled(self._epoch)
            chosen.append(int(self._order[self._row]))
            self._row += 1
        return self.store.rows(chosen)

    def _shuffled(self, epoch: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
        return generator.permutation(len(self.store))


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
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / NAME).is_file():
        return open_states(folder, key)
    with hold_lock(folder / "lock"):
        writer = _Writer(folder, key, max_bytes)
        with writer:
            was_training = stack.training
            stack.eval()
            try:
                _fill(writer, stack, inputs, batch, on_rows)
            finally:
                stack.train(was_training)
        writer.finish(torch.stack((inputs, targets)).to(torch.int32).numpy())
    return open_states(folder, key)


def open_states(folder: Path | str, key: Mapping[str, Any] | None = None) -> HiddenStates:
    """What `compute_states` wrote, verified; RunError where its key is not `key`."""
    folder = Path(folder)
    table = read_json(folder / NAME, RunError)
    if not isinstance(table, dict) or table.get("format") != FORMAT or table.get("version") != VERSION:
        raise RunError(
            f"{folder / NAME} does not describe hidden states of this version", remedy="delete the folder"
        )
    saved, digests = table.get("key"), table.get("sha256")
    if not isinstance(saved, dict) or not isinstance(digests, dict):
        raise RunError(f"{folder / NAME} is damaged", remedy="delete the folder, and they are computed again")
    if key is not None:
        _check_key(folder, saved, key)
    shape = saved["rows"], saved["context"], saved["width"]
    tokens = _mapped(folder, TOKENS, "<i4", (2, *shape[:2]), digests)
    states = {k: _mapped(folder, _file(k), _bits(saved["dtype"]), shape, digests) for k in saved["layers"]}
    return HiddenStates(folder, saved, tokens[0], tokens[1], states)


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


def _check_key(folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    words = {"base": "other weights", "data": "other text", "dtype": "another type", "layers": "other layers"}
    for name in wanted:
        if saved.get(name) != wanted[name]:
            what = words.get(name, f"another {name}")
            raise RunError(
                f"{folder} holds hidden states of {what} ({name} {saved.get(name)}, wanted {wanted[name]})",
                setting=name,
                given=wanted[name],
                remedy="give another folder, or delete it",
            )


def _fill(writer: _Writer, stack: Stack, inputs: Tensor, batch: int, on_rows: OnRows | None) -> None:
    device = next(stack.parameters()).device
    rows, layers = len(inputs), writer.key["layers"]
    while writer.done < rows:
        until = min(writer.done + max(BLOCK_TOKENS // inputs.shape[1], 1), rows)
        for start in range(writer.done, until, batch):
            some = inputs[start : min(start + batch, until)].to(device)
            for layer, h in layer_states(stack, some, layers).items():
                writer.write(layer, h)
            if on_rows is not None:
                on_rows(min(start + batch, until), rows)
        writer.commit(until)


class _Writer:
    """Appends blocks of rows to the files of a folder, each block noted in the journal when it is on disk."""

    def __init__(self, folder: Path, key: Mapping[str, Any], max_bytes: int) -> None:
        self.folder, self.key, self.done = folder, key, 0
        self.digests = {k: hashlib.sha256() for k in key["layers"]}
        self._files: dict[int, BinaryIO] = {}
        self._row = key["context"] * key["width"] * np.dtype(_bits(key["dtype"])).itemsize
        known = {"lock", TOKENS, JOURNAL, *(_file(k) for k in key["layers"])}
        foreign = sorted(p.name for p in folder.iterdir() if p.name not in known and p.suffix != ".tmp")
        if foreign:
            raise RunError(
                f"{folder} holds {foreign[0]!r} and no hidden states", remedy="give another folder"
            )
        self._check_disk(max_bytes)
        self._continue()

    def _check_disk(self, max_bytes: int) -> None:
        need = self._row * self.key["rows"] * len(self.key["layers"])
        if need > max_bytes:
            raise ConfigError(
                f"the hidden states would take {need / 1e9:.1f} GB and max_bytes is {max_bytes / 1e9:.1f} GB",
                setting="max_bytes",
                given=max_bytes,
                remedy="take fewer tokens or layers, or dtype float16",
            )
        disk = shutil.disk_usage(self.folder)
        there = sum(p.stat().st_size for p in self.folder.iterdir())
        if need - there > disk.free - disk.total // 10:
            raise RunError(
                f"the hidden states would take {need / 1e9:.1f} GB and the disk of {self.folder} "
                f"has {disk.free / 1e9:.1f} free, of which a tenth of the disk is left free",
                remedy="take fewer tokens",
            )

    def _continue(self) -> None:
        """Go on behind the last block that the journal and the files agree on."""
        lines = self._journal()
        if lines:
            _check_key(self.folder, lines[0], self.key)
        verified = [json.dumps(dict(self.key))]
        for line in lines[1:]:
            if not self._verify(line):
                break
            verified.append(json.dumps(line))
        write_atomic(self.folder / JOURNAL, "".join(f"{line}\n" for line in verified))
        for layer in self.key["layers"]:
            path = self.folder / _file(layer)
            path.touch()
            os.truncate(path, self.done * self._row)

    def _journal(self) -> list[dict[str, Any]]:
        path, lines = self.folder / JOURNAL, []
        for line in path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else ():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
        return lines if all(isinstance(line, dict) for line in lines) else []

    def _verify(self, line: Mapping[str, Any]) -> bool:
        """Whether the files have the block that ends with this line; `done` and the digests then move on."""
        rows, named = line.get("rows"), line.get("sha256")
        if type(rows) is not int or not self.done < rows <= self.key["rows"] or not isinstance(named, dict):
            return False
        moved = {}
        for layer, digest in self.digests.items():
            path, size = self.folder / _file(layer), (rows - self.done) * self._row
            if not path.is_file():
                return False
            with open(path, "rb") as file:
                file.seek(self.done * self._row)
                content = file.read(size)
            moved[layer] = digest.copy()
            moved[layer].update(content)
            if len(content) < size or moved[layer].hexdigest() != named.get(str(layer)):
                return False
        self.digests, self.done = moved, rows
        return True

    def __enter__(self) -> _Writer:
        self._files = {k: (self.folder / _file(k)).open("ab") for k in self.key["layers"]}
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()

    def write(self, layer: int, h: Tensor) -> None:
        """Append the states of some rows."""
        state = h.detach().to("cpu", getattr(torch, self.key["dtype"])).contiguous()
        if not state.isfinite().all():
            raise DataError(
                setting="dtype",
                given=self.key["dtype"],
                allowed=f"float32: a state after layer {layer} is not finite",
            )
        bits = state.view(torch.int16) if state.dtype == torch.bfloat16 else state
        content = bits.numpy().tobytes()
        with naming(self.folder / _file(layer)):
            self._files[layer].write(content)
        self.digests[layer].update(content)

    def commit(self, rows: int) -> None:
        """Note that this many rows are on the disk."""
        for layer, file in self._files.items():
            with naming(self.folder / _file(layer)):
                file.flush()
                os.fsync(file.fileno())
        line = {"rows": rows, "sha256": {str(k): d.hexdigest() for k, d in self.digests.items()}}
        with open(self.folder / JOURNAL, "a", encoding="utf-8") as journal:
            journal.write(json.dumps(line) + "\n")
        self.done = rows

    def finish(self, tokens: np.ndarray) -> None:
        """Write what makes the folder whole."""
        content = tokens.astype("<i4").tobytes()
        with naming(self.folder / TOKENS), open(self.folder / TOKENS, "wb") as file:
            file.write(content)
            os.fsync(file.fileno())
        digests = {_file(k): digest.hexdigest() for k, digest in self.digests.items()}
        digests[TOKENS] = hashlib.sha256(content).hexdigest()
        table = {"format": FORMAT, "version": VERSION, "key": dict(self.key), "sha256": digests}
        write_json(self.folder / NAME, table)
        (self.folder / JOURNAL).unlink()


def _mapped(
    folder: Path, name: str, dtype: str, shape: tuple[int, ...], digests: Mapping[str, Any]
) -> np.ndarray:
    path, size = folder / name, int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not path.is_file() or path.stat().st_size != size or remembered_sha256(path) != digests.get(name):
        raise RunError(
            f"{path} is damaged or missing", remedy=f"delete {folder}, and they are computed again"
        )
    return np.memmap(path, dtype=dtype, mode="r", shape=shape).view(np.ndarray)


def _floats(part: np.ndarray) -> Tensor:
    if part.dtype == np.uint16:  # the bits of bfloat16, which numpy does not know
        return torch.from_numpy(part.view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(part).float()


def _bits(dtype: str) -> str:
    return {"float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}[dtype]


def _file(layer: int) -> str:
    return f"layer-{layer}.bin"
