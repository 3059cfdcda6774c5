"""`topograd serve`: an OpenAI-compatible server with depth per request, and a playground."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from topograd.cli.console import WeightsFlag, note, note_runtime, parse
from topograd.cli.main import INTERRUPTED
from topograd.errors import ConfigError
from topograd.pretrained import REFERENCE
from topograd.serve.settings import Limits

if TYPE_CHECKING:
    from topograd.serve.texts import ServedModel

TOKEN = "TOPOGRAD_TOKEN"


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve models: OpenAI's and Anthropic's interfaces, and a playground at the address itself.

    A request without a temperature is sampled at 1, as OpenAI's interface has it; chat and generate here take
    the likeliest token. Send "temperature": 0 for that.
    """

    models: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[MODEL ...]")] = ()
    """Runs' folders, Hugging Face folders, GGUF files, or hf:ORG/NAME; by default the model that comes with
    the package. The first is opened at once, the others when they are first asked for."""
    specialists: Annotated[str | None, tyro.conf.arg(metavar="A,B")] = None
    """Folders of specialists of the first model that requests may switch on by name."""
    host: str = "127.0.0.1"
    """Where to listen; an address that others can reach needs a token."""
    port: int = 8000
    """Where to listen; 0 takes any free port."""
    name: Annotated[str | None, tyro.conf.arg(metavar="A,B")] = None
    """The models' ids, one for each; by default the folders' names."""
    memory: Annotated[float | None, tyro.conf.arg(metavar="GB")] = None
    """Of several models: close those used least recently where the open ones have more parameters than this
    many gigabytes hold."""
    prompt_cache: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Keep what was computed of prompts in this folder, also over restarts."""
    prompt_cache_gb: Annotated[float, tyro.conf.arg(metavar="GB")] = 4.0
    """How much of it: what was used least recently is removed."""
    token: Annotated[str | None, tyro.conf.arg(metavar="TOKEN")] = None
    """What clients must send as Authorization: Bearer TOKEN; or several with commas between, each of a client
    that shares nothing with the others. Better set TOPOGRAD_TOKEN, which other users of the machine do not
    see."""
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
    from topograd.runtime.choice import check_runtime
    from topograd.serve.guard import is_loopback
    from topograd.serve.server import Running, bind, open_served

    if token is None and not is_loopback(args.host):
        raise ConfigError(
            setting="host",
            given=args.host,
            problem=f"--host {args.host} can be reached from elsewhere, so clients must show a token: "
            f"set {TOKEN} or pass --token",
        )
    names = _names(args)
    check_runtime(args.runtime, args.weights)
    with bind(args.host, args.port) as sock:
        folders = [Path(part.strip()) for part in (args.specialists or "").split(",") if part.strip()]

        def opener(model: Path, name: str, specialists: list[Path]) -> Callable[[], ServedModel]:
            return lambda: open_served(
                resolve_model(model),
                name,
                args.limits,
                specialists,
                args.runtime,
                args.weights,
                args.prompt_cache,
                args.prompt_cache_gb * 1e9,
            )

        models = args.models or (REFERENCE,)
        for model in models:
            if not str(model).startswith("hf:") and not model.exists():
                resolve_model(model)  # it says what is missing, now and not when it is asked for
        openers = {
            name: opener(model, name, [] if k else folders)
            for k, (name, model) in enumerate(zip(names, models, strict=True))
        }
        memory = float("inf") if args.memory is None else args.memory * 1e9
        running = Running(openers[names[0]](), sock, token, openers, memory)

        def ready() -> None:
            note_runtime(running.served.model)
            print(f"serving {', '.join(names)} at {running.address()} (playground: the same)", flush=True)

        ended = asyncio.run(running.run(ready))
    note("stopped")
    return INTERRUPTED if ended == signal.SIGINT else 0


def _names(args: Serve) -> list[str]:
    """The id of each model."""
    from topograd.serve.texts import model_name

    models = args.models or (REFERENCE,)
    names = [model_name(Path(str(model).removeprefix("hf:").removesuffix(".gguf"))) for model in models]
    if args.name is not None:
        names = [part.strip() for part in args.name.split(",")]
    good = all(re.fullmatch(r"[^\s:,]{1,200}", name) for name in names)
    if not good or len(names) != len(models) or len(set(names)) < len(names):
        allowed = f"{len(models)} different names, with commas between, without colons and spaces"
        remedy = "give one for each model with --name"
        raise ConfigError(setting="name", given=",".join(names), allowed=allowed, remedy=remedy)
    for setting, size in (("memory", args.memory), ("prompt_cache_gb", args.prompt_cache_gb)):
        if size is not None and not 0 < size < float("inf"):
            raise ConfigError(setting=setting, given=size, allowed="above 0 and finite")
    return names
