"""The sampled learning coefficient against exact ones, at equal gradients, beside devinterp where it is.

    python benchmarks/learning_coefficient.py [--seeds 3] [--draws 200] [--json]
    python benchmarks/learning_coefficient.py --profile MODEL [--threads 2]

Each case is a linear network at the most singular parameter of its truth, where the local coefficient is the
global one and known exactly (`papers/dead_directions/families/deep_linear.py`). Ours is
`geometry.learning_coefficient` with its defaults; the other is devinterp's own SGMCMC.sgld with its recipe
(loss of the batches along the chain less one loss at the start, which all chains share), with our step, γ and
nβ, as it looks for none. devinterp is no dependency: give its place with PYTHONPATH, or it is left out.
Errors are over seeds, each with its data.

`--profile`: seconds of a step of `topograd coefficient MODEL` in the first, middle, last layer, and of a
gradient, the forward pass in it, and the noise; what all layers take by them, what the command says before it
begins, and how many gradients a layer may take if all are to be done in `GOAL` seconds.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

import clone  # noqa: F401  (for what is not installed)
from papers.dead_directions.families.deep_linear import deep_linear_coefficient
from topograd.cli.coefficient import DRAWS, command_settings, expected_seconds, rows_of
from topograd.cli.probe_model import open_probe
from topograd.geometry import learning_coefficient
from topograd.geometry.singular.coefficient import LearningCoefficient
from topograd.geometry.singular.langevin import SEARCHED, Langevin, Noise, Target, step_seconds
from topograd.geometry.singular.parts import layer_parts
from topograd.geometry.singular.terms import sampled_weights

GOAL = 1800.0
PROFILED = 3
"""Passes of which the median is taken."""
CASES = (((5, 2, 4), 1), ((4, 3, 4), 2), ((3, 3, 3, 3), 1), ((4, 2, 2, 3), 0))


@dataclass(frozen=True)
class Settings:
    """How much to sample."""

    seeds: int = 3
    samples: int = 1000
    batch: int = 50
    burn_in: int = 500
    draws: int = 200
    noise: float = 1.0
    profile: Path | None = None
    """A model whose layers are profiled."""
    threads: int | None = None
    json: bool = False


def network(widths: tuple[int, ...], rank: int) -> nn.Sequential:
    """The most singular parameter: each map is the identity on the first `rank` units and zero elsewhere."""
    maps = []
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.zero_()
            linear.weight[:rank, :rank] = torch.eye(rank, dtype=torch.float64)
        maps.append(linear)
    return nn.Sequential(*maps)


def data(model: nn.Module, width: int, settings: Settings, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of inputs, and the truth with noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(settings.samples, width, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        y = model(x)
    y = y + settings.noise * torch.randn(y.shape, generator=generator, dtype=torch.float64)
    return list(zip(x.split(settings.batch), y.split(settings.batch), strict=True))


def devinterp(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], ours: LearningCoefficient, seed: int
) -> float:
    """devinterp's chains and formula with our step, γ = 1, nβ and as many gradients."""
    from devinterp.optim import SGMCMC  # type: ignore[import-not-found]

    def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (network(batch[0]) - batch[1]).square().sum(-1).mean() / 2

    start = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    chains, steps = ours.traces.shape[0], ours.gradients // ours.traces.shape[0]
    found = []
    with torch.no_grad():  # one start for all chains, of one batch a chain, as its default has it
        first = torch.stack([loss(model, batches[i]) for i in range(chains)]).mean()
    for chain in range(chains):
        model.load_state_dict(start)
        torch.manual_seed(seed + chain)
        optimizer = SGMCMC.sgld(model.parameters(), lr=ours.step, localization=1.0, nbeta=ours.n_beta)
        losses = []
        for i in range(steps):
            optimizer.zero_grad()
            value = loss(model, batches[int(torch.randint(len(batches), (), generator=generator))])
            value.backward()
            optimizer.step()
            if i >= steps // 3:
                losses.append(float(value.detach()))
        found.append(sum(losses) / len(losses))
    model.load_state_dict(start)
    return ours.n_beta * (sum(found) / len(found) - float(first))


