"""Prefix caching: batch slots whose KV caches are reused by texts with a common prefix.

A sequence that is done keeps its KV cache. The next text takes the free one with the longest common prefix,
and continues from there; where a busy one shares more, that part is copied from it (`Cache.fork`). So the
same system prompt is computed once. Every plan (the model's own, one for each set of paths or specialists)
has its own sequences, since a cache is of its plan. What is not there may be on disk (`disk_cache.py`).

At least one token of a prompt is computed again: the next token is predicted from its hidden state.
"""

import itertools
from collections import abc

import torch

from topograd.decode.engine import Engine
from topograd.decode.sampling import Sampling
from topograd.decode.sequence import Sequence, common_prefix
from topograd.serve.disk_cache import PromptCache

MIN_SHARED = 8
"""A common prefix shorter than this is not worth copying."""


class Slot:
    """A batch slot."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.busy = False
        self.used = 0
        """When it was last taken, by a count of texts."""
        self.tenant = ""
        """Whose text it holds: no other tenant's begins with it."""


class Pool:
    """The sequences of one engine."""

    def __init__(self, engine: Engine, disk: PromptCache | None = None) -> None:
        self.engine, self.cache = engine, engine.new_cache()
        self.disk = disk if self.shares else None
        self.slots: list[Slot] = []
        self._clock = itertools.count(1)

    @torch.inference_mode()
    def take(
        self,
        prompt: abc.Sequence[int],
        stages: abc.Sequence[int],
        sampling: Sampling,
        grow: bool = True,
        tenant: str = "",
    ) -> tuple[Slot, int]:
        """A slot for a prompt, and how many tokens of it the slot holds already, run by all of `stages`.

        With `grow`, a new one rather than one whose text is of no use; else there must be a free one.
        """
        limit = len(prompt) - 1
        ready = {
            id(slot): min(_ready(slot.sequence, prompt, stages), limit) if slot.tenant == tenant else 0
            for slot in self.slots
        }
        free = [slot for slot in self.slots if not slot.busy]
        best = max(free, key=lambda slot: (ready[id(slot)], -slot.used), default=None)
        have = 0 if best is None else ready[id(best)]
        donor = max(self.slots, key=lambda slot: ready[id(slot)], default=None)
        if (best is None or have < MIN_SHARED) and grow:
            best, have = Slot(self.cache.new()), 0
            self.slots.append(best)
        assert best is not None, "a text is admitted only where a slot is free"
        best.busy, best.used, best.tenant = True, next(self._clock), tenant
        if donor is not None and self.shares and ready[id(donor)] >= have + MIN_SHARED:
            length = ready[id(donor)]
            self.cache.free(best.sequence)
            best.sequence = self.cache.fork(donor.sequence, length, sampling)
        else:
            self.cache.truncate([best.sequence], [have])
            best.sequence.begin(sampling)
        if self.disk is not None:
            self.disk.restore(self.cache, best.sequence, prompt, stages, tenant)
        return best, len(best.sequence)

    def keep(self, slot: Slot, length: int, stages: abc.Sequence[int]) -> None:
        """Write what was computed of a prompt to disk, where there is such a cache."""
        if self.disk is not None:
            done = [stage for stage in stages if slot.sequence.marks[stage] >= length]
            self.disk.keep(self.cache, slot.sequence, length, done, slot.tenant)

    @property
    def shares(self) -> bool:
        """Whether a part of a cache can be copied: recurrent states and histories are not cut anywhere."""
        return all(stage.cuts_anywhere for stage in self.cache.stages)

    def drop(self, slot: Slot) -> None:
        """Forget a sequence whose cache can no longer be trusted."""
        self.slots.remove(slot)
        self.cache.free(slot.sequence)


def _ready(sequence: Sequence, prompt: abc.Sequence[int], stages: abc.Sequence[int]) -> int:
    """How many leading tokens of `prompt` all of `stages` have run in a sequence."""
    return min(common_prefix(sequence.tokens, prompt), *(sequence.marks[stage] for stage in stages))
