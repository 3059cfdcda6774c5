"""Transport of activations between ranks, overlapped with computation.

A rank sends a message as soon as it exists and does not wait; a receiver posts the next receive of every
port before it needs it (two at a time). A sender that is `depth` messages ahead waits: the queue is bounded.
The first message of a port has a header with shape and dtype; later messages have the same.

Gradients come back along edges with λ > 0, one for each batch of a step, in order, under a tag of their edge,
or where there are no tags (NCCL, by reading: it was never run) in a group of their edge. They are their own
numbers, or few bits (`exec/thin.py`). What comes back is asked for when a step begins.
Nothing is on the way when a step ends, so that checkpoints hold everything.

An activation travels as its own numbers, as bf16, or as int8 with a scale for each position:

    int8:  s = max |x| / 127 over the last dimension,   q = round(x / s),   x̂ = s q

The receiver computes on x̂, so the stages behind a boundary train on rounded activations; the stages before
it do not notice. |x - x̂| ≤ s / 2. Bytes for each number: 4 or 8 exact, 2 as bf16, 1 and 4/width as int8.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from topograd.errors import ParallelError
from topograd.exec.thin import Key, packed, packed_shape, unpacked
from topograd.parallel.layout import Layout
from topograd.parallel.ranks import Ranks
from topograd.parallel.settings import WireKind
from topograd.topology.plan import EdgeOutput

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
HEADER = 10
"""Numbers in a header: dtype, how many dimensions, and up to eight of them."""
AHEAD = 2
"""Messages of a port that a receiver asks for before it needs them."""
_Asked = tuple[tuple[int, ...], Tensor, dist.Work]
"""The shape of a gradient that was asked for, and what arrives of it."""


class MeshTransport:
    """The `Transport` of one rank (`exec/train_step.py`)."""

    def __init__(self, ranks: Ranks, layout: Layout, depth: int = 4) -> None:
        self.ranks, self.layout, self.depth = ranks, layout, depth
        self.stages = frozenset(layout.stages_of(ranks.place))
        self.sent_bytes = 0
        self._shapes: dict[EdgeOutput, tuple[tuple[int, ...], torch.dtype]] = {}
        self._announced: dict[EdgeOutput, tuple[tuple[int, ...], torch.dtype]] = {}
        self._asked: dict[EdgeOutput, deque[tuple[Tensor, dist.Work]]] = {}
        self._left: dict[EdgeOutput, int] = {}
        self._sending: deque[tuple[Tensor, dist.Work, int]] = deque()
        self._returning: list[tuple[Tensor, dist.Work, int]] = []
        self._awaited: dict[tuple[int, int], deque[_Asked | int]] = {}
        self._warm = False
        self._groups = {} if ranks.tagged else _groups(ranks, layout)
        self._ports = [
            port for k in range(len(layout.plan.stages)) if k not in self.stages for port in self.incoming(k)
        ]

    def begin(self, batches: int, coming: Mapping[tuple[int, int], Sequence[int]]) -> None:
        """A step of `batches` batches comes: ask for the first messages of each port, and for the gradients
        that are `coming`, by edge: the sequences of each."""
        self._awaited = {
            edge: deque(self._ask_back(*edge, size) if self._warm else size for size in sizes)
            for edge, sizes in coming.items()
        }
        self._asked = {port: deque() for port in self._ports}
        self._left = dict.fromkeys(self._ports, batches)
        if self._warm:
            for _ in range(min(AHEAD, batches)):
                for port in self._ports:
                    self._ask(port)

    def finish(self) -> None:
        """The step's messages are all received; wait until those that were sent have gone."""
        while self._sending:
            self._drain()
        for _, work, peer in self._returning:
            self.ranks.wait(work, "handing over gradients", peer)
        self._returning.clear()
        self._warm = True

    def incoming(self, stage: int) -> list[EdgeOutput]:
        return self.layout.incoming(stage, self.ranks.place)

    def receive(self, port: EdgeOutput) -> Tensor:
        peer = self.ranks.at(self.layout.owners[port.source])
        what = f"waiting for what stage {port.source + 1} sends"
        if port not in self._shapes:
            header = torch.zeros(HEADER, dtype=torch.int64, device=self.ranks.device)
            self.ranks.wait(self.ranks.begin(dist.irecv, header, peer, what), what, peer)
            kind, dims, *sizes = header.tolist()
            self._shapes[port] = (tuple(sizes[:dims]), DTYPES[kind])
        if not self._asked[port]:
            self._ask(port)
        buffer, work = self._asked[port].popleft()
        self.ranks.wait(work, what, peer)
        if self._warm and self._left[port] > 0:
            self._ask(port)
        shape, dtype = self._shapes[port]
        return decode(buffer, shape, dtype, self.ranks.config.wire)

    def send(self, port: EdgeOutput, value: Tensor) -> None:
        for place in self.layout.listeners.get(port, ()):
            self._send(port, value, self.ranks.at(place))

    def _send(self, port: EdgeOutput, value: Tensor, peer: int) -> None:
        about = (tuple(value.shape), value.dtype)
        what = f"sending the output of stage {port.source + 1}"
        if port not in self._announced:
            header = torch.zeros(HEADER, dtype=torch.int64)
            header[: 2 + value.dim()] = torch.tensor([DTYPES.index(value.dtype), value.dim(), *value.shape])
            self._start(header.to(self.ranks.device), peer, what)
            if peer == self.ranks.at(self.layout.listeners[port][-1]):
                self._announced[port] = about
        elif self._announced[port] != about:
            raise ParallelError(
                f"stage {port.source + 1} sends {about[0]} after {self._announced[port][0]}",
                setting="batch",
                given=about[0],
                remedy="batches of one job must have one shape",
            )
        self._start(encode(value, self.ranks.config.wire), peer, what)
        while len(self._sending) > self.depth:
            self._drain()

    def send_back(self, stage: int, number: int, gradient: Tensor, key: Key) -> None:
        port, bits, tag, group = self._edge(stage, number)
        peer = self.ranks.at(self.layout.owners[port.source])
        tensor = gradient.contiguous() if bits == 32 else packed(gradient, bits, key)
        what = f"sending gradient to stage {port.source + 1}"
        work = self.ranks.begin(dist.isend, tensor, peer, what, tag, group)
        self.sent_bytes += tensor.numel() * tensor.element_size()
        # not counted with the messages: a peer may ask for a late gradient at the end of its step only
        self._returning.append((tensor, work, peer))

    def receive_back(self, stage: int, number: int) -> Tensor:
        awaited = self._awaited[stage, number].popleft()
        shape, buffer, work = self._ask_back(stage, number, awaited) if isinstance(awaited, int) else awaited
        what = f"waiting for gradient from stage {stage + 1}"
        self.ranks.wait(work, what, self.ranks.at(self.layout.owners[stage]))
        port, bits, *_ = self._edge(stage, number)
        return buffer if bits == 32 else unpacked(buffer, shape, self._announced[port][1], bits)

    def _ask_back(self, stage: int, number: int, rows: int) -> _Asked:
        port, bits, tag, group = self._edge(stage, number)
        shape, dtype = self._announced[port]
        shape, whole = (rows, *shape[1:]), bits == 32
        size, kind = (shape, dtype) if whole else (packed_shape(shape, bits), torch.uint8)
        buffer = torch.empty(size, dtype=kind, device=self.ranks.device)
        peer = self.ranks.at(self.layout.owners[stage])
        what = f"asking for gradient from stage {stage + 1}"
        return shape, buffer, self.ranks.begin(dist.irecv, buffer, peer, what, tag, group)

    def _edge(self, stage: int, number: int) -> tuple[EdgeOutput, int, int, dist.ProcessGroup | None]:
        """The output that an edge reads, its bits, its tag, and its group where there are no tags."""
        planned, group = self.layout.plan.stages[stage], self._groups.get((stage, number))
        tag = 1 + self.layout.back_edges.index((stage, number))
        return planned.inputs[number][0], planned.stage.sources[number].grad_bits, tag, group

    def _start(self, tensor: Tensor, peer: int, what: str) -> None:
        self._sending.append((tensor, self.ranks.begin(dist.isend, tensor, peer, what), peer))
        self.sent_bytes += tensor.numel() * tensor.element_size()

    def _drain(self) -> None:
        _, work, peer = self._sending.popleft()
        self.ranks.wait(work, "handing over activations", peer)

    def _ask(self, port: EdgeOutput) -> None:
        peer = self.ranks.at(self.layout.owners[port.source])
        buffer = room(*self._shapes[port], self.ranks.config.wire, self.ranks.device)
        what = f"asking for what stage {port.source + 1} sends"
        work = self.ranks.begin(dist.irecv, buffer, peer, what)
        self._asked[port].append((buffer, work))
        self._left[port] -= 1


