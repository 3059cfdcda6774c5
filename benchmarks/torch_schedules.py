"""torch's own pipeline of backprop, `torch.distributed.pipelining`, as a peer of `plain_schedules.py`.

The same layers, copies of the embedding, micro-batches and loss; the schedule, its messages and its buffers
are torch's (`ScheduleGPipe`, `Schedule1F1B`). Gradients and loss equal those of our own schedule
(`tests/parallel/test_torch_schedules.py`). What torch's schedule does not tell is estimated: bytes are those
of its messages, M activations down and M gradients up, and a rank waits while its thread does not run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from plain_schedules import BackpropPipeline

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class _Part(nn.Module):
    """The layers of one rank; every rank embeds the tokens by its own copy."""

    def __init__(self, pipeline: BackpropPipeline) -> None:
        super().__init__()
        self.stack, self.layers, self.first = pipeline.stack, pipeline.layers, pipeline.rank == 0

    def forward(self, h: Tensor, tokens: Tensor) -> Tensor:
        """On the first rank `h` is the tokens too: torch wants an input there."""
        x0 = self.stack.embed(tokens)
        ctx = self.stack.layer_context(x0, tokens)
        h = x0 if self.first else h
        for layer in self.layers:
            h = self.stack.layers[layer](h, ctx)
        return h


class TorchPipeline(BackpropPipeline):
    """One rank of torch's pipeline; `step` as in our own. One schedule an object: torch keeps its buffers."""

    def step(self, batches: Sequence[tuple[Tensor, Tensor]], name: str) -> Tensor:
        if not hasattr(self, "schedule"):
            stage = PipelineStage(_Part(self), self.rank, self.ranks, torch.device("cpu"))
            self.schedule = SCHEDULES[name](stage, len(batches), self.loss)
        tokens, targets = (torch.cat(column) for column in zip(*batches, strict=True))
        losses: list[Tensor] = []
        began, ran = time.perf_counter(), time.thread_time()
        last = self.rank == self.ranks - 1
        self.schedule.step(
            *([tokens] if self.rank == 0 else []),
            tokens=tokens,
            target=targets if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        self.waited += (time.perf_counter() - began) - (time.thread_time() - ran)
        peers = int(self.rank > 0) + int(not last)
        message = batches[0][0].numel() * self.stack.width * self._item_size()
        self.sent_bytes += peers * len(batches) * message
        self._add_up_embedding()
        return torch.stack(losses).detach().mean() if losses else torch.zeros(())

    def _item_size(self) -> int:
        return next(p.element_size() for p in self.stack.parameters() if not p.is_meta)
