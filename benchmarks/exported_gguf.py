"""An exported GGUF read by llama.cpp itself: the same greedy text as the run it was made of.

    python benchmarks/exported_gguf.py RUN [--python PYTHON] [--tokens 24] [--json]

PYTHON is an interpreter that has llama-cpp-python, which needs a compiler to install and is therefore not
among this package's extras; by default the one that runs this. Exports the run as GGUF (F32), lets llama.cpp
tokenize and continue prompts of code, prose and chat at temperature 0, and compares tokens and texts. The two
programs round differently: where the texts part, the place is printed with the gap of our two best logits.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

import topograd as tg
from topograd.convert.export import export_model

PROMPTS = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The capital of France is",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
)
CHILD = """
import json, sys
from llama_cpp import Llama
asked = json.loads(sys.stdin.read())
model = Llama(asked["file"], n_ctx=512, n_threads=1, verbose=False)
found = []
for prompt in asked["prompts"]:
    tokens = model.tokenize(prompt.encode(), add_bos=False, special=True)
    written = []
    for token in model.generate(tokens, top_k=1, temp=0.0, repeat_penalty=1.0):
        if token == model.token_eos() or len(written) == asked["tokens"]:
            break
        written.append(token)
    found.append({"prompt": tokens, "written": written})
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Settings:
    """Which run, and who has llama.cpp."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    python: Path = Path(sys.executable)
    tokens: int = 24
    json: bool = False


def theirs(settings: Settings, file: Path) -> list[dict[str, list[int]]]:
    """What llama.cpp makes of the file."""
    asked = {"file": str(file), "prompts": PROMPTS, "tokens": settings.tokens}
    done = subprocess.run(
        [str(settings.python), "-c", CHILD], input=json.dumps(asked), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"llama.cpp did not read it: {done.stderr.strip().splitlines()[-1]}")
    found: list[dict[str, list[int]]] = json.loads(done.stdout)
    return found


def compare(model: tg.Model, prompt: str, other: dict[str, list[int]], tokens: int) -> dict[str, Any]:
    """Tokens of the prompt, and the continuation, ours and theirs."""
    begin = model.session.tokenizer.encode(prompt, "chat")
    ours = [e.token for _, e in tg.generate_tokens(tg.FixedDepth(model.engine), [begin], tokens)]
    ours = ours[: len(other["written"])]
    parts = next((i for i, (a, b) in enumerate(zip(ours, other["written"], strict=True)) if a != b), None)
    found: dict[str, Any] = {
        "prompt": prompt,
        "same_tokens": begin == other["prompt"],
        "same_text": parts is None,
        "text": model.session.tokenizer.decode(ours),
    }
    if parts is not None:
        best = model.logits([*begin, *ours[:parts]])[-1].topk(2).values
        found |= {"parts_at": parts, "gap": float(best[0] - best[1])}
    return found


def main(settings: Settings) -> None:
    with tempfile.TemporaryDirectory() as place:
        export_model(settings.run, Path(place) / "out", "gguf")
        others = theirs(settings, Path(place) / "out" / "model.gguf")
    model = tg.load(settings.run)
    found = [
        compare(model, prompt, other, settings.tokens) for prompt, other in zip(PROMPTS, others, strict=True)
    ]
    print(json.dumps(found) if settings.json else "\n".join(str(each) for each in found))


if __name__ == "__main__":
    main(tyro.cli(Settings))
