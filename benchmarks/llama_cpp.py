"""Ours against llama.cpp and transformers: the same model, prompts, precision and threads, taking turns.

    python benchmarks/llama_cpp.py runs/smollm2 --python LLAMA_VENV/bin/python --threads 2 --json

llama.cpp runs behind a pipe (`llama_worker.py`) in the Python that has llama-cpp-python; its F32 and Q8_0
files are our own export of the run, and Q4_1 is a file of the same model (`--q4`). Every engine continues the
same prompt greedily, one token at a time, in an order that rotates; a ratio is taken within a round. Prefill
is one prompt of 512 tokens. The share of bandwidth is of a plain read in this process.

With --clock cpu, times are of each engine's processor, for one thread on a machine that others use too: they
still share its memory. Before its first counted round every engine has written a text, so what is done once
(`runtime/hugepages.py`) is done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from topograd.convert.export import export_model
from topograd.decode.benchmark import matrix_bytes, read_bandwidth
from topograd.decode.calibration.measure import PositionCosts, measure_positions
from topograd.decode.depths import engine_of
from topograd.decode.engine import Engine, likeliest
from topograd.decode.strategies import FixedDepth, continue_tokens
from topograd.runs.session import open_session
from topograd.timing import Spread, ratio

WORKER = Path(__file__).with_name("llama_worker.py")
PAIRS = {"float32": "F32", "int8": "Q8_0", "int4": "Q4_1"}
Turn = Callable[[], tuple[float, float]]
"""Seconds of a prefill and of decoding."""


class Llama:
    """llama.cpp with one file."""

    def __init__(self, python: str, file: Path, threads: int, context: int, clock: str) -> None:
        self.process = subprocess.Popen(
            [python, "-P", str(WORKER), str(file), str(threads), str(context), clock],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def continued(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps({"prompt": prompt, "tokens": tokens}), file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self.process.communicate()


def ours(engine: Engine, clock: str, prompt: list[int], tokens: int) -> tuple[float, float]:
    """Read a prompt up to its first token, and write `tokens` more."""
    strategy, last = FixedDepth(engine), engine.exits[-1]
    now = time.process_time if clock == "cpu" else time.perf_counter
    began = now()
    with torch.inference_mode():
        batch = engine.start([prompt])
        engine.run(batch, last)
        likeliest(engine.logits(batch, last))
    read = now()
    for _ in continue_tokens(strategy, batch, tokens):
        pass
    return read - began, now() - read


def hugging_face(folder: Path) -> Callable[[list[int], int], tuple[float, float]]:
    """transformers' `generate` on our export."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(prompt: list[int], tokens: int) -> tuple[float, float]:
        inputs = torch.tensor([prompt])
        seconds = []
        for count in (1, tokens + 1):
            began = time.perf_counter()
            model.generate(inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
            seconds.append(time.perf_counter() - began)
        return seconds[0], seconds[1] - seconds[0]

    return run


def measure(turns: dict[str, Turn], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """What every engine took in each round, in an order that rotates; the first round is not counted."""
    names, found = list(turns), {name: list[tuple[float, float]]() for name in turns}
    for i in range(rounds + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds = turns[name]()
            if i:
                found[name].append(seconds)
    return found


def _relative(costs: PositionCosts) -> dict[str, float]:
    """Seconds of several positions at once over one position's."""
    return {str(positions): seconds / costs.full for positions, seconds in costs.verify.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--python", required=True, help="a Python with llama-cpp-python")
    parser.add_argument("--q4", type=Path, help="the same model as a Q4_1 file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    session = open_session(asked.run)
    text = "A decoder that is measured reads a text of many words, one after another. " * 200
    tokens = session.tokenizer.encode(text)
    short, long = tokens[:64], tokens[: asked.prefill]
    with tempfile.TemporaryDirectory() as place:
        files = exported(asked, Path(place))
        context = max(asked.prefill, 64) + asked.tokens + 8
        llamas = {
            name: Llama(asked.python, file, asked.threads, context, asked.clock)
            for name, file in files.items()
        }
        engines = {weights: engine_of(session, "onnx", weights) for weights in PAIRS}

        def llama(name: str, prompt: list[int], count: int) -> tuple[float, float]:
            answer = llamas[name].continued(prompt, count)
            return answer["prefill"], answer["decode"]

        turns: dict[str, Turn] = {}
        for name in llamas:
            turns[f"llama.cpp {name}"] = partial(llama, name, short, asked.tokens)
        for weights, engine in engines.items():
            turns[f"ours {weights}"] = partial(ours, engine, asked.clock, short, asked.tokens)
        if not asked.no_transformers:
            plain = hugging_face(Path(place) / "hf")
            turns["transformers"] = lambda: plain(short, asked.tokens)
        decoded = measure(turns, asked.rounds)
        reading: dict[str, Turn] = {
            "llama.cpp F32": lambda: llama("F32", long, 1),
            "ours float32": lambda: ours(engines["float32"], asked.clock, long, 1),
        }
        prefilled = measure(reading, asked.rounds)
        for each in llamas.values():
            each.close()
    print(json.dumps(results(asked, decoded, prefilled) | shares(asked, session, engines, decoded)))


def exported(asked: argparse.Namespace, place: Path) -> dict[str, Path]:
    """The run as llama.cpp and transformers read it."""
    files = {}
    for kind in ("F32", "Q8_0"):
        export_model(asked.run, place / kind, "gguf", kind)
        files[kind] = place / kind / "model.gguf"
    if asked.q4 is not None:
        files["Q4_1"] = asked.q4
    if not asked.no_transformers:
        export_model(asked.run, place / "hf", "hf")
    return files


Times = dict[str, list[tuple[float, float]]]


def results(asked: argparse.Namespace, decoded: Times, prefilled: Times) -> dict[str, Any]:
    """Rates, and ratios of equal precision."""
    seconds = {name: [decode for _, decode in each] for name, each in decoded.items()}
    reads = {name: [prefill for prefill, _ in each] for name, each in prefilled.items()}
    over = {
        weights: ratio(seconds, f"llama.cpp {kind}", f"ours {weights}").as_dict()
        for weights, kind in PAIRS.items()
        if f"llama.cpp {kind}" in seconds
    }
    if "transformers" in seconds:
        over["float32 over transformers"] = ratio(seconds, "transformers", "ours float32").as_dict()
    return {
        "threads": asked.threads,
        "clock": asked.clock,
        "tokens_per_second": {n: asked.tokens / Spread.of(each).median for n, each in seconds.items()},
        "over_llama_cpp": over,
        "prefill_tokens_per_second": {n: asked.prefill / Spread.of(each).median for n, each in reads.items()},
        "prefill_over_llama_cpp": ratio(reads, "llama.cpp F32", "ours float32").as_dict(),
    }


def shares(
    asked: argparse.Namespace, session: Any, engines: dict[str, Engine], decoded: Times
) -> dict[str, Any]:
    """Shares of bandwidth and costs of rows, by the clock on the wall."""
    if asked.clock != "wall":
        return {}
    bandwidth = read_bandwidth()
    rate = {
        weights: asked.tokens / Spread.of([decode for _, decode in decoded[f"ours {weights}"]]).median
        for weights in engines
    }
    return {
        "read_bandwidth": bandwidth,
        "bandwidth_share": {
            weights: matrix_bytes(engine, session.stack) * rate[weights] / bandwidth
            for weights, engine in engines.items()
        },
        "rows": {weights: _relative(measure_positions(engine)) for weights, engine in engines.items()},
    }


if __name__ == "__main__":
    main()
