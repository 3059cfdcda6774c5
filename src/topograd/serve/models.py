"""The models behind one server: opened when they are first asked for, closed when memory is short.

Each has a thread and a scheduler of its own. Where the parameters of the open ones have more than `memory`
bytes, those that were used least recently are closed, unless they are in use.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from topograd.errors import TopogradError
from topograd.serve.chats import Chats
from topograd.serve.metrics import Counters
from topograd.serve.request_schema import RequestError
from topograd.serve.scheduler import Scheduler
from topograd.serve.texts import ServedModel, known_id
from topograd.serve.worker import Worker

Opener = Callable[[], ServedModel]


class OpenModel:
    """A model with its thread."""

    def __init__(self, served: ServedModel, counters: Counters) -> None:
        self.served = served
        model = served.model
        self.worker = Worker(
            Scheduler(model.session, model.engine, served.limits, counters, served.specialists, served.disk)
        )
        self.chats = Chats(served)
        self.bytes = sum(p.numel() * p.element_size() for p in model.session.stack.parameters())
        self.users = 0
        """Requests that are being read: their jobs are not queued yet."""
        self.used = time.monotonic()

    @property
    def idle(self) -> bool:
        return not self.users and self.worker.busy == (0, 0)

    def close(self) -> None:
        """End its thread and its processes; texts that run are cancelled."""
        if self.worker.alive:
            self.worker.stop()
        self.chats.close()
        if self.served.disk is not None:
            self.served.disk.close()


class Models:
    """All models of a server by name. The first is open from the start, and is meant where none is named."""

    def __init__(
        self,
        first: ServedModel,
        counters: Counters,
        openers: Mapping[str, Opener] | None = None,
        memory: float = float("inf"),
    ) -> None:
        """`openers` open the others, and the first again."""
        self.counters, self.memory = counters, memory
        self.default, self.limits, self.started = first.name, first.limits, first.started
        self.openers = {first.name: lambda: first} if openers is None else dict(openers)
        self.open = {first.name: OpenModel(first, counters)}
        self._known: dict[str, list[dict[str, Any]]] = {}
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        for each in self.open.values():
            each.worker.start(loop)

    def close(self) -> None:
        for each in self.open.values():
            each.close()

    @property
    def busy(self) -> tuple[int, int]:
        """Texts that are written, and that wait."""
        each = [model.worker.busy for model in list(self.open.values())]
        return sum(running for running, _ in each), sum(waiting for _, waiting in each)

    @property
    def alive(self) -> bool:
        return all(model.worker.alive for model in list(self.open.values()))

    def name_of(self, model: str | None) -> str:
        """The name of a model id, which may have a depth behind it."""
        return known_id(model, self.default, self.openers)[0]

    @contextlib.asynccontextmanager
    async def use(self, model: str | None) -> AsyncIterator[OpenModel]:
        """The model of an id, which stays open inside, and as long as it has texts to write."""
        name = self.name_of(model)
        found = self.open.get(name)
        if found is None:
            async with self._lock:  # one at a time
                found = self.open.get(name) or await self._open(name)
        found.users += 1
        found.used = time.monotonic()
        try:
            yield found
        finally:
            found.users -= 1

    async def _open(self, name: str) -> OpenModel:
        try:
            served = await asyncio.to_thread(self.openers[name])
        except TopogradError as error:
            self.counters.failed(error)
            message = f"the model {name!r} cannot be opened; the reason is in the server's log"
            raise RequestError(message, "model", 503) from None
        made = OpenModel(served, self.counters)
        assert self._loop is not None
        made.worker.start(self._loop)
        self.open[name] = made
        for other in sorted(self.open, key=lambda each: self.open[each].used):
            total = sum(model.bytes for model in self.open.values())
            if total > self.memory and other != name and self.open[other].idle:
                self.describe(other)
                await asyncio.to_thread(self.open.pop(other).close)
        return made

    def entries(self) -> list[dict[str, Any]]:
        """The entries of /v1/models."""
        return [entry for name in self.openers for entry in self.describe(name)]

    def describe(self, name: str) -> list[dict[str, Any]]:
        """A model with its details, and an id name:depth for each depth; of one never open, its name."""
        if name in self.open and name not in self._known:
            self._known[name] = _describe(self.open[name])
        plain = {"id": name, "object": "model", "created": self.started, "owned_by": "topograd"}
        return self._known.get(name, [plain])


def _describe(model: OpenModel) -> list[dict[str, Any]]:
    served = model.served
    session = served.model.session
    common = {"object": "model", "created": served.started, "owned_by": "topograd"}
    exits = session.plan.predicting()
    about = {
        "context": served.context,
        "vocab": served.vocab,
        "exits": [
            {"exit": k, "stage": stage + 1, "layers": session.plan.stages[stage].stage.stop}
            for k, stage in enumerate(exits, 1)
        ],
        "stages": len(session.plan.stages),
        "depths": served.depths,
        "default_depth": "full",
        "chat": "template" if model.chats.template is not None else "plain",
        "specialists": [] if served.specialists is None else served.specialists.names,
    }
    base = {"id": served.name, **common, "topograd": about}
    return [base, *({"id": f"{served.name}:{depth}", **common} for depth in served.depths)]
