"""A server under load: 1, 8 and 32 clients, at full depth and with depths mixed, and what HTTP costs.

    python benchmarks/serve.py [RUN] [--clients 1 8 32] [--tokens 48] [--rounds 2] [--runtime NAME] [--json]
    python benchmarks/serve.py [RUN] --clients --requests 10000                  memory over many requests
    python benchmarks/serve.py --address http://127.0.0.1:8080 --model NAME      another server

Every client streams one completion after another, with `ignore_eos` so that all are equally long (of another
server: as long as they get). Printed: tokens a second of all clients, time to the first token and of a whole
request (median and 99th percentile), and tokens a second of a request by depth.

`http` is what a token costs more for one client that streams than for the same scheduler in this process,
without threads, sockets and JSON: both take turns. With `--requests N`, N short requests of four depths are
sent by 8 clients, and the server's memory after each tenth of them is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from topograd.pretrained import REFERENCE
from topograd.serve.metrics import Counters
from topograd.serve.request_schema import COMPLETION, read
from topograd.serve.scheduler import Scheduler
from topograd.serve.server import open_served
from topograd.serve.settings import Limits

MIXED = ("full", "prefix:1", "full", "prefix:1")
PROMPTS = (
    "def read(self, size=-1):\n",
    "class Stack:\n    ",
    "for name in sorted(names):\n    ",
    "import os\n",
)


async def one(
    client: httpx.AsyncClient, model: str, depth: str | None, tokens: int, k: int
) -> dict[str, Any]:
    """One streamed completion: when its first token and its end came."""
    body: dict[str, Any] = {"model": model, "prompt": PROMPTS[k % len(PROMPTS)] * 2, "max_tokens": tokens}
    body |= {"temperature": 0, "stream": True}
    if depth is not None:
        body |= {"depth": depth, "ignore_eos": True, "stream_options": {"include_usage": True}}
    began, first, made, chunks = time.perf_counter(), None, 0, 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunks += depth is None and bool(json.loads(line[6:])["choices"][0].get("text"))
                if first is None:
                    first = time.perf_counter()
                if '"completion_tokens"' in line and (usage := json.loads(line[6:]).get("usage")):
                    made = usage["completion_tokens"]
    ended = time.perf_counter()
    assert first is not None
    return {"depth": depth, "first": first - began, "total": ended - began, "tokens": made or chunks}


async def load(
    address: str, model: str, clients: int, depths: Sequence[str | None], tokens: int, rounds: int
) -> dict[str, Any]:
    """Several clients, each with a depth of its own, each asking `rounds` times."""
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits, trust_env=False) as client:

        async def run(k: int) -> list[dict[str, Any]]:
            return [await one(client, model, depths[k % len(depths)], tokens, k) for _ in range(rounds)]

        began = time.perf_counter()
        found = [each for texts in await asyncio.gather(*map(run, range(clients))) for each in texts]
        wall = time.perf_counter() - began
    speeds = {
        str(depth): statistics.median(
            (each["tokens"] - 1) / (each["total"] - each["first"]) for each in found if each["depth"] == depth
        )
        for depth in dict.fromkeys(depths)
        if any(each["depth"] == depth for each in found)
    }
    return {
        "clients": clients,
        "tokens_per_second": sum(each["tokens"] for each in found) / wall,
        "first_token_ms": quantiles([1000 * each["first"] for each in found]),
        "request_ms": quantiles([1000 * each["total"] for each in found]),
        "tokens_per_second_of_a_request": speeds,
    }


class Direct:
    """The scheduler of a run in this process."""

    def __init__(self, run: str | None, runtime: str | None) -> None:
        self.served = open_served(Path(run) if run else REFERENCE, None, Limits(), runtime=runtime)
        model = self.served.model
        self.scheduler = Scheduler(model.session, model.engine, Limits(), Counters())

    def milliseconds(self, tokens: int, k: int) -> float:
        """Of a token, behind the first."""
        asked = read(COMPLETION, {"temperature": 0, "ignore_eos": True})
        prompt = self.served.encode(PROMPTS[k % len(PROMPTS)] * 2)
        (job,) = self.served.jobs(asked, [prompt], tokens, lambda index: lambda progress: None)
        self.scheduler.add([job])
        while self.scheduler.step():
            pass
        assert job.timings.finished is not None
        assert job.timings.first is not None
        return 1000 * (job.timings.finished - job.timings.first) / (tokens - 1)


async def http(asked: argparse.Namespace, address: str, model: str) -> dict[str, Any]:
    """What a token costs one client, and without a client."""
    direct = Direct(asked.run, asked.runtime)
    ours: list[float] = []
    plain: list[float] = []
    async with httpx.AsyncClient(base_url=address, timeout=600, trust_env=False) as client:
        for k in range(2 * asked.turns + 2):
            if k % 2:
                found = await one(client, model, "full", asked.tokens, k // 2)
                ours.append(1000 * (found["total"] - found["first"]) / (found["tokens"] - 1))
            else:
                plain.append(direct.milliseconds(asked.tokens, k // 2))
    ratios = sorted(a / b for a, b in zip(ours[1:], plain[1:], strict=True))
    return {
        "ms_a_token": statistics.median(ours[1:]),
        "ms_a_token_without": statistics.median(plain[1:]),
        "ratio": {"least": ratios[0], "median": statistics.median(ratios), "most": ratios[-1]},
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


async def many(address: str, model: str, pid: int, requests: int) -> dict[str, Any]:
    """Memory of the server before and after many short requests."""
    async with httpx.AsyncClient(base_url=address, timeout=600, trust_env=False) as client:

        async def some(count: int, start: int) -> None:
            for k in range(start, start + count):
                body = {"model": model, "prompt": f"{k} {PROMPTS[k % 4]}", "max_tokens": 2, "temperature": 0}
                body["depth"] = ("full", "prefix:1", "speculate:2", "branches:1-2*2+1")[k % 4]
                assert (await client.post("/v1/completions", json=body)).status_code == 200

        each, sizes = requests // 80, []
        for part in range(10):
            await asyncio.gather(*(some(each, (8 * part + j) * each) for j in range(8)))
            sizes.append(round(resident(pid), 1))
    return {"requests": 80 * each, "mib_after_each_tenth": sizes}


def resident(pid: int) -> float:
    """Resident memory of a process, MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(asked: argparse.Namespace, address: str, model: str, pid: int | None) -> dict[str, Any]:
    """Everything, in turns: each number of clients at full depth, then mixed."""
    await load(address, model, 1, ["full" if pid else None], 8, 2)
    await load(address, model, max(asked.clients, default=1), ["full" if pid else None], 4, 1)
    results: dict[str, Any] = {"address": "own" if pid else address, "model": model, "full": [], "mixed": []}
    for clients in asked.clients:
        plain: list[str | None] = ["full"] if pid else [None]
        results["full"].append(await load(address, model, clients, plain, asked.tokens, asked.rounds))
        if pid and clients > 1:
            results["mixed"].append(await load(address, model, clients, MIXED, asked.tokens, asked.rounds))
    if pid and asked.turns:
        results["http"] = await http(asked, address, model)
    if pid and asked.requests:
        results["memory"] = await many(address, model, pid, asked.requests)
    return results


def main() -> None:
    """Start a server, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?")
    parser.add_argument("--address")
    parser.add_argument("--model", default="")
    parser.add_argument("--runtime")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--turns", type=int, default=0, help="of one client and of no client")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.address:
        results = asyncio.run(measure(asked, asked.address, asked.model, None))
    else:
        command = [sys.executable, "-m", "topograd", "serve", *([asked.run] if asked.run else [])]
        command += ["--port", "0", "--rows", str(asked.rows)]
        command += ["--runtime", asked.runtime] if asked.runtime else []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            found = re.match(r"serving (\S+) at (\S+)", process.stdout.readline())
            assert found, "the server did not start"
            try:
                results = asyncio.run(measure(asked, found[2], found[1], process.pid))
            finally:
                process.terminate()
    if asked.json:
        print(json.dumps(results))
        return
    for kind in ("full", "mixed"):
        for line in results[kind]:
            print(kind, json.dumps(line))
    for kind in ("http", "memory"):
        if kind in results:
            print(kind, json.dumps(results[kind]))


if __name__ == "__main__":
    main()
