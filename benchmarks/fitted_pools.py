"""Three readings of a trained run: what a fitted pool of its stages gives, a router, and noise in its head.

    python benchmarks/fitted_pools.py [RUN] [--bytes 30000] [--json]

RUN is a run of text whose stages predict, by default the reference model. `composition` is fitted on every
second window of its held-out text and measured on the others. `learned` is what `topograd calibrate` fits and
generate, score and serve read (depth pool, router and shrinkage), with an interval over the windows that were
not fitted to. `head` is by how much the cross-entropy rises under noise of the given share of the head's own
size, mean of a few draws (`composition.py` and `head_perturbation.py` of `papers/product_of_experts/`). The
studies train small models with several seeds; this is one model that was trained for longer, so nothing here
has a spread over trainings.

Limits: all logits are held in float64, stages · tokens · vocabulary of them, so little text is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

import clone  # noqa: F401  (for what is not installed)
from papers.product_of_experts import composition, head_perturbation
from topograd.decode.calibration import fit_pool
from topograd.evaluation import exit_pools
from topograd.pretrained import REFERENCE
from topograd.runs.session import heldout_text, open_session


@dataclass(frozen=True)
class Settings:
    """What is read."""

    run: tyro.conf.Positional[Path] = REFERENCE
    bytes: int = 30_000
    """Held-out text."""
    learned: bool = False
    """Read this part alone."""
    json: bool = False


def measure(settings: Settings) -> dict[str, Any]:
    """Both readings of a run."""
    session = open_session(settings.run)
    text = heldout_text(session, None, settings.bytes)
    stack: Any = session.stack
    rows = range(len(text.inputs))
    weights = fit_pool.fit(fit_pool.ExitStates.read(session, text, rows[::2]))
    learned = exit_pools.measure(session, fit_pool.ExitStates.read(session, text, rows[1::2]), weights)
    if settings.learned:
        return {"run": str(settings.run), "bytes": text.nbytes, "learned": learned}
    return {
        "run": str(settings.run),
        "bytes": text.nbytes,
        "learned": learned,
        "pools": dict(composition.probe(stack, session.plan, text)),
        "head": dict(head_perturbation.probe(stack, session.plan, text)),
    }


def main() -> None:
    """Print the tables, or one JSON object."""
    settings = tyro.cli(Settings)
    found = measure(settings)
    if settings.json:
        print(json.dumps(found))
        return
    learned = found["learned"]
    for name, gain in learned["gain"].items():
        low, high = learned["interval"][name]
        bpb = learned["bpb"][name]
        print(f"depth {name:18} {bpb:.4f} BPB  gains {gain:+.4f} [{low:+.4f}, {high:+.4f}]")
    if "pools" not in found:
        return
    pools = found["pools"]
    for name in composition.POOLS:
        print(f"{name:24} {pools[name]:.4f} BPB  {pools[name] - pools['last']:+.4f}")
    for name, weights in pools["weights"].items():
        print(f"weights of {name:22} {', '.join(f'{w:.3f}' for w in weights)}")
    print(f"right is surer {pools['right is surer']:.3f}")
    for name, rise in found["head"].items():
        print(f"noise, {name:12} {rise:+.4f} nats a token")


if __name__ == "__main__":
    main()
