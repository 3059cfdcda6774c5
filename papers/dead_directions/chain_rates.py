"""Where a trained chain still shows its rate: 22 variations of one experiment, and three of our optimizers.

Statement. A chain of L maps starts on the canonical approach to a singularity, W_l = diag(1, ..., 1, t_0),
and learns from n samples, all of them in every step, what the chain with t = 0 says. While it descends,

    t          the geometric mean of |(W_l)_dd| over the layers
    G          mean over samples of Σ_c (δ_1^{(c)} · e_d)²: the dead entry of the first layer's factor, with
               label noise σ integrated by its cotangents (`catalogue/probing.py`)
    a          the largest ‖(W_l)_d·, without (W_l)_dd‖ / |(W_l)_dd|, over layers and moments

where a is the alignment error, and G ~ t^s, with s from `rules/`: 2 (L - 1) for the
plain chain. With n finite the inputs are correlated, so that a step may turn the dead row; the population's
loss would hide this.
`fit_rate` refuses a slope where the alignment error is not small beside t^{L-2}.

Variations of a linear chain of three layers, SGD, squared error: activation (relu, gelu, tanh), optimizer
(momentum, Adam, AdamW, Muon), norm (LayerNorm, RMSNorm), loss (cross-entropy), residual (each layer, a
block), depth (2, 4, 6, 8, 12, 20, 32), t_0 (half and twice). With the chain itself these are 22. The paper
also names Shampoo and K-FAC, which are in `shampoo.py` and `kfac.py` and not run here. DDCMomentum and
DDCAdam, this also with a larger ε, come on top.

Symbols and shapes. S seeds, n = SAMPLES, d = WIDTH, float64. W_l (S, d, d), inputs (S, n, d): seeds run side
by side. Budgets are alike in the speed of the descent dt/ds = -t^{2L-1}: t_0^{2L-2} is the same for all L,
and the learning rate is RATE/L, less where residuals make the live directions steep.

Cost: about five minutes on one core with three seeds.
Source: "Dead Directions: Geometric Singular Learning" appendix B.4; what it varies is in its text, its sizes
are lost, and those here are ours.
Limits. A chain that starts aligned, as there. No chain comes near enough: t falls as step^{-1/(2L-2)}, and a
decade of t below 0.1 would take 10⁴ steps at two layers and 10⁸ at three. So no slope here is a rate. The
slope of the last half of the readings is given as a description of the way.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from papers.dead_directions.catalogue.networks import ACTIVATE, NORMS
from papers.outcome import Asked, Result, ResultTable, Row
from topograd.geometry.rates import Rate, fit_rate, local_slope
from topograd.geometry.rules.architectures import Chain
from topograd.geometry.rules.blocks import predict
from topograd.optim.conditioner import DDCMomentum, DDCMuon
from topograd.optim.ddc_adam import DDCAdam
from topograd.optim.gauges import ChainedReLURescale

SAMPLES, WIDTH, SIGMA = 1000, 8, 0.1
START, RATE, STEPS, READINGS = 0.3, 0.3, 3000, 40
"""t_0 at three layers, L times the learning rate of SGD, steps, and moments at which a run is read."""
MakeOptimizer = Callable[[nn.ParameterDict, float], Optimizer]


def _gauges(weights: nn.ParameterDict) -> list[ChainedReLURescale]:
    """The rescalings of every seed's chain, whose activations are linear."""
    seeds = sorted({int(name.split("_")[0]) for name in weights})
    depth = len(weights) // len(seeds)
    return [ChainedReLURescale([f"{seed}_{layer}" for layer in range(depth)]) for seed in seeds]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda w, lr: torch.optim.SGD(w.parameters(), lr=lr),
    "momentum": lambda w, lr: torch.optim.SGD(w.parameters(), lr=lr, momentum=0.9),
    "Adam": lambda w, lr: torch.optim.Adam(w.parameters(), lr=lr / 100),
    "AdamW": lambda w, lr: torch.optim.AdamW(w.parameters(), lr=lr / 100),
    "Muon": lambda w, lr: DDCMuon(w.named_parameters(), lr=lr / 100),
    "DDCAdam": lambda w, lr: DDCAdam(w.named_parameters(), _gauges(w), lr=lr / 100, rms=True),
    "DDCAdam, ε = 1e-4": lambda w, lr: DDCAdam(
        w.named_parameters(), _gauges(w), lr=lr / 100, eps=1e-4, rms=True
    ),
    "DDCMomentum": lambda w, lr: DDCMomentum(w.named_parameters(), _gauges(w), lr=lr / 100),
}
"""By name, for a learning rate of SGD; the others take a part of it, as they do not shrink with gradients."""


