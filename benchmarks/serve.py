"""A server under load: 1, 8 and 32 clients, at full depth and with depths mixed, and what HTTP costs.

    python benchmarks/serve.py [RUN] [--clients 1 8 32] [--tokens 48] [--rounds 2] [--requests 0] [--json]
    python benchmarks/serve.py --address http://127.0.0.1:8080 --model NAME      another server

Every client streams one completion after another, with `ignore_eos` so that all are equally long. Printed:
tokens a second of all clients, time to the first token and of a whole request (median and 99th percentile),
tokens a second of a request by depth, and the share of the time that was not spent in steps of the model:
with one client that is HTTP, JSON and the way between threads. With `--requests N`, N short requests follow,
and the server's memory after each fifth of them is printed.
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
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    if depth is not None:
        body |= {"depth": depth, "ignore_eos": True}
    began, first, made = time.perf_counter(), None, tokens
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                if first is None:
                    first = time.perf_counter()
                if '"completion_tokens"' in line and (usage := json.loads(line[6:]).get("usage")):
                    made = usage["completion_tokens"]
    ended = time.perf_counter()
    assert first is not None
    return {"depth": depth, "first": first - began, "total": ended - began, "tokens": made}


async def load(
    address: str, model: str, clients: int, depths: Sequence[str | None], tokens: int, rounds: int
) -> dict[str, Any]:
    """Several clients, each with a depth of its own, each asking `rounds` times."""
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits, trust_env=False) as client:
        before = await steps(client)

        async def run(k: int) -> list[dict[str, Any]]:
            return [await one(client, model, depths[k % len(depths)], tokens, k) for _ in range(rounds)]

        began = time.perf_counter()
        found = [each for texts in await asyncio.gather(*map(run, range(clients))) for each in texts]
        wall = time.perf_counter() - began
        spent = await steps(client)
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
        "outside_the_model": None if before is None or spent is None else 1 - (spent - before) / wall,
    }


async def steps(client: httpx.AsyncClient) -> float | None:
    """Seconds that the server has spent in steps of its model; None of another server."""
    found = re.search(r"topograd_step_seconds_sum (\S+)", (await client.get("/metrics")).text)
    return None if found is None else float(found[1])


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

        sizes = []
        for part in range(5):
            await asyncio.gather(*(some(requests // 40, 1000 * part + 100 * j) for j in range(8)))
            sizes.append(resident(pid))
    return {"requests": 5 * 8 * (requests // 40), "mib_after_each_fifth": sizes}


def resident(pid: int) -> float:
    """Resident memory of a process, MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(asked: argparse.Namespace, address: str, model: str, pid: int | None) -> dict[str, Any]:
    """Everything, in turns: each number of clients at full depth, then mixed."""
    await load(address, model, 1, ["full" if pid else None], 8, 1)
    results: dict[str, Any] = {"address": "own" if pid else address, "model": model, "full": [], "mixed": []}
    for clients in asked.clients:
        plain: list[str | None] = ["full"] if pid else [None]
        results["full"].append(await load(address, model, clients, plain, asked.tokens, asked.rounds))
        if pid and clients > 1:
            results["mixed"].append(await load(address, model, clients, MIXED, asked.tokens, asked.rounds))
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
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.address:
        results = asyncio.run(measure(asked, asked.address, asked.model, None))
    else:
        where = [asked.run] if asked.run else []
        command = [
            sys.executable,
            "-m",
            "topograd",
            "serve",
            *where,
            "--port",
            "0",
            "--rows",
            str(asked.rows),
        ]
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
    print("memory", json.dumps(results.get("memory")))


if __name__ == "__main__":
    main()
