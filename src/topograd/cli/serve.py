"""`topograd serve`: an OpenAI-compatible server with depth per request, and a playground."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from topograd.cli.console import OptionalModel, WeightsFlag, note, note_runtime, parse
from topograd.cli.main import INTERRUPTED
from topograd.errors import ConfigError
from topograd.pretrained import REFERENCE
from topograd.serve.settings import Limits

TOKEN = "TOPOGRAD_TOKEN"


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model: /v1/completions, /v1/chat/completions, and a playground at the address itself.

    A request without a temperature is sampled at 1, as OpenAI's interface has it; chat and generate here take
    the likeliest token. Send "temperature": 0 for that.
    """

    model: OptionalModel = None
    specialists: Annotated[str | None, tyro.conf.arg(metavar="A,B")] = None
    """Folders of specialists that requests may switch on by name."""
    host: str = "127.0.0.1"
    """Where to listen; an address that others can reach needs a token."""
    port: int = 8000
    """Where to listen; 0 takes any free port."""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The model's id; by default the folder's name."""
    token: Annotated[str | None, tyro.conf.arg(metavar="TOKEN")] = None
    """What clients must send as Authorization: Bearer TOKEN. Better set TOPOGRAD_TOKEN, which other users of
    the machine do not see."""
    runtime: Annotated[str | None, tyro.conf.arg(metavar="torch|native|onnx")] = None
    """What runs the model; by default the native kernels, else ONNX Runtime, else torch, where they can."""
    weights: WeightsFlag = "float32"
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(default_factory=Limits)


def run(argv: list[str]) -> int:
    """Serve until told to stop; 0 after SIGTERM, 130 after Ctrl-C."""
    args = parse(Serve, argv, "serve")
    token = args.token or os.environ.get(TOKEN) or None
    if not 0 <= args.port < 2**16:
        raise ConfigError(setting="port", given=args.port, allowed="from 0 to 65535")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("serving needs more packages: pip install 'topograd[serve]'") from None
    import asyncio

    from topograd.convert.model_argument import resolve_model
    from topograd.serve.server import Running, bind, is_loopback, open_served

    if token is None and not is_loopback(args.host):
        raise ConfigError(
            setting="host",
            given=args.host,
            problem=f"--host {args.host} can be reached from elsewhere, so clients must show a token: "
            f"set {TOKEN} or pass --token",
        )
    with bind(args.host, args.port) as sock:
        folders = [Path(part.strip()) for part in (args.specialists or "").split(",") if part.strip()]
        served = open_served(
            resolve_model(args.model or REFERENCE),
            args.name,
            args.limits,
            folders,
            args.runtime,
            args.weights,
        )
        running = Running(served, sock, token)

        def ready() -> None:
            note_runtime(served.model)
            print(f"serving {running.served.name} at {running.address()} (playground: the same)", flush=True)

        ended = asyncio.run(running.run(ready))
    note("stopped")
    return INTERRUPTED if ended == signal.SIGINT else 0