@dataclass(frozen=True)
class Variation:
    """A chain, how it is trained, and where it starts."""

    name: str
    chain: Chain = field(default_factory=lambda: Chain(3, WIDTH))
    optimizer: str = "SGD"
    scale: float = 1.0
    """t_0 over the usual one."""
    slower: float = 1.0
    """The learning rate is divided by this, where live directions are steep."""

    @property
    def predicted(self) -> float | None:
        """The slope of G_1 by the rules."""
        return next(result.slope for result in predict(self.chain) if result.node == "G_1")

    @property
    def start(self) -> float:
        """t_0: the same t_0^{2L-2} for all depths."""
        return self.scale * float(START ** (2 / (self.chain.depth - 1)))


def variations() -> list[Variation]:
    """The chain itself and 24 changes, each alone."""
    plain = Chain(3, WIDTH)
    every_layer, block = replace(plain, skips=((0, 1), (1, 2), (2, 3))), replace(plain, skips=((1, 3),))
    results = [Variation("linear, SGD, squared error")]
    results += [Variation(name, replace(plain, activation=name)) for name in ("relu", "gelu", "tanh")]
    results += [Variation(name, optimizer=name) for name in OPTIMIZERS if name != "SGD"]
    results += [Variation(name, replace(plain, norm=name, norm_at=(2,))) for name in ("layernorm", "rmsnorm")]
    results.append(Variation("cross-entropy", replace(plain, loss="cross-entropy")))
    results.append(
        Variation("residual, each layer", every_layer, slower=16)
    )  # live outputs are 2³ times inputs
    results.append(Variation("residual, a block", block, slower=2))
    results += [Variation(f"{depth} layers", Chain(depth, WIDTH)) for depth in (2, 4, 6, 8, 12, 20, 32)]
    results += [Variation(f"start × {scale:g}", scale=scale) for scale in (0.5, 2.0)]
    return results


def run_chain(chain: Chain, weights: Sequence[Tensor], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs or logits (S, n, ·), and the first layer's pre-activations (S, n, d)."""
    below, first = [inputs], inputs
    for layer, weight in enumerate(weights, 1):
        z = below[-1] @ weight.mT
        first = z if layer == 1 else first
        h = z if layer == chain.depth else ACTIVATE[chain.activation](z)
        for a, b in chain.skips:
            h = h + below[a] if b == layer else h
        below.append(NORMS[chain.norm](h) if layer in chain.norm_at else h)
    if chain.loss == "squared-error":
        return below[-1], first
    return below[-1] @ simplex(chain.width, inputs).mT, first


def simplex(width: int, like: Tensor) -> Tensor:
    """B (d + 1, d): orthonormal columns, each with the sum zero, so that no logit shift is in reach."""
    ones = torch.ones(width + 1, 1, dtype=like.dtype, device=like.device)
    rest = torch.eye(width + 1, width, dtype=like.dtype, device=like.device)
    return torch.linalg.qr(torch.cat((ones, rest), 1)).Q[:, 1:]


def loss_of(chain: Chain, outputs: Tensor, wanted: Tensor) -> Tensor:
    """The sum over seeds of each one's mean loss; the wanted outputs are those of the chain at t = 0."""
    if chain.loss == "squared-error":
        return (outputs - wanted).square().sum(-1).mean(-1).sum() / 2
    return -(wanted.softmax(-1) * outputs.log_softmax(-1)).sum(-1).mean(-1).sum()


def _cotangents(chain: Chain, outputs: Tensor) -> Iterator[Tensor]:
    """Gradients at the output whose squares add to the expectation over labels."""
    p = outputs.detach().softmax(-1)
    for c, unit in enumerate(torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)):
        if chain.loss == "squared-error":
            yield (SIGMA * unit).expand_as(outputs)
        else:
            yield p[..., c : c + 1].sqrt() * (p - unit)


@dataclass(frozen=True)
class Moment:
    """t, G and alignment error of every seed: (S,) each."""

    t: Tensor
    G: Tensor
    error: Tensor


def read_moment(chain: Chain, weights: Sequence[Tensor], inputs: Tensor) -> Moment:
    """The dead entry, projected sample by sample."""
    given = inputs.requires_grad_()
    outputs, first = run_chain(chain, [weight.detach() for weight in weights], given)
    G = torch.zeros(len(inputs), dtype=inputs.dtype, device=inputs.device)
    for cotangent in _cotangents(chain, outputs):
        (delta,) = torch.autograd.grad(outputs, first, cotangent, retain_graph=True)
        G += delta[..., -1].square().mean(1)
    rows = torch.stack([weight.detach()[:, -1] for weight in weights])  # (L, S, d)
    dead = rows[..., -1].abs()
    return Moment(dead.log().mean(0).exp(), G, (rows[..., :-1].norm(dim=-1) / dead).amax(0))


