"""`topograd serve`: an OpenAI-compatible server with depth per request, and a playground."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from topograd.cli.console import WeightsFlag, note, note_runtime, parse
from topograd.cli.main import INTERRUPTED
from topograd.errors import ConfigError
from topograd.pretrained import REFERENCE
from topograd.serve.settings import Limits

TOKEN = "TOPOGRAD_TOKEN"


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a run's model: /v1/completions, /v1/chat/completions, and a playground at the address itself.

    As with OpenAI's API, a request without a temperature is sampled at temperature 1; 0 is greedy.
    """

    folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[DIR]")] = None
    """The run's folder; the model that comes with the package if not given."""
    specialists: Annotated[str | None, tyro.conf.arg(metavar="A,B")] = None
    """Folders of specialists that requests may switch on by name."""
    host: str = "127.0.0.1"
    """Where to listen; an address that others can reach needs a token."""
    port: int = 8000
    """Where to listen; 0 takes any free port."""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The model's id; by default the folder's name."""
    token: Annotated[str | None, tyro.conf.arg(metavar="TOKEN")] = None
    """What clients must send as Authorization: Bearer TOKEN; better set TOPOGRAD_TOKEN, which nobody sees."""
    runtime: Annotated[str | None, tyro.conf.arg(metavar="torch|onnx")] = None
    """What runs the model; by default ONNX Runtime for few texts and torch for many, where they can."""
    weights: WeightsFlag = "float32"
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(default_factory=Limits)


def run(argv: list[str]) -> int:
    """Serve until told to stop; 0 after SIGTERM, 130 after Ctrl-C."""
    asked = parse(Serve, argv, "serve")
    token = asked.token or os.environ.get(TOKEN) or None
    if not 0 <= asked.port < 2**16:
        raise ConfigError(f"--port is {asked.port}", remedy="it must be from 0 to 65535")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("serving needs more packages: pip install 'topograd[serve]'") from None
    import asyncio

    from topograd.serve.server import Running, bind, is_loopback, open_served

    if token is None and not is_loopback(asked.host):
        raise ConfigError(
            f"--host {asked.host} can be reached from elsewhere, so clients must show a token: "
            f"set {TOKEN} or pass --token"
        )
    with bind(asked.host, asked.port) as sock:
        folders = [Path(part.strip()) for part in (asked.specialists or "").split(",") if part.strip()]
        served = open_served(
            asked.folder or REFERENCE, asked.name, asked.limits, folders, asked.runtime, asked.weights
        )
        running = Running(served, sock, token)

        def ready() -> None:
            note_runtime(served.model.engine)
            print(f"serving {running.served.name} at {running.address()} (playground: the same)", flush=True)

        ended = asyncio.run(running.run(ready))
    note("stopped")
    return INTERRUPTED if ended == signal.SIGINT else 0
