"""Backprop over a pipeline of ranks, plainly: the baseline that stages without gradient between them replace.

Each rank has a run of layers. A batch goes forward rank by rank, its loss is on the last rank, and its
gradient comes back rank by rank. The order of a rank's forwards F and backwards B is the schedule:

    gpipe   F_1 ... F_M  B_1 ... B_M                                       all activations alive
    1f1b    P - 1 - p forwards first, then F B F B ..., then the rest      at most P - p batches alive

Bubble of both: (P - 1)/(M + P - 1) where every rank takes as long ("Product of Experts" §4.2 counts slots of
one kind). Messages: activations forward and their gradients back, M of each between two neighbours. Sends do
not wait; what comes next is asked for one message ahead, in both directions.

x0, which every layer may hear, is computed on every rank from a copy of the embedding; the gradients of the
copies are added up once a step, which is less than a gradient of x0 for every batch, and not at all where
only the first layer reads x0 (`adds_up`). The head is on the last rank. Gradients are exact:
`tests/parallel/test_plain_schedules.py` compares them with one process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared_cores import pipeline_order

Loss = Callable[[Tensor, Tensor], Tensor]
"""From the last hidden state and the targets, the mean loss."""


class BackpropPipeline:
    """One rank of the pipeline. `step` adds the gradients of a step to every `.grad` of this rank."""

    def __init__(self, stack: Any, layers: range, rank: int, ranks: int, loss: Loss) -> None:
        self.stack, self.layers, self.rank, self.ranks, self.loss = stack, layers, rank, ranks, loss
        self.adds_up = True
        self.sent_bytes = 0
        self.waited = 0.0
        """Seconds in which this rank waited for another."""

    def step(self, batches: Sequence[tuple[Tensor, Tensor]], name: str) -> Tensor:
        """The mean loss; 0 on every rank but the last."""
        order = pipeline_order(name, self.rank, self.ranks, len(batches))
        total = torch.zeros(())
        open_: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        sending: deque[tuple[Tensor, Any]] = deque()
        forward, back = sum(k == "F" for k, _ in order), sum(k == "B" for k, _ in order)
        inputs = _Inbox(self, self.rank - 1, forward if self.rank else 0)
        gradients = _Inbox(self, self.rank + 1, back if self.rank + 1 < self.ranks else 0)
        for kind, i in order:
            if kind == "F":
                tokens, targets = batches[i]
                embedded = self.stack.embed(tokens)
                x0 = embedded.detach().requires_grad_()
                leaf = inputs.take(x0).requires_grad_() if self.rank else x0
                ctx, h = self.stack.layer_context(x0, tokens), leaf
                for layer in self.layers:
                    h = self.stack.layers[layer](h, ctx)
                if self.rank + 1 < self.ranks:
                    sending.append(self._send(h.detach(), self.rank + 1))
                else:
                    h = self.loss(h, targets)
                    total = total + h.detach() / len(batches)
                open_[i] = (embedded, x0, leaf, h)
            else:
                embedded, x0, leaf, h = open_.pop(i)
                if self.rank + 1 < self.ranks:
                    h.backward(gradients.take(h))
                else:
                    h.backward(torch.tensor(1 / len(batches), dtype=h.dtype))
                if self.rank:
                    assert leaf.grad is not None
                    sending.append(self._send(leaf.grad, self.rank - 1))
                if x0.grad is not None:
                    embedded.backward(x0.grad)
        for _, work in sending:
            self._wait(work)
        self._add_up_embedding()
        return total

    def _add_up_embedding(self) -> None:
        """Copies of what is no layer's and no head's have one gradient."""
        if not self.adds_up:
            return
        own = {id(p) for p in self.stack.layers.parameters()} | {id(p) for p in self.stack.head.parameters()}
        copies = [p for p in self.stack.parameters() if id(p) not in own]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in copies])
        self._wait(dist.all_reduce(flat, async_op=True))
        self.sent_bytes += flat.numel() * flat.element_size()
        for p, part in zip(copies, flat.split([p.numel() for p in copies]), strict=True):
            p.grad = part.view_as(p)

    def _send(self, value: Tensor, peer: int) -> tuple[Tensor, Any]:
        value = value.contiguous()
        self.sent_bytes += value.numel() * value.element_size()
        return value, dist.isend(value, peer)

    def _wait(self, work: Any) -> None:
        began = time.perf_counter()
        work.wait()
        self.waited += time.perf_counter() - began


class _Inbox:
    """Messages from one neighbour, asked for one ahead."""

    def __init__(self, pipeline: BackpropPipeline, peer: int, count: int) -> None:
        self.pipeline, self.peer, self.left = pipeline, peer, count
        self.asked: deque[tuple[Tensor, Any]] = deque()

    def take(self, like: Tensor) -> Tensor:
        while self.left and len(self.asked) < 2:
            room = torch.empty_like(like, requires_grad=False)
            self.asked.append((room, dist.irecv(room, self.peer)))
            self.left -= 1
        value, work = self.asked.popleft()
        self.pipeline._wait(work)
        return value
