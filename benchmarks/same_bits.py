"""Two versions of this package: are the GPT's weights, losses, gradients, logits and texts the same bits?

    python benchmarks/same_bits.py OLD/src NEW/src

Each version runs in a process of its own, on six shapes of GPT, in float32 and float64. What differs is
named, and the exit code is then 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

import topograd as tg

SIZES: dict[str, Any] = {"layers": 4, "width": 32, "heads": 2, "vocab": 50, "context": 24}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "swiglu, shared keys, windows": {"mlp": "swiglu", "heads": 4, "kv_heads": 2, "windows": (0, 5)},
    "tied, capped": {"tied": True, "softcap": 20.0, "smear": False, "x0_blend": False},
    "hybrid": {"architecture": "hybrid"},
    "mamba2": {"architecture": "mamba2"},
    "low-rank heads": {"head_rank": 4},
}


def digest(x: Tensor | None) -> str | None:
    return None if x is None else hashlib.sha256(x.detach().contiguous().numpy().tobytes()).hexdigest()


def read(shape: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Everything that one shape gives in one precision, as digests and tokens."""
    torch.manual_seed(0)
    model = tg.GPT(**{**SIZES, **shape})
    found: dict[str, Any] = {"weights": [[name, digest(p)] for name, p in model.named_parameters()]}
    model = model.to(dtype)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=noise).to(dtype))
    inputs = torch.randint(SIZES["vocab"], (3, 20), generator=noise)
    found["logits"] = digest(model(inputs))
    plan = tg.prepare(model, "2,2")
    found["losses"] = digest(tg.train_step(model, plan, inputs, inputs.roll(-1, 1)))
    found["gradients"] = [digest(p.grad) for p in model.parameters()]
    texts = tg.generate_tokens(tg.FixedDepth(tg.Engine(model, plan, SIZES["context"]), 1), [[1, 2, 3]], 12)
    return found | {"text": [str(emitted) for emitted in texts]}


def main(words: list[str]) -> int:
    if not words:  # a version's own process
        precisions = (torch.float32, torch.float64)
        print(json.dumps({f"{n}, {d}": read(s, d) for n, s in SHAPES.items() for d in precisions}))
        return 0
    results = []
    for source in words:
        environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, os.path.abspath(__file__)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout))
    old, new = results
    differ = [f"{case}: {part}" for case in old for part in old[case] if old[case][part] != new[case][part]]
    print("\n".join(differ) or f"{len(old)} cases are the same bits")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
