"""The sampled learning coefficient against exact ones, at equal gradients, beside devinterp where it is.

    python benchmarks/learning_coefficient.py [--seeds 3] [--draws 200] [--json]

Each case is a linear network at the most singular parameter of its truth, where the local coefficient is the
global one and known exactly (`papers/dead_directions/families/deep_linear.py`). Ours is
`geometry.learning_coefficient` with its defaults; the other is devinterp's own SGMCMC.sgld with its recipe
(loss of the batches along the chain less one loss at the start, which all chains share), with our step, γ and
nβ, as it looks for none. devinterp is no dependency: give its place with PYTHONPATH, or it is left out.
Errors are over seeds, each with its data.
"""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import tyro
from torch import Tensor, nn

import clone  # noqa: F401  (for what is not installed)
from papers.dead_directions.families.deep_linear import deep_linear_coefficient
from topograd.geometry import learning_coefficient
from topograd.geometry.singular.coefficient import LearningCoefficient
from topograd.geometry.singular.langevin import Langevin

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


def _rms(errors: list[float]) -> float:
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def main(settings: Settings) -> None:
    """Measure and print."""
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
