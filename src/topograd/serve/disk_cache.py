"""Prompt cache on disk: what the stages computed of a prompt, by content, kept over restarts.

A prompt is cut into blocks of BLOCK tokens. A block's key is a hash of everything that its states depend on:

    k_0 = H(weights, precision, runtime, topology, tenant)      k_i = H(k_{i-1}, tokens of block i)

so the same tokens behind another prefix, of another model or for another tenant are other blocks. A file
holds what one stage computed of one block (`decode/cache.py:computed`), as safetensors with a hash of its
numbers: KEY.STAGE.safetensors. A text at `prefix:1` reads and writes those of the first stage only.

The numbers are those that were computed, to the bit. A file that is damaged or does not fit is removed with
those behind it, and written again when the blocks are computed. Files are written by a thread of its own,
atomically; those read least recently are removed where all have more than `limit` bytes. Several servers may
share a folder.

Limits: a model with recurrent states or histories is not cached (they cannot be cut), nor are specialists.
Who can write into the folder can change answers, as who can write into the model's folder can.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from topograd.decode.cache import Cache
from topograd.decode.model import Model
from topograd.decode.sequence import Sequence as TokenSequence
from topograd.errors import ConfigError, DataError, StackError, TopogradError
from topograd.files import write_atomic
from topograd.runs.tensor_files import tensors_digest

BLOCK = 64
"""Tokens of a block."""
SUFFIX = ".safetensors"
MAX_QUEUED = 1024
"""Files that wait to be written; more are not kept."""
DIGEST = "digest"


class PromptCache:
    """Blocks of one model in a folder; `restore` and `keep` from the thread of the model."""

    def __init__(self, folder: Path, limit: float, identity: str) -> None:
        self.folder, self.limit, self.identity = folder, limit, identity
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._bytes = sum(size for _, size, _ in self._files())
        except OSError as error:
            raise ConfigError(
                f"prompt_cache {folder} cannot be used ({error.strerror or error})",
                setting="prompt_cache",
                given=str(folder),
                remedy="give a folder that can be written to",
            ) from None
        self._waiting: set[Path] = set()
        """Files that are about to be written."""
        self._queue: queue.Queue[tuple[Path, dict[str, Tensor]] | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._write_all, name="prompt-cache", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, folder: Path, limit: float, model: Model) -> PromptCache:
        """The cache of a model."""
        engine = model.engine
        parts = model.session.weights, model.precision, engine.runtime.name, engine.plan.topology
        return cls(folder, limit, repr(parts))

    def keys(self, tokens: Sequence[int], tenant: str = "") -> list[str]:
        """The keys of the whole blocks of a prompt."""
        key = hashlib.sha256(f"{BLOCK} {self.identity} {tenant}".encode()).hexdigest()
        made = []
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block = ",".join(map(str, tokens[start : start + BLOCK]))
            key = hashlib.sha256(f"{key}:{block}".encode()).hexdigest()
            made.append(key)
        return made

    @torch.inference_mode()
    def restore(
        self, cache: Cache, sequence: TokenSequence, prompt: Sequence[int], stages: Sequence[int], tenant: str
    ) -> int:
        """Continue a sequence, which begins as the prompt does, by blocks that are known; its new length.

        At least one token of the prompt is left. All of `stages` have run what the sequence holds.
        """
        have = len(sequence)
        keys = self.keys(prompt[: len(prompt) - 1], tenant)
        for index, key in enumerate(keys):
            start, stop = index * BLOCK, (index + 1) * BLOCK
            if stop <= have:
                continue
            try:
                states = {stage: self._read(self._path(key, stage)) for stage in stages}
                cache.push([sequence], [list(prompt[have:stop])])
                for stage in stages:
                    cache.restore(sequence, stage, have, _behind(states[stage], have - start))
            except OSError:  # it is not there
                break
            except (
                StackError,
                DataError,
                RuntimeError,
                IndexError,
            ):  # it is damaged, and what follows it may be too: computed again
                for path in [self._path(later, stage) for later in keys[index:] for stage in stages]:
                    path.unlink(missing_ok=True)
                cache.truncate([sequence], [have])
                break
            have = stop
        return have

    def keep(
        self, cache: Cache, sequence: TokenSequence, length: int, stages: Sequence[int], tenant: str
    ) -> None:
        """Write the whole blocks of the first `length` tokens that are not there."""
        for index, key in enumerate(self.keys(sequence.tokens[:length], tenant)):
            for stage in stages:
                path = self._path(key, stage)
                if path in self._waiting or self._queue.full() or path.exists():
                    continue
                self._waiting.add(path)
                views = cache.computed(sequence, stage, index * BLOCK, (index + 1) * BLOCK)
                self._queue.put((path, {name: each.clone() for name, each in views.items()}))

    def close(self) -> None:
        """Write what is queued, and end."""
        self._queue.put(None)
        self._thread.join()

    def _path(self, key: str, stage: int) -> Path:
        return self.folder / f"{key}.{stage}{SUFFIX}"

    def _read(self, path: Path) -> dict[str, Tensor]:
        """The tensors of a file; DataError where it is damaged."""
        try:
            tensors = load(path.read_bytes())
            stored = tensors.pop(DIGEST)
        except (SafetensorError, ValueError, KeyError, TypeError):
            raise DataError("a file of the prompt cache is damaged", setting="prompt_cache") from None
        if not torch.equal(stored, _digest(tensors)):
            raise DataError("a file of the prompt cache is damaged", setting="prompt_cache")
        with suppress(OSError):
            os.utime(path)
        return tensors

    def _write_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            path, tensors = entry
            data = save({**tensors, DIGEST: _digest(tensors)})
            with suppress(OSError, TopogradError):  # where the disk is full, the server does without
                write_atomic(path, data)
                self._bytes += len(data)
                if self._bytes > self.limit:
                    self._shrink()
            self._waiting.discard(path)

    def _shrink(self) -> None:
        files = sorted(self._files())
        self._bytes = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self._bytes <= 0.9 * self.limit:
                break
            path.unlink(missing_ok=True)
            self._bytes -= size

    def _files(self) -> list[tuple[float, int, Path]]:
        """When each was last read, its bytes and its path."""
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return found


def _behind(tensors: Mapping[str, Tensor], skip: int) -> dict[str, Tensor]:
    """The positions of a block from `skip` on: the second dimension of keys and values, else the first."""
    return {
        name: each.narrow(1 if name.startswith(("keys", "values")) else 0, skip, BLOCK - skip)
        for name, each in tensors.items()
    }


def _digest(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.tensor(list(bytes.fromhex(tensors_digest(tensors))), dtype=torch.uint8)