def measure(settings: Settings) -> dict[str, Any]:
    """Every case and seed."""
    peer = importlib.util.find_spec("devinterp") is not None
    rows = []
    for widths, rank in CASES:
        exact, multiplicity = deep_linear_coefficient(widths, rank)
        model = network(widths, rank)
        ours, theirs = [], []
        for seed in range(settings.seeds):
            batches = data(model, widths[0], settings, seed)
            chosen = Langevin(burn_in=settings.burn_in, draws=settings.draws)
            found = learning_coefficient(model, "squared-error", batches, chosen, seed=seed)
            ours.append(found)
            if peer:
                theirs.append(devinterp(model, batches, found, seed))
        rows.append(
            {
                "widths": list(widths),
                "rank": rank,
                "exact": exact,
                "multiplicity": multiplicity,
                "ours": [one.value for one in ours],
                "error": _rms([one.value - exact for one in ours]),
                "calibrated": [one.calibrated for one in ours],
                "reasons": [one.reason for one in ours],
                "virial": [one.virial for one in ours],
                "gradients": ours[0].gradients,
                "devinterp": theirs or None,
                "devinterp_error": _rms([value - exact for value in theirs]) if theirs else None,
            }
        )
    return {"cases": rows, "peer": peer}


def profile(model: Path) -> dict[str, Any]:
    """What a step in three layers costs, and all of them."""
    probe = open_probe(model, None, None, None)
    parts = layer_parts(probe.model)
    settings = command_settings(DRAWS)
    began = time.perf_counter()
    said = expected_seconds(probe, settings, parts)
    until_said = time.perf_counter() - began
    target = Target(probe.model, "cross-entropy", rows_of(probe), probe.outputs)
    rows: list[dict[str, Any]] = []
    for part in (parts[0], parts[len(parts) // 2], parts[-1]):
        center = sampled_weights(probe.model, part.weights)
        noise = Noise(0)
        rows.append(
            {
                "layer": part.name,
                "weights": target.moving(center),
                "gradient": _median(partial(target.gradient, center, target.batches[0])),
                "forward": _median(partial(target.losses, center)) / len(target.batches),
                "noise": _median(lambda c=center, n=noise: [n.like(w) for w in c.values()]),  # type: ignore[misc]
                "step": step_seconds(target, center, settings),
            }
        )
    mean = sum(row["step"] for row in rows) / len(rows)
    gradients = settings.chains * settings.steps + SEARCHED
    return {
        "layers": len(parts),
        "tokens_of_a_gradient": target.batches[0][0].numel(),
        "gradients_of_a_layer": gradients,
        "profile": rows,
        "seconds_of_all": len(parts) * gradients * mean,
        "seconds_said": said,
        "seconds_until_said": until_said,
        "gradients_in_the_goal": GOAL / (len(parts) * mean),
        "threads": torch.get_num_threads(),
    }


def _median(run: Callable[[], object]) -> float:
    """Seconds, after one run that is slower."""
    run()
    seconds = []
    for _ in range(PROFILED):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _rms(errors: list[float]) -> float:
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def main(settings: Settings) -> None:
    """Measure and print."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.profile is not None:
        print(json.dumps(profile(settings.profile), indent=1))
        return
    results = measure(settings)
    if settings.json:
        print(json.dumps(results))
        return
    for row in results["cases"]:
        said = f"{row['widths']} rank {row['rank']}: λ {row['exact']}, ours " + ", ".join(
            f"{value:.2f}{'' if ok else ' (refused)'}"
            for value, ok in zip(row["ours"], row["calibrated"], strict=True)
        )
        print(f"{said}; rms error {row['error']:.3f} at {row['gradients']} gradients")
        if row["devinterp"]:
            print(
                "   devinterp " + ", ".join(f"{v:.2f}" for v in row["devinterp"]),
                f"{row['devinterp_error']:.3f}",
            )


if __name__ == "__main__":
    main(tyro.cli(Settings))