def descend(variation: Variation, seeds: int, steps: int = STEPS) -> list[Moment]:
    """Train every seed, and read on the way."""
    chain, generator = variation.chain, torch.Generator().manual_seed(0)
    inputs = torch.randn(seeds, SAMPLES, chain.width, generator=generator, dtype=torch.float64)
    live = torch.ones(chain.width - 1, dtype=torch.float64)
    start, end = (torch.diag(torch.cat((live, live.new_tensor([t])))) for t in (variation.start, 0.0))
    names = [(seed, layer) for seed in range(seeds) for layer in range(chain.depth)]
    weights = nn.ParameterDict({f"{s}_{layer}": nn.Parameter(start.clone()) for s, layer in names})
    wanted, _ = run_chain(chain, [end] * chain.depth, inputs)
    optimizer = OPTIMIZERS[variation.optimizer](weights, RATE / chain.depth / variation.slower)
    every, moments = max(1, steps // READINGS), []
    for step in range(steps + 1):
        stacked = [
            torch.stack([weights[f"{s}_{layer}"] for s in range(seeds)]) for layer in range(chain.depth)
        ]
        if step % every == 0:
            moments.append(read_moment(chain, stacked, inputs.detach()))
        optimizer.zero_grad()
        loss_of(chain, run_chain(chain, stacked, inputs)[0], wanted).backward()
        optimizer.step()
    return moments


def rates(moments: Sequence[Moment], depth: int) -> list[Rate]:
    """One fit for each seed; the largest alignment error of all moments goes with it."""
    results = []
    for seed in range(len(moments[0].t)):
        series = {float(moment.t[seed]): float(moment.G[seed]) for moment in moments if moment.t[seed] > 0}
        error = max(float(moment.error[seed]) for moment in moments)
        results.append(
            fit_rate(
                list(series),
                list(series.values()),
                estimator="expected Fisher",
                noise="noisy",
                alignment_error=error,
                depth=depth,
            )
        )
    return results


def slopes_on_the_way(moments: Sequence[Moment]) -> list[float]:
    """The slope over the last half of the readings, seed by seed; a seed whose dead entry is 0 has nan."""
    late = moments[len(moments) // 2 :]
    results = []
    for seed in range(len(late[0].t)):
        series = {float(m.t[seed]): float(m.G[seed]) for m in late if m.t[seed] > 0 and m.G[seed] > 0}
        results.append(local_slope(list(series), list(series.values())) if len(series) > 1 else math.nan)
    return results


def run(args: Asked) -> Result:
    """Every variation; with the preset tiny, three of them for some steps."""
    every, steps, seeds = variations(), args.steps, args.seeds
    if args.preset == "tiny":
        every = every[:3]
    rows: list[Row] = []
    for variation in every:
        sized = replace(variation, chain=replace(variation.chain, width=args.width))
        key = {"name": variation.name, "seeds": seeds}
        rows.append(args.kept.row(key, partial(descended, sized, seeds, steps)))
        args.on_more(len(rows), len(every))
    return Result(
        setting=(
            f"Chains of width {args.width} that start on the canonical approach to a singularity and learn "
            f"from {SAMPLES} samples for {steps} steps."
        ),
        rows=rows,
        tables=(table(rows),),
        seeds=seeds,
    )


def descended(variation: Variation, seeds: int, steps: int = STEPS) -> Row:
    """One variation, as plain numbers."""
    moments = descend(variation, seeds, steps)
    return {
        "name": variation.name,
        "predicted": variation.predicted,
        "t": [float(moments[0].t.mean()), float(moments[-1].t.mean())],
        "slopes": slopes_on_the_way(moments),
        "rates": [asdict(rate) for rate in rates(moments, variation.chain.depth)],
    }


def table(rows: Sequence[Row]) -> ResultTable:
    """What each way shows, how many seeds have a rate, and why the others have none."""
    cells = []
    for row in rows:
        read = [rate for rate in row["rates"] if rate["refused"] is None]
        slopes = row["slopes"]
        spread = f" ± {statistics.stdev(slopes):.1g}" if len(slopes) > 1 else ""
        why = next((rate["refused"].split(":")[0] for rate in row["rates"] if rate["refused"]), "")
        cells.append(
            (
                row["name"],
                f"{row['predicted']:g}",
                f"{statistics.fmean(slopes):.3f}{spread}",
                f"{max(rate['alignment_error'] for rate in row['rates']):.2g}",
                f"{row['t'][0]:.3f} → {row['t'][1]:.3f}",
                f"{len(read)}/{len(row['rates'])}",
                why,
            )
        )
    header = ("variation", "predicted", "slope on the way", "alignment error", "t", "rates", "else")
    return ResultTable("The slope of G_1 along training", header, tuple(cells))
