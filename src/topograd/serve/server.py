"""A server's life: a socket, a model, a loop, and an end that lets running requests finish.

The first SIGINT or SIGTERM stops taking requests and gives running ones `grace` seconds; a second one ends at
once. Nothing but the prompt cache is written to disk, whole file by whole file, so a server that is killed
loses what was in flight and nothing else.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import uvicorn

from topograd.decode.model import Model
from topograd.errors import ConfigError
from topograd.runs.session import open_session
from topograd.serve.app import Service
from topograd.serve.disk_cache import PromptCache
from topograd.serve.guard import Guard
from topograd.serve.http import BoundedHttp
from topograd.serve.metrics import Counters
from topograd.serve.models import Models, Opener
from topograd.serve.settings import Limits
from topograd.serve.texts import ServedModel
from topograd.serve.worker import Worker
from topograd.specialists.attach import open_specialist
from topograd.specialists.model import SpecialistPool


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: who runs it has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; ConfigError where it cannot be had."""
    sock = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio then sets TCP_NODELAY
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as problem:
        if sock is not None:
            sock.close()
        reason = getattr(problem, "strerror", None) or problem
        raise ConfigError(
            f"host {host} port {port} cannot be listened on ({reason})",
            setting="port",
            given=port,
            remedy="give another port, or 0 for any",
        ) from None
    sock.listen(256)
    return sock


class Running:
    """Models behind a socket."""

    def __init__(
        self,
        served: ServedModel,
        sock: socket.socket,
        token: str | None = None,
        openers: Mapping[str, Opener] | None = None,
        memory: float = float("inf"),
    ) -> None:
        self.sock = sock
        self.counters = Counters()
        self.models = Models(served, self.counters, openers, memory)
        self.service = Service(self.models, self.counters)
        self.guard = Guard(self.service.app(), self.counters, token, served.limits.body)
        config = uvicorn.Config(
            self.guard,
            log_level="error",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=30,
            http=BoundedHttp,
            timeout_graceful_shutdown=max(1, round(served.limits.grace)),
        )
        self.server = _Server(config)

    @property
    def served(self) -> ServedModel:
        """The first model."""
        return self.models.open[self.models.default].served

    @property
    def worker(self) -> Worker:
        """The first model's thread."""
        return self.models.open[self.models.default].worker

    def address(self) -> str:
        """Where the server is."""
        host, port = self.sock.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def stop(self) -> None:
        """Take no more requests; the running ones may finish. A second time: end at once."""
        if self.server.should_exit:
            self.server.force_exit = True
        self.guard.stopping = True
        self.server.should_exit = True

    async def run(self, on_ready: Callable[[], None] | None = None) -> int | None:
        """Serve until a signal or `stop`; the signal that ended it."""
        loop = asyncio.get_running_loop()
        received: list[int] = []

        def stop(number: int) -> None:
            received.append(number)
            self.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) == signal.SIG_IGN:  # as under nohup: it stays so
                continue
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
                loop.add_signal_handler(number, stop, number)
        self.models.start(loop)
        serving = asyncio.create_task(self.server.serve([self.sock]))
        while not self.server.started and not serving.done():
            await asyncio.sleep(0.005)
        if on_ready is not None and not serving.done():
            on_ready()
        try:
            await serving
        finally:
            await asyncio.to_thread(self.models.close)
        return received[0] if received else None


def open_served(
    folder: Path,
    name: str | None,
    limits: Limits,
    specialists: Sequence[Path] = (),
    runtime: str | None = None,
    weights: str = "float32",
    prompt_cache: Path | None = None,
    prompt_cache_bytes: float = 4e9,
) -> ServedModel:
    """A run, ready to be served: its model is laid out and has written a token.

    With folders of specialists, the base is at the checkpoint that they are of.
    """
    pool = None
    if specialists:
        opened = {path.resolve().name: open_specialist(path) for path in specialists}
        if len(opened) < len(specialists):
            raise ConfigError(
                "specialists has two folders of one name", setting="specialists", remedy="rename one"
            )
        pool = SpecialistPool.open(folder, opened, runtime=runtime, weights=weights)
    session = open_session(folder, later=True) if pool is None else pool.attached.base
    model = Model(session, runtime, weights)
    disk = None if prompt_cache is None else PromptCache.of(prompt_cache, prompt_cache_bytes, model)
    served = ServedModel(model, limits, name=name or "", specialists=pool, disk=disk)
    model.generate([served.tokenizer.separator], 1, depth="full")
    return served
