"""Made-up but plausible runs: staged losses that fall, prefixes that improve, backprop a little better."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from topograd.report.data import RunData

MakeRun = Callable[..., RunData]


def _loss(steps: np.ndarray, better: float, speed: float, noise: np.ndarray) -> np.ndarray:
    fallen = 1 - np.exp(-steps / 60)
    return 6.9 - fallen * (3.0 + speed * np.log1p(steps / 100)) - better * fallen * steps / 2500 + noise


def make(stages: int = 3, steps: int = 2500, pace: float = 0.08, seed: int = 0, every: int = 10) -> RunData:
    """A run of `stages` stages whose steps take `pace` seconds. One stage is backprop, and better."""
    random = np.random.default_rng(seed)
    at = np.arange(every, steps + 1, every)
    batch = 0.07 * random.standard_normal(len(at))
    gains = [0.23] if stages == 1 else [0.05 * (1 - 0.5**k) for k in range(stages)]
    losses = [_loss(at, gain, 0.3, batch + 0.006 * random.standard_normal(len(at))) for gain in gains]
    metrics: list[dict[str, Any]] = []
    for index, step in enumerate(at.tolist()):
        loss = [float(curve[index]) for curve in losses]
        metrics.append(
            {"kind": "train", "step": step, "loss": loss, "seconds": step * pace, "tokens": step * 1024}
        )
        if step % max(every, steps // 10 // every * every) == 0:
            bpb = _bpb(step, gains)
            metrics.append({"kind": "eval", "step": step, "bpb": bpb, "seconds": step * pace})
    evaluation = {"run": f"run-{stages}", "steps": steps, "bpb": _bpb(steps, gains)}
    evaluation |= _diagnostics(stages, random)
    config = {
        "model": {"layers": 6, "width": 96, "heads": 3, "softcap": None},
        "partition": "6" if stages == 1 else ",".join(["2"] * stages),
        "steps": steps,
        "optimizer": {"betas": [0.8, 0.95], "muon": {"lr": 0.02}},
    }
    return RunData(f"demo-{stages}", config, metrics, evaluation)


def _bpb(step: int, gains: list[float]) -> dict[str, Any]:
    values = [float(0.55 * _loss(np.array([step]), gain, 0.3, np.zeros(1))[0]) - 0.06 for gain in gains]
    pooled = {"sum": values[-1] + 0.018, "mean": values[-1] - 0.004, "shrinkage": values[-1] - 0.006}
    return {"last": values[-1], **pooled, "prefix": values}


def _diagnostics(stages: int, random: np.random.Generator) -> dict[str, Any]:
    reliability, errors = [], []
    for k in range(stages):
        bins = (np.arange(15) + 0.5) / 15
        count = np.round(9000 * np.exp(-3.2 * bins) + 900 * (bins > 0.9) + 300).astype(int)
        count[0] = 0
        accuracy = np.clip(
            bins - 0.05 * (k + 1) * np.sin(math.pi * bins) + 0.01 * random.standard_normal(15), 0, 1
        )
        errors.append(float((count * abs(accuracy - bins)).sum() / count.sum()))
        confidence: list[float | None] = [None, *bins[1:].tolist()]
        reliability.append(
            {"confidence": confidence, "accuracy": [None, *accuracy[1:].tolist()], "count": count.tolist()}
        )
    return {
        "ece": errors,
        "reliability": reliability,
        "effective_rank": [61.3 * 0.88**k for k in range(stages)],
        "usefulness": [None, *(0.034 * 0.4**k - 0.012 for k in range(stages - 1))],
        "tokens": 76000,
        "bytes": 200000,
    }


@pytest.fixture
def make_run() -> MakeRun:
    return make


@pytest.fixture
def comparison() -> dict[str, Any]:
    mib = 1 << 20
    return {
        "step_time_ratio": {"median": 1.153, "low": 1.121, "high": 1.187},
        "memory": {
            "staged": 14.2 * mib,
            "backprop": 35.9 * mib,
            "ratio": 14.2 / 35.9,
            "by_stages": {"1": 35.9 * mib, "2": 19.5 * mib, "3": 14.2 * mib, "6": 8.8 * mib},
        },
        "gap": 4.13,
        "samples": [
            {
                "title": f"first {k} of 3 stages",
                "prompt": "def ",
                "text": "read(self, size=-1):\n    if size < 0 && <b>self.closed</b>:\n        return 'x'\n",
            }
            for k in (1, 2, 3)
        ],
    }