def _groups(ranks: Ranks, layout: Layout) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A group for the gradients of each edge; every rank makes those of all replicas, in one order."""
    made = {}
    for replica in range(ranks.config.replicas):
        for stage, number in layout.back_edges:
            source = layout.plan.stages[stage].inputs[number][0].source
            ends = [replica * ranks.config.stages + layout.owners[k] for k in (source, stage)]
            group = ranks.new_group(ends, "making a group for gradients")
            if replica == ranks.replica:
                made[stage, number] = group
    return made


def encode(value: Tensor, kind: WireKind) -> Tensor:
    """The tensor that travels, contiguous."""
    if kind == "exact" or not value.is_floating_point():
        return value.contiguous()
    if kind == "bf16":
        return value.to(torch.bfloat16).contiguous()
    rows = value.float().flatten(0, -2)
    scale = rows.abs().amax(-1, keepdim=True) / 127
    numbers = (rows / scale.clamp(min=1e-30)).round().to(torch.int8)
    return torch.cat((scale.view(torch.uint8), numbers.view(torch.uint8)), dim=1)


def room(shape: tuple[int, ...], dtype: torch.dtype, kind: WireKind, device: torch.device) -> Tensor:
    """An empty tensor for what `encode` makes of such a value."""
    if kind == "exact" or not dtype.is_floating_point:
        return torch.empty(shape, dtype=dtype, device=device)
    if kind == "bf16":
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    return torch.empty((math.prod(shape[:-1]), 4 + shape[-1]), dtype=torch.uint8, device=device)


def decode(buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype, kind: WireKind) -> Tensor:
    """The value again, rounded according to `kind`."""
    if kind == "exact" or not dtype.is_floating_point:
        return buffer
    if kind == "bf16":
        return buffer.to(dtype)
    scale = buffer[:, :4].contiguous().view(torch.float32)
    numbers = buffer[:, 4:].view(torch.int8)
    return (numbers.to(dtype) * scale.to(dtype)).view(shape)
